"""Convolution on the CPU: values and both gradients against the definition, against JAX's own, and inside a loop."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from headrace import ops
from headrace.ops.conv import conv2d_plain
from headrace.ops.pool import pad_pixels
from headrace.ops.tracing import on_cpu

from . import naive

conv2d = partial(ops.conv2d, kernels="off")  # XLA's: test_native_units.py is about the others


@dataclass(frozen=True)
class Case:
    size: tuple[int, int]
    window: int
    stride: int
    padding: Any = "SAME"
    channels: tuple[int, int] = (3, 4)
    groups: int = 1
    images: int = 2


CASES = [
    Case((8, 8), 1, 1),
    Case((8, 8), 1, 2),
    Case((7, 9), 1, 2, channels=(4, 8)),
    Case((8, 8), 3, 1),
    Case((8, 8), 3, 2),
    Case((9, 7), 3, 2),
    Case((7, 8), 3, 1, "VALID"),
    Case((8, 9), 3, 2, "VALID"),
    Case((9, 8), 5, 1),
    Case((9, 8), 5, 2),
    Case((11, 8), 7, 2),
    Case((12, 10), 7, 2, ((3, 3), (3, 3))),
    Case((6, 6), 3, 1, ((0, 2), (3, 1))),
    Case((9, 6), 3, 2, ((2, 0), (0, 1))),
    Case((10, 10), 3, 3, ((1, 1), (1, 1))),
    Case((5, 5), 3, 1, images=37),  # more than one chunk, unequal
    Case((6, 6), 3, 2, channels=(4, 8), groups=2),
    Case((7, 7), 3, 1, channels=(6, 6), groups=6),
    Case((7, 6), 5, 2, channels=(4, 4), groups=4),
    Case((6, 6), 3, 1, channels=(4, 8), groups=4),  # two filters a group: not depthwise
    Case((5, 6), 3, 2, channels=(96, 48), groups=6),  # two groups at a time, unequal in and out
    Case((5, 4), 3, 1, channels=(40, 40), groups=5),  # four groups, and the fifth
    Case((6, 5), 3, 1, ((2, 0), (0, 1)), channels=(3, 3), groups=3),  # depthwise, padded unevenly
]


def arrays(case: Case):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(case.images, *case.size, case.channels[0])).astype(np.float32)
    shape = (case.window, case.window, case.channels[0] // case.groups, case.channels[1])
    w = rng.normal(size=shape).astype(np.float32)
    (y,) = naive.conv(x, w, case.stride, case.padding, case.groups)
    return x, w, rng.normal(size=y.shape).astype(np.float32)


def close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())


def with_gradients(conv, x, w, dy):
    y, gradients = jax.vjp(conv, x, w)
    return y, *gradients(dy)


def compiled(conv, *arrays):
    return jax.jit(partial(with_gradients, conv))(*arrays)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_by_the_definition(case):
    assert on_cpu()
    x, w, dy = arrays(case)

    def conv(x, w):
        return conv2d(x, w, case.stride, case.padding, case.groups)

    close(compiled(conv, x, w, dy), naive.conv(x, w, case.stride, case.padding, case.groups, dy))


@pytest.mark.parametrize("case", [CASES[4], CASES[5], CASES[11], CASES[12], CASES[16]], ids=str)
def test_the_plain_form_and_its_gradients_agree(case):
    x, w, dy = arrays(case)
    pads = pad_pixels(case.padding, case.size, (case.window, case.window), case.stride)
    plain = compiled(lambda x, w: conv2d_plain(x, w, case.stride, pads, case.groups), x, w, dy)
    ours = compiled(lambda x, w: conv2d(x, w, case.stride, case.padding, case.groups), x, w, dy)
    close(ours, plain)


def test_gradients_inside_a_loop_are_those_outside():
    x, w, dy = arrays(CASES[4])

    def body(carry, _):
        return carry + 1, with_gradients(lambda x, w: conv2d(x, w, 2), x * carry, w, dy)

    _, (y, dx, dw) = jax.jit(lambda x: lax.scan(body, jnp.float32(1), None, length=2))(x)
    for i in range(2):
        close((y[i], dx[i], dw[i]), naive.conv(x * (i + 1), w, 2, "SAME", 1, dy))


def test_no_gradient_convolution_leaves_the_canonical_layout():
    """XLA's CPU backend is some 15 times slower on any other layout inside a loop."""
    x, w, dy = arrays(CASES[4])
    text = jax.jit(partial(with_gradients, lambda x, w: conv2d(x, w, 2))).lower(x, w, dy).as_text()
    layouts = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    assert len(layouts) == 3
    assert all("[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]" in line for line in layouts)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_in_half_precision_out(dtype):
    x, w, dy = (jnp.array(a, dtype) for a in arrays(CASES[3]))
    found = compiled(conv2d, x, w, dy)
    assert all(a.dtype == dtype for a in found)
    wanted = naive.conv(np.array(x), np.array(w), 1, "SAME", 1, np.array(dy, np.float64))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.array(a, np.float64), b, atol=0.01 * np.abs(b).max())


def test_dense_sums_in_float32():
    x = np.full((1, 4096), 1 + 2**-7)
    w, b = np.full((4096, 2), 2**-12), np.array([1.0, -1.0])
    y = ops.dense(jnp.array(x, jnp.bfloat16), jnp.array(w, jnp.bfloat16), jnp.array(b))
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, x @ w + b[None], rtol=1e-6)
