"""The forward pass: the mean over an image and its mirror image, and what is computed once for many calls."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.engine.devices import replica_mesh
from headrace.engine.forward import LOGITS, EvalSpec, WholeForward
from headrace.engine.pipeline import step_plan
from headrace.engine.pipeline.evaluate_stages import make_staged_evaluation
from headrace.model.activations import Activation
from headrace.model.composite import Chain, Residual
from headrace.model.context import Ctx
from headrace.model.gates import SqueezeExcite
from headrace.model.layers import Conv, Dense, GlobalAveragePool, Layer, MaxPool, Relu
from headrace.model.network import Network
from headrace.model.norm import Norm, NormSpec
from tests.harness import AsSent
from tests.model.build import compute, network


def test_flip_and_shift_average_the_logits_of_mirrored_and_of_moved_images():
    net = network("toy_model")
    weights = net.init(0)
    images = np.random.default_rng(0).normal(size=(2, 4, 32, 32, 3)).astype(np.float32)
    block = {"images": jnp.array(images), "labels": jnp.zeros((2, 4), jnp.int32)}

    def logits(flip: bool, shift: int = 0) -> np.ndarray:
        spec = EvalSpec(
            network=net,
            fetch=AsSent(),
            compute_dtype=jnp.float32,
            num_replicas=1,
            reducer=LOGITS,
            flip=flip,
            shift=shift,
        )
        forward = WholeForward(replica_mesh(jax.devices()[:1]), spec)
        placed = forward.place(weights)
        program = forward.compile(placed, {}, block)
        return np.asarray(program(program.prepare(placed, {}, block), {}, block))

    flat = images.reshape(8, 32, 32, 3)
    both = [compute(net, *weights, x, Ctx(train=False))[0] for x in (flat, flat[:, :, ::-1])]
    np.testing.assert_allclose(logits(False).reshape(8, -1), both[0], atol=1e-5)
    np.testing.assert_allclose(logits(True).reshape(8, -1), (both[0] + both[1]) / 2, atol=1e-5)
    assert np.abs(both[0] - both[1]).max() > 0.01

    wide = np.pad(flat, ((0, 0), (1, 1), (1, 1), (0, 0)), "reflect")
    ends = [compute(net, *weights, x, Ctx(train=False))[0] for x in (wide[:, :-2, :-2], wide[:, 2:, 2:])]
    np.testing.assert_allclose(logits(False, 1).reshape(8, -1), both[0] / 2 + (ends[0] + ends[1]) / 4, atol=1e-5)
    six = [compute(net, *weights, x[:, :, ::-1], Ctx(train=False))[0] for x in (wide[:, :-2, :-2], wide[:, 2:, 2:])]
    mean = (both[0] + both[1]) / 4 + (ends[0] + ends[1] + six[0] + six[1]) / 8
    np.testing.assert_allclose(logits(True, 1).reshape(8, -1), mean, atol=1e-5)


def test_a_validation_computes_variances_as_training_does():
    """Of values around 300 that differ by 0.05, one pass over the images leaves nothing of the variance."""
    block = Norm(spec=NormSpec(kind="group", num_groups=1, epsilon=0.0))
    x = np.random.default_rng(0).normal(300, 0.05, (2, 8, 8, 4)).astype(np.float32)
    params, stats = block.init(lambda _name: np.random.default_rng(0), (8, 8, 4))
    spec = EvalSpec(network=network("toy_model"), fetch=AsSent(), compute_dtype=jnp.float32, num_replicas=1)
    wide = x.astype(np.float64)
    axes = (1, 2, 3)
    wanted = (wide - wide.mean(axes, keepdims=True)) / wide.std(axes, keepdims=True)
    found = [
        block.apply(params, stats, jnp.array(x), replace(spec, stable_norm=stable).context())[0]
        for stable in (True, False)
    ]
    np.testing.assert_allclose(found[0], wanted, atol=5e-3)
    assert np.abs(found[1] - wanted).max() > 0.1, "the case that two passes are for"


def test_stages_of_an_evaluation_are_compiled_with_its_options(monkeypatch):
    net, options = network("toy_model"), {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    spec = EvalSpec(
        network=net,
        fetch=AsSent(),
        compute_dtype=jnp.float32,
        num_replicas=1,
        compiler_options=tuple(options.items()),
    )
    given, build = [], step_plan.compile_program
    monkeypatch.setattr(step_plan, "compile_program", lambda what, how: given.append(how) or build(what, how))
    staged = make_staged_evaluation(spec, [(0, 2), (2, len(net.blocks))], np.array([jax.devices()[:2]]), [0, 1])
    weights = staged.place(net.init(0))
    images, labels = np.zeros((1, 4, 32, 32, 3), np.float32), np.zeros((1, 4), np.int32)
    block = staged.put({"images": images, "labels": labels, "mask": np.ones((1, 4), np.float32)}, "batches")
    staged.compile(weights, {}, block)
    assert given == [options] * 3, "two stages, and the sum over replicas"


def test_python_traces_an_evaluation_once(monkeypatch):
    net, traced, apply = network("toy_model"), [], Network.apply_range
    monkeypatch.setattr(Network, "apply_range", lambda *given: traced.append(1) or apply(*given))
    spec = EvalSpec(
        network=net,
        fetch=AsSent(),
        compute_dtype=jnp.float32,
        num_replicas=1,
        cpu_kernels="off",
    )
    block = {
        "images": jnp.zeros((2, 4, 32, 32, 3)),
        "labels": jnp.zeros((2, 4), jnp.int32),
        "mask": jnp.ones((2, 4), jnp.float32),
    }
    forward = WholeForward(replica_mesh(jax.devices()[:1]), spec)
    placed = forward.place(net.init(0))
    program = forward.compile(placed, {}, block)
    sums = program(program.prepare(placed, {}, block), {}, block)
    assert len(traced) == 1
    assert sums["count"] == 8


@dataclass(frozen=True)
class OneByOne(Layer):
    """A user's layer that applies another one inside a loop."""

    layer: Layer

    def shape(self, hwc: Any) -> Any:
        return self.layer.shape(hwc)

    def init(self, rng_at: Any, hwc: Any) -> Any:
        return self.layer.init(rng_at, hwc)

    def apply(self, params: Any, stats: Any, x: Any, ctx: Ctx) -> Any:
        return jax.lax.map(lambda one: self.layer.apply(params, stats, one[None], ctx)[0][0], x), {}

    def cost(self, hwc: Any) -> Any:
        return self.layer.cost(hwc)


