"""Convolutions for several backends at once: each gets its own form, all the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.core.target import Target
from headrace.engine.call_loop import make_call
from headrace.engine.devices import replica_mesh
from headrace.engine.step import make_step
from headrace.ops.conv import conv2d, conv2d_plain
from headrace.ops.tracing import made_for, portable, target
from tests.harness import OPTIONS, first_state, make_block, make_samples, make_spec, small_excited


@pytest.mark.parametrize(("groups", "inputs", "outputs"), [(1, 8, 4), (8, 8, 8), (2, 8, 4)])
def test_each_platform_has_its_form_and_the_numbers_agree(groups, inputs, outputs):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 9, 9, inputs)).astype(np.float32)
    w = rng.normal(size=(3, 3, inputs // groups, outputs)).astype(np.float32)
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)

    def function(x):
        return conv2d(x, jnp.asarray(w), 2, "SAME", groups)

    with portable():
        everywhere = jax.export.export(jax.jit(function), platforms=("cpu", "cuda", "tpu"))(shape)
        cuda = jax.export.export(jax.jit(function), platforms=("cuda",))(shape)
    assert f"feature_group_count = {groups} : i64" in cuda.mlir_module(), "one convolution, as XLA likes it there"
    expected = conv2d_plain(jnp.asarray(x), jnp.asarray(w), 2, ((1, 1), (1, 1)), groups)
    np.testing.assert_allclose(everywhere.call(x), expected, atol=1e-5)


H200, CPU = Target(platform="gpu", capability="9.0"), Target(platform="cpu")


def lowered(what: Target) -> str:
    """Return the step of a network with norms, gates and depthwise convolutions, made for a target."""
    config = config_from(OPTIONS | {"precision": "16.32"})
    images, labels = (array[:1] for array in make_samples(size=8))
    with made_for(what):
        spec = make_spec(config, small_excited(), 16, replicas=1, count=1, cpu_kernels="off")
        arguments = first_state(spec), None, make_block(images, labels, 1), np.array([0, 1], np.int32)
        traced = make_call(make_step(spec), replica_mesh(jax.devices()[:1]), arguments[2]).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda" if what.platform == "gpu" else "cpu",)).as_text()


def test_what_was_traced_for_one_target_is_not_taken_for_another():
    """JAX keeps what it has traced; whatever depends on the target is told it."""
    alone = []
    for what in (CPU, H200):
        jax.clear_caches()
        alone.append(lowered(what))
    assert alone[0] != alone[1]
    assert [lowered(CPU), lowered(H200)] == alone
    jax.clear_caches()
    assert [lowered(CPU), lowered(H200)] == alone
    assert target() == CPU
