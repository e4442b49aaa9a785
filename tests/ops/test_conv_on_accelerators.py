"""The forms made for accelerators, checked here on the CPU against the plain formula and its own gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace import ops
from headrace.ops.conv import conv2d_folded, conv2d_plain
from headrace.ops.depthwise import depthwise_on_accelerator, depthwise_views
from headrace.ops.pool import pad_pixels


def leaves_close(found, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize(("half_partials", "product"), [(False, "f32"), (True, "bf16")])
def test_half_partials_lets_products_return_16_bits(half_partials, product, monkeypatch):
    monkeypatch.setattr("headrace.ops.conv.on_cpu", lambda: False)
    x, w, b = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16), jnp.ones(4, jnp.float32)
    traced = str(jax.make_jaxpr(lambda x, w, b: ops.dense(x, w, b, half_sums=half_partials))(x, w, b))
    (line,) = [line for line in traced.splitlines() if "dot_general" in line]
    assert f":{product}[2,4] = " in line
    assert ops.dense(x, w, b, half_sums=half_partials).dtype == jnp.float32


STEMS = [(16, 7, ((3, 3), (3, 3))), (16, 3, "SAME"), (12, 5, ((2, 1), (2, 2))), (14, 3, "VALID")]
STEMS += [(14, 7, ((3, 3), (3, 3))), (18, 7, "SAME"), (10, 5, ((2, 1), (2, 2))), (22, 7, "VALID")]  # width of fours


@pytest.mark.parametrize(("size", "window", "padding"), STEMS)
def test_the_folded_stem_is_the_plain_convolution(size, window, padding):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, size, size + 2, 3)).astype(np.float32)
    w = rng.normal(size=(window, window, 3, 8)).astype(np.float32)
    pads = pad_pixels(padding, (size, size + 2), (window, window), 2)
    shape = jax.eval_shape(lambda x, w: conv2d_plain(x, w, 2, pads, 1), x, w).shape
    probe = rng.normal(size=shape).astype(np.float32)
    plain = jax.value_and_grad(lambda x, w: (conv2d_plain(x, w, 2, pads, 1) * probe).sum(), (0, 1))
    folded = jax.value_and_grad(lambda x, w: (conv2d_folded(x, w, pads) * probe).sum(), (0, 1))
    leaves_close(jax.jit(folded)(x, w), jax.jit(plain)(x, w), 1e-4)


@pytest.mark.parametrize(("groups", "filters"), [(3, 3), (3, 6), (2, 8)])
def test_a_stem_with_groups_is_not_folded(groups, filters, monkeypatch):
    monkeypatch.setattr("headrace.ops.conv.on_cpu", lambda: False)
    rng = np.random.default_rng(0)
    channels = groups * (4 // groups)
    x = jnp.array(rng.normal(size=(2, 8, 8, channels)), jnp.float32)
    w = jnp.array(rng.normal(size=(3, 3, channels // groups, filters)), jnp.float32)
    pads = ((1, 1), (1, 1))
    found = jax.jit(lambda x, w: ops.conv2d(x, w, 2, pads, groups))(x, w)
    leaves_close(found, conv2d_plain(x, w, 2, pads, groups), 1e-5)


DEPTHWISE = [(3, 1, "SAME"), (5, 2, ((2, 2), (2, 2))), (3, 2, "SAME"), (5, 1, ((2, 2), (1, 3))), (3, 2, "VALID")]
DEPTHWISE += [(5, 2, "SAME"), (5, 3, ((0, 4), (3, 0))), (7, 3, "SAME"), (4, 2, ((2, 1), (0, 3)))]


@pytest.mark.parametrize("form", [depthwise_views, depthwise_on_accelerator])
@pytest.mark.parametrize(("window", "stride", "padding"), DEPTHWISE)
def test_depthwise_for_accelerators_is_the_plain_convolution(form, window, stride, padding):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 8, 9, 6)).astype(np.float32)
    w = rng.normal(size=(window, window, 1, 6)).astype(np.float32)
    pads = pad_pixels(padding, (8, 9), (window, window), stride)
    shape = jax.eval_shape(lambda x, w: conv2d_plain(x, w, stride, pads, 6), x, w).shape
    probe = rng.normal(size=shape).astype(np.float32)
    plain = jax.value_and_grad(lambda x, w: (conv2d_plain(x, w, stride, pads, 6) * probe).sum(), (0, 1))
    found = jax.value_and_grad(lambda x, w: (form(x, w, stride, pads) * probe).sum(), (0, 1))
    leaves_close(jax.jit(found)(x, w), jax.jit(plain)(x, w), 1e-4)


# size, channels, window, stride, padding: several tiles in a row, an odd last one, uneven padding, 16 channels
KERNELS = [(7, 64, 7, 1, "SAME"), (30, 32, 5, 1, "SAME"), (19, 32, 3, 2, ((1, 1), (1, 1))), (16, 16, 5, 2, "SAME")]
KERNELS += [(18, 32, 3, 2, "SAME"), (11, 96, 7, 1, ((2, 4), (3, 0))), (28, 32, 3, 1, "VALID")]
KERNELS += [(33, 32, 5, 2, ((0, 3), (4, 1))), (17, 16, 7, 3, "SAME")]


def count_kernels(jaxpr) -> int:
    """Count calls of kernels; in the text of a program JAX 0.12 writes one that is called twice once."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            count += 1
            continue
        inner = (getattr(value, "jaxpr", value) for value in equation.params.values())
        count += sum(count_kernels(value) for value in inner if hasattr(value, "eqns"))
    return count