def mixed_network(*more: tuple[str, Layer]) -> Network:
    """Return all that inference computes in another way than training does."""
    widen = (("conv", Conv(channels=24, kernel=1)), ("norm", Norm()), ("act", Activation("hard_swish")))
    deep = (
        ("deep", Conv(channels=24, groups=24)),
        ("norm2", Norm()),
        ("gate", SqueezeExcite(width=8, activation="relu", gate="hard_sigmoid")),
    )
    body = Chain((*widen, *deep, ("out", Conv(channels=16, kernel=1)), ("norm3", Norm())))
    blocks = (("stem", Chain((("conv", Conv(channels=16, kernel=3, bias=True)), ("relu", Relu())))),)
    blocks += (("pool", MaxPool(window=3, stride=2, padding=((1, 1), (1, 1)))), ("unit", Residual(body=body)), *more)
    blocks += (("mean", GlobalAveragePool()), ("predictions", Dense(features=5, logits=True)))
    return Network(name="mixed", blocks=blocks, input_hwc=(11, 9, 3), num_classes=5)


LOOP = (("loop", OneByOne(Chain((("conv", Conv(channels=16)), ("norm", Norm()))))),)


@pytest.mark.parametrize(("more", "dtype"), [((), jnp.float32), (LOOP, jnp.float32), ((), jnp.bfloat16)])
def test_what_follows_from_the_weights_alone_is_computed_once(more, dtype):
    net = mixed_network(*more)
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda a: a + rng.uniform(0, 0.3, a.shape).astype(np.float32), net.init(0))
    block = {"images": jnp.array(rng.normal(size=(2, 3, 11, 9, 3)), jnp.float32)}
    mean, std = np.array([0.1, 0.2, 0.3], np.float32), jnp.array([0.9, 1.0, 1.1])  # arguments of JAX's program, too

    class Normalised(AsSent):
        def __call__(self, _resident, micro):
            return (micro["images"] - mean[None, None, None]) / std[None, None, None], None

    spec = EvalSpec(
        network=net,
        fetch=Normalised(),
        compute_dtype=dtype,
        num_replicas=1,
        reducer=LOGITS,
    )
    logits = {}
    for mode in ("on", "off"):
        forward = WholeForward(replica_mesh(jax.devices()[:1]), replace(spec, cpu_kernels=mode))
        placed = forward.place(weights)
        program = forward.compile(placed, {}, block)
        prepared = program.prepare(placed, {}, block)
        logits[mode] = np.asarray(program(prepared, {}, block))
        if mode == "on":
            text = program.forward.as_text() or ""
            assert "headrace_convolve" in text
            assert ("headrace_bottleneck" if dtype == jnp.float32 else "headrace_gate") in text
            assert "headrace_max_pool" in text
            assert "headrace_pack" not in text
            # Two convolutions, those of the bottleneck with its gate, a dense layer; of 16-bit values four convolutions
            # and a gate. Those in the loop are packed in each call.
            assert len(prepared[1]) == (4 if dtype == jnp.float32 else 5)
            if dtype == jnp.float32:  # conversions count as uses
                assert len(prepared[0]) == (1 if not more else 6)  # the other weights are no arguments
    limit = 1e-4 if dtype == jnp.float32 else 3e-2  # XLA rounds to 16 bits more often
    np.testing.assert_allclose(logits["on"], logits["off"], rtol=limit, atol=limit * np.abs(logits["off"]).max())
