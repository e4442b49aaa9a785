"""Kernels of inference in every compiled variant, against the definitions; and constants that two traces share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.ops.native_inference import ConstantUnit, Gate, conv_bias, find_bottleneck, find_dense, find_gate
from headrace.ops.native_kernels import find_window
from headrace.ops.native_units import BatchNorm
from headrace.ops.tracing import collecting, constant, using, weights_are_constant

from . import naive
from .test_native_units import activation, variant  # noqa: F401  (the fixture runs each test with each library)

RNG = np.random.default_rng(7)


def drawn(*shape: int) -> Any:
    return jnp.array(RNG.standard_normal(shape), jnp.float32)


def drawn_gate(c: int, r: int, functions: tuple[str, str]) -> Gate:
    return Gate((drawn(c, r) / c**0.5, drawn(r)), (drawn(r, c) / r**0.5, drawn(c)), *functions)


def gated(x: np.ndarray, gate: Gate) -> np.ndarray:
    """Return x times its gate, in float64 by the definition."""
    (w1, b1), (w2, b2) = (tuple(np.asarray(a, np.float64) for a in layer) for layer in (gate.reduce, gate.expand))
    v = activation(gate.activation, x.astype(np.float64).mean((1, 2)) @ w1 + b1)[0] @ w2 + b2
    factors = np.clip(v + 3, 0, 6) / 6 if gate.gate == "hard_sigmoid" else 1 / (1 + np.exp(-v))
    return x * factors[:, None, None]


@pytest.mark.parametrize("shape", [(3, 5, 4, 24), (1, 40, 30, 72), (2, 1, 1, 300)])
@pytest.mark.parametrize("functions", [("relu", "hard_sigmoid"), ("swish", "sigmoid")])
def test_a_gate_follows_the_definition(shape: Any, functions: tuple[str, str]) -> None:
    x, gate = drawn(*shape), drawn_gate(shape[3], 20, functions)
    with collecting() as values:
        found = find_gate(x, gate, "on")
    assert len(values) == 1
    np.testing.assert_allclose(np.asarray(found), gated(np.asarray(x), gate), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "channels", "window", "stride", "padding", "acts", "functions"),
    [
        ((1, 14, 14, 6), 200, 3, 1, "SAME", ("hard_swish", "hard_swish"), None),  # by panels; the last has 8 channels
        ((3, 9, 5, 20), 40, 5, 2, ((2, 2), (2, 2)), ("relu", "relu"), ("relu", "hard_sigmoid")),
        ((2, 7, 3, 5), 130, 3, 1, ((0, 1), (2, 0)), ("swish", "swish"), ("swish", "sigmoid")),
        ((1, 90, 61, 3), 72, 5, 1, "SAME", ("relu6", None), ("relu", "sigmoid")),  # in bands of rows
        ((1, 80, 78, 4), 33, 3, 2, "VALID", (None, "relu6"), None),
        ((1, 3, 90, 3), 20, 3, 1, "SAME", ("relu", "hard_swish"), None),  # as many bands as rows
        ((1, 4, 4, 700), 70, 3, 1, "SAME", ("hard_swish", "relu"), None),  # inputs of several passes
    ],
)
def test_a_depthwise_convolution_of_expanded_images(
    shape: Any, channels: int, window: int, stride: int, padding: Any, acts: Any, functions: Any
) -> None:
    x, w1, w2 = drawn(*shape), drawn(1, 1, shape[3], channels) / shape[3] ** 0.5, drawn(window, window, 1, channels)
    gate = None if functions is None else drawn_gate(channels, 12, functions)
    norm = BatchNorm(
        gamma=drawn(channels), beta=drawn(channels), epsilon=1e-3, running=(drawn(channels), drawn(channels) ** 2)
    )
    between = jax.ShapeDtypeStruct((*shape[:3], channels), jnp.float32)
    with collecting() as values:
        windows = find_window(x, w1, 1, "SAME", 1, "on"), find_window(between, w2, stride, padding, channels, "on")
        assert windows[0] is not None
        assert windows[1] is not None
        first = ConstantUnit(window=windows[0], kernel=w1, norm=norm, bias=None, activation=acts[0])
        second = ConstantUnit(window=windows[1], kernel=w2, norm=None, bias=drawn(channels), activation=acts[1])
        found = find_bottleneck(x, first, second, gate)
        assert find_bottleneck(x, second, first, gate) is None
        assert find_bottleneck(x.astype(jnp.bfloat16), first, second, gate) is None
    assert len(values) == 1
    assert find_bottleneck(x, first, second, gate) is None  # it has no gradients
    mean, variance = (np.asarray(a, np.float64) for a in norm.running or ())
    z = (np.asarray(x, np.float64) @ np.asarray(w1[0, 0], np.float64) - mean) / np.sqrt(variance + norm.epsilon)
    z = activation(acts[0], z * np.asarray(norm.gamma) + np.asarray(norm.beta))[0]
    y = naive.conv(z, np.asarray(w2), stride, padding, channels)[0] + np.asarray(second.bias)
    wanted = activation(acts[1], y)[0]
    wanted = wanted if gate is None else gated(wanted, gate)
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_convolution_with_bias_and_activation(has_bias: bool) -> None:
    x, w, b, residual = drawn(2, 6, 5, 3), drawn(3, 3, 3, 20), drawn(20), drawn(2, 6, 5, 20)
    window = find_window(x, w, 1, "SAME", 1, "on")
    assert window is not None
    found = conv_bias(x, w, b if has_bias else None, window, residual, "relu6")
    values = naive.conv(np.asarray(x), np.asarray(w), 1, "SAME")[0] + np.asarray(residual) + np.asarray(b) * has_bias
    np.testing.assert_allclose(np.asarray(found), np.clip(values, 0, 6), atol=2e-5)


@pytest.mark.parametrize(("n", "c", "o"), [(1, 1024, 300), (30, 70, 10)])
def test_a_dense_layer_follows_the_definition(n: int, c: int, o: int) -> None:
    x, w, b = drawn(n, c), drawn(c, o) / c**0.5, drawn(o)
    with collecting() as values:
        found = find_dense(x, w, b, "on")
        assert find_dense(x, w, b, "off") is None
        assert find_dense(x.astype(jnp.bfloat16), w, b, "on") is None
    assert len(values) == 1
    wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64) + np.asarray(b)
    np.testing.assert_allclose(np.asarray(found), wanted, atol=2e-5)
    assert find_dense(x, w, b, "on") is None  # it has no gradients


def test_without_constant_weights_xla_gates() -> None:
    """Training needs gradients, which this kernel does not have."""
    x = drawn(1, 4, 4, 8)
    assert find_gate(x, drawn_gate(8, 2, ("relu", "sigmoid")), "on") is None
    with collecting():
        assert find_gate(x, drawn_gate(8, 2, ("gelu", "sigmoid")), "on") is None


def test_constants_are_computed_in_one_trace_and_used_in_the_next() -> None:
    computed = []

    def network(x: float) -> float:
        return x * constant(lambda: computed.append(1) or 3) + constant(lambda: computed.append(1) or 4)

    assert network(2) == 10
    with collecting() as values:
        assert weights_are_constant()
        network(2)
    assert values == [3, 4]
    assert len(computed) == 4
    with using([5, 6]):
        assert network(2) == 16
    assert len(computed) == 4
    assert not weights_are_constant()
    with pytest.raises(AssertionError, match="fewer constants"), using([5, 6, 7]):
        network(2)