@pytest.mark.parametrize(("size", "channels", "window", "stride", "padding"), KERNELS)
def test_depthwise_kernels_are_the_plain_convolution(size, channels, window, stride, padding, monkeypatch):
    monkeypatch.setattr("headrace.ops.depthwise_kernels.compute_capability", lambda: "9.0")
    rng, dtype = np.random.default_rng(0), jnp.float16 if window == 3 else jnp.bfloat16
    x = jnp.asarray(rng.normal(size=(3, size, size + 1, channels)), dtype)
    w = jnp.asarray(rng.normal(size=(window, window, 1, channels)), dtype)
    pads = pad_pixels(padding, (size, size + 1), (window, window), stride)
    wide = [a.astype(jnp.float32) for a in (x, w)]  # exact: the sums are the same up to the order
    plain, back = jax.vjp(lambda x, w: conv2d_plain(x, w, stride, pads, channels), *wide)
    probe = jnp.asarray(rng.normal(size=plain.shape), dtype)
    forms = jax.jit(lambda x, w: jax.vjp(lambda x, w: depthwise_on_accelerator(x, w, stride, pads), x, w)[1](probe))
    wanted = [plain, *back(probe.astype(jnp.float32))]
    found = [depthwise_on_accelerator(x, w, stride, pads), *forms(x, w)]
    by_kernel = count_kernels(jax.make_jaxpr(forms)(x, w).jaxpr)
    pays = plain.shape[1] * plain.shape[2] <= 14 * 14 or any(before != after for before, after in pads)
    assert by_kernel == 2 + (pays and channels % 32 == 0)
    leaves_close([a.astype(jnp.float32) for a in found], wanted, 8e-3 if dtype == jnp.bfloat16 else 2e-3)


@pytest.mark.parametrize(
    ("shape", "window", "dtype"),
    [
        ((2, 8, 8, 24), 5, jnp.bfloat16),
        ((2, 8, 8, 16), 3, jnp.bfloat16),
        ((2, 8, 8, 32), 4, jnp.bfloat16),
        ((2, 8, 8, 32), 3, jnp.float32),
        ((70_000, 8, 1, 32), 3, jnp.bfloat16),
    ],
)
def test_other_shapes_are_left_to_the_library(shape, window, dtype, monkeypatch):
    monkeypatch.setattr("headrace.ops.depthwise_kernels.compute_capability", lambda: "9.0")
    x = jax.ShapeDtypeStruct(shape, dtype)
    w = jax.ShapeDtypeStruct((window, window, 1, shape[-1]), dtype)
    traced = jax.make_jaxpr(lambda x, w: depthwise_on_accelerator(x, w, 1, ((1, 1), (1, 1))))(x, w)
    assert "pallas_call" not in str(traced)


POOLS = [(9, 3, 2, ((1, 1), (1, 1))), (32, 5, 5, "VALID"), (8, 2, 2, "SAME"), (7, 3, 1, "SAME")]


@pytest.mark.parametrize(("size", "window", "stride", "padding"), POOLS)
def test_max_pool_and_its_gradient(size, window, stride, padding):
    rng = np.random.default_rng(1)
    x = rng.permutation(2 * size * size * 3).reshape(2, size, size, 3).astype(np.float32)  # all different: one winner
    pads = pad_pixels(padding, (size, size), (window, window), stride)

    def plain(x):
        windows = (1, window, window, 1), (1, stride, stride, 1), ((0, 0), *pads, (0, 0))
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *windows)

    probe = rng.normal(size=plain(x).shape).astype(np.float32)
    wanted = jax.jit(jax.value_and_grad(lambda x: (plain(x) * probe).sum()))(x)
    found = jax.value_and_grad(lambda x: (ops.max_pool(x, window, stride, padding) * probe).sum())
    leaves_close(jax.jit(found)(x), wanted, 1e-6)


def test_max_pool_passes_a_nan_on_and_gives_a_tie_to_the_first():
    x = np.zeros((1, 4, 4, 1), np.float32)
    gradient = jax.jit(jax.grad(lambda x: ops.max_pool(x, 2, 2).sum()))(x)
    np.testing.assert_array_equal(gradient[0, :, :, 0], [[1, 0, 1, 0], [0] * 4, [1, 0, 1, 0], [0] * 4])
    x[0, 3, 3, 0] = np.nan
    assert np.isnan(np.asarray(jax.jit(lambda x: ops.max_pool(x, 2, 2))(x))[0, 1, 1, 0])


@pytest.mark.parametrize("stable", [False, True])
def test_batch_norm_gradient_with_gradients_into_the_statistics(stable):
    rng = np.random.default_rng(2)
    x = rng.normal(1, 2, (4, 5, 3, 6)).astype(np.float32)
    gamma, beta = rng.normal(size=(2, 6)).astype(np.float32)
    probes = [rng.normal(size=shape).astype(np.float32) for shape in (x.shape, (6,), (6,))]

    def naive(x, gamma, beta):
        mean = x.mean((0, 1, 2))
        variance = ((x - mean[None, None, None]) ** 2).mean((0, 1, 2))
        y = (x - mean[None, None, None]) / jnp.sqrt(variance + 1e-3)[None, None, None]
        return y * gamma[None, None, None] + beta[None, None, None], mean, variance

    def total(norm):
        return lambda *args: sum((out * probe).sum() for out, probe in zip(norm(*args), probes, strict=True))

    wanted = jax.jit(jax.value_and_grad(total(naive), (0, 1, 2)))(x, gamma, beta)
    found = jax.value_and_grad(
        total(lambda x, gamma, beta: ops.batch_norm_train(x, gamma, beta, 1e-3, stable)), (0, 1, 2)
    )
    leaves_close(jax.jit(found)(x, gamma, beta), wanted, 2e-4)
