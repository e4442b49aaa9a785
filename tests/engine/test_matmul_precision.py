"""--matmul-precision in the programs that are compiled: the precision that StableHLO states for each product."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.engine.call_loop import make_call, put_on
from headrace.engine.devices import replica_mesh
from headrace.engine.forward import EvalSpec, make_forward
from headrace.engine.kept_programs import key
from headrace.engine.pipeline import step_plan
from headrace.engine.precision import make_precision
from headrace.engine.step import make_step
from headrace.model.network import Network
from tests.harness import (
    AsSent,
    Stages,
    first_state,
    make_block,
    make_samples,
    make_spec,
    make_stages,
    run_stages,
    small_excited,
)

# The words of jax.lax.Precision: XLA's GPU backend multiplies float32 in TF32 at DEFAULT and HIGH, and not at HIGHEST.
WORDS = {"default": "DEFAULT", "tf32": "HIGH", "float32": "HIGHEST"}
SAMPLES = make_samples(8, size=8)


def precisions(text: str) -> set[str]:
    """Return the precision that a program states for its products of float32 values; nothing stated is the default."""
    found = set()
    for line in text.splitlines():
        # Not of one number: the norm of all gradients is always of whole float32 values.
        if re.search(r"stablehlo\.(convolution|dot_general).*-> tensor<\w*x\w*f32>", line):
            stated = re.findall(r"precision(?:_config)? = \[(?:#stablehlo<precision )?(\w+)", line)
            found.add(stated[0] if stated else "DEFAULT")
    return found


def config(**options: Any) -> Any:
    return config_from({"model": "cifar_resnet8", "optimizer": "muon", "cpu_kernels": "off"} | options)


def spec_of(network: Network, **options: Any) -> Any:
    return make_spec(config(**options), network, 8, replicas=1, count=2, cpu_kernels="off")


def train_text(**options: Any) -> str:
    spec, mesh = spec_of(small_excited(), **options), replica_mesh(jax.devices()[:1])
    block = put_on(mesh, make_block(*SAMPLES, 2), "steps")
    call = make_call(make_step(spec), mesh, block, spec.packing)
    return call.lower(first_state(spec), None, block, np.array([0, 1], np.int32)).as_text()


@pytest.mark.parametrize("value", WORDS)
def test_every_product_of_a_training_program_states_it(value):
    """Forward and backward, and those of the optimizer: Muon multiplies matrices."""
    assert precisions(train_text(matmul_precision=value)) == {WORDS[value]}


def test_programs_of_stages_state_it_in_both_passes_and_the_update(monkeypatch):
    texts = []
    compile_program = step_plan.compile_program

    def record(lowered: Any, options: Any) -> Any:
        texts.append(lowered.as_text())
        return compile_program(lowered, options)

    monkeypatch.setattr(step_plan, "compile_program", record)
    wanted = config(matmul_precision="float32")
    spec, dispatcher = make_stages(wanted, small_excited(), SAMPLES[0], Stages(count=2), cpu_kernels="off")
    run_stages(spec, dispatcher, *SAMPLES)
    found = [precisions(text) for text in texts]
    assert found.count({"HIGHEST"}) >= 6  # forward, backward and update of two stages
    assert set().union(*found) == {"HIGHEST"}


def test_validation_states_it():
    network = small_excited()
    params, stats = network.init(0)
    spec = EvalSpec(
        network=network,
        fetch=AsSent(),
        compute_dtype=jnp.float32,
        num_replicas=1,
        cpu_kernels="off",
    )
    block = {"images": SAMPLES[0], "labels": SAMPLES[1], "mask": np.ones(SAMPLES[1].shape, np.float32)}
    for value, word in WORDS.items():
        program = make_forward(replace(spec, matmul_precision=value), replica_mesh(jax.devices()[:1]))
        assert precisions(program.lower(((params, stats), None), None, block).as_text()) == {word}


def test_it_is_for_float32_alone_and_part_of_what_names_a_program():
    numerics = config(matmul_precision="float32", precision="16.32").numerics
    assert make_precision(numerics, config().batch).matmul_precision == "default"
    names = {key(spec_of(small_excited(), matmul_precision=value).precision) for value in WORDS}
    assert len(names) == len(WORDS)


def test_the_default_leaves_what_the_user_has_set_in_jax():
    with jax.default_matmul_precision("float32"):
        assert precisions(train_text()) == {"HIGHEST"}
