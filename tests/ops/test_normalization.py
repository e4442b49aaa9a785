"""Batch, group and layer norm: values by formula in float64, gradients against finite differences and JAX's own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import ops
from headrace.ops.normalization import _GRADIENT, _STATISTICS, _division
from headrace.ops.pool import pad_pixels

EPSILON = 1e-3


STATIC = {"batch_norm_train": (3, 4), "batch_norm_eval": (4,), "group_norm": (3, 4, 5)}


def jitted(name):
    return jax.jit(getattr(ops, name), static_argnums=STATIC[name])


def images(shape=(4, 3, 5, 6), mean=1.0, dtype=np.float32):
    rng = np.random.default_rng(3)
    x = rng.normal(mean, 2, shape).astype(dtype)
    gamma, beta = rng.normal(size=(2, shape[-1])).astype(np.float32)
    return x, gamma, beta, rng.normal(size=shape)


def batch_norm(x, gamma, beta):
    """Return (y, mean, variance) in the precision of x."""
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / np.sqrt(variance + EPSILON) * gamma + beta, mean, variance


def group_norm(x, gamma, beta, members):
    """Normalise by image and by the list of channels in each group."""
    y = np.zeros_like(x)
    for image in range(x.shape[0]):
        for channels in members:
            part = x[image][..., channels]
            y[image][..., channels] = (part - part.mean()) / np.sqrt(part.var() + EPSILON)
    return y * gamma + beta


def slope(function, point, direction, step=1e-5):
    """Return the derivative along a direction by central differences, in float64."""
    return (function(point + step * direction) - function(point - step * direction)) / (2 * step)


@pytest.mark.parametrize("stable", [False, True])
def test_batch_norm_by_formula(stable):
    x, gamma, beta, _ = images()
    y, mean, variance = jitted("batch_norm_train")(jnp.array(x), gamma, beta, EPSILON, stable)
    wanted = batch_norm(x.astype(np.float64), gamma, beta)
    for a, b in zip((y, mean, variance), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("stable", [False, True])
def test_batch_norm_gradients_by_finite_differences(stable):
    x, gamma, beta, probe = images()
    rng = np.random.default_rng(4)

    def ours(x, gamma, beta):
        return (ops.batch_norm_train(x, gamma, beta, EPSILON, stable)[0] * probe.astype(np.float32)).sum()

    found = jax.jit(jax.grad(ours, (0, 1, 2)))(x, gamma, beta)
    point = tuple(a.astype(np.float64) for a in (x, gamma, beta))
    for i, gradient in enumerate(found):
        for _ in range(3):
            direction = rng.normal(size=gradient.shape)

            def along(value, i=i):
                moved = [*point[:i], value, *point[i + 1 :]]
                return (batch_norm(moved[0], moved[1], moved[2])[0] * probe).sum()

            np.testing.assert_allclose((gradient * direction).sum(), slope(along, point[i], direction), rtol=1e-3)


def test_batch_norm_eval_by_formula():
    x, gamma, beta, _ = images()
    mean, variance = np.linspace(-1, 1, 6, dtype=np.float32), np.linspace(0.5, 2, 6, dtype=np.float32)
    y = jitted("batch_norm_eval")(jnp.array(x), gamma, beta, (mean, variance), EPSILON)
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(variance + EPSILON) * gamma + beta, rtol=1e-5, atol=1e-5)


def test_a_large_mean_needs_the_stable_variance():
    x, gamma, beta, _ = images(mean=3000.0)
    wanted = x.astype(np.float64).var((0, 1, 2))
    one_pass = jitted("batch_norm_train")(jnp.array(x), gamma, beta, EPSILON, False)[2]
    stable = jitted("batch_norm_train")(jnp.array(x), gamma, beta, EPSILON, True)[2]
    np.testing.assert_allclose(stable, wanted, rtol=1e-4)
    assert np.abs(one_pass / wanted - 1).max() > 0.01
    assert (np.array(one_pass) >= 0).all()


def test_equal_pixels_give_the_shift_and_finite_gradients():
    x, gamma, beta = jnp.full((2, 2, 2, 3), 0.1), jnp.ones(3), jnp.arange(3.0)
    y, _, variance = jitted("batch_norm_train")(x, gamma, beta, 1e-5, False)
    np.testing.assert_allclose(y, np.broadcast_to(np.arange(3.0), x.shape), atol=1e-4)
    assert (np.array(variance) >= 0).all()
    gradient = jax.jit(jax.grad(lambda x: ops.batch_norm_train(x, gamma, beta, 1e-5)[0][0, 0, 0].sum()))(x)
    assert np.isfinite(gradient).all()


CONTIGUOUS, STRIDED = [[0, 1, 2], [3, 4, 5]], [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize(("order", "members"), [("contiguous", CONTIGUOUS), ("strided", STRIDED)])
def test_group_norm_by_formula(order, members, stable):
    x, gamma, beta, probe = images()
    groups = ops.Groups(num_groups=2, order=order)
    y = jitted("group_norm")(jnp.array(x), gamma, beta, groups, EPSILON, stable)
    np.testing.assert_allclose(y, group_norm(x.astype(np.float64), gamma, beta, members), rtol=2e-5, atol=2e-5)

    def ours(x, gamma, beta):
        return (ops.group_norm(x, gamma, beta, groups, EPSILON, stable) * probe.astype(np.float32)).sum()

    gradients = jax.jit(jax.grad(ours, (0, 1, 2)))(x, gamma, beta)
    point = [a.astype(np.float64) for a in (x, gamma, beta)]
    for i, gradient in enumerate(gradients):
        direction = np.random.default_rng(i).normal(size=gradient.shape)

        def along(value, i=i):
            moved = [*point[:i], value, *point[i + 1 :]]
            return (group_norm(moved[0], moved[1], moved[2], members) * probe).sum()

        np.testing.assert_allclose((gradient * direction).sum(), slope(along, point[i], direction), rtol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_images_have_float32_statistics(dtype):
    x, gamma, beta, _ = images(shape=(8, 16, 16, 6), mean=3.0)
    half = jnp.array(x, dtype)
    exact = np.array(half, np.float64)
    y, mean, variance = jitted("batch_norm_train")(half, gamma, beta, EPSILON, False)
    assert (y.dtype, mean.dtype, variance.dtype) == (dtype, jnp.float32, jnp.float32)
    wanted = batch_norm(exact, gamma, beta)
    np.testing.assert_allclose(mean, wanted[1], rtol=1e-5)  # bfloat16 sums would be off by 1e-2
    np.testing.assert_allclose(variance, wanted[2], rtol=1e-4)
    np.testing.assert_allclose(np.array(y, np.float64), wanted[0], atol=0.02, rtol=0.01)
    grouped = jitted("group_norm")(half, gamma, beta, ops.Groups(num_groups=3), EPSILON, False)
    assert grouped.dtype == dtype
    pairs = group_norm(exact, gamma, beta, [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_allclose(np.array(grouped, np.float64), pairs, atol=0.02, rtol=0.01)


def layer_norm(x, gamma, beta):
    """Normalise the last dim in the precision of x."""
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPSILON) * gamma + beta


def test_layer_norm_and_its_gradients_by_formula():
    x, gamma, beta, probe = images(mean=300.0)
    rng = np.random.default_rng(4)

    def ours(x, gamma, beta):
        y = ops.layer_norm(x, gamma, beta, EPSILON)
        return (y * probe.astype(np.float32)).sum(), y

    found, y = jax.jit(jax.grad(ours, (0, 1, 2), has_aux=True))(x, gamma, beta)
    point = tuple(a.astype(np.float64) for a in (x, gamma, beta))
    np.testing.assert_allclose(y, layer_norm(*point), rtol=1e-4, atol=1e-4)
    for i, gradient in enumerate(found):
        direction = rng.normal(size=gradient.shape)

        def along(value, i=i):
            moved = [*point[:i], value, *point[i + 1 :]]
            return (layer_norm(moved[0], moved[1], moved[2]) * probe).sum()

        np.testing.assert_allclose((gradient * direction).sum(), slope(along, point[i], direction), rtol=1e-3)
    half = jax.eval_shape(
        lambda x: ops.layer_norm(x, jnp.array(gamma), jnp.array(beta), EPSILON), x.astype(jnp.bfloat16)
    )
    assert half.dtype == jnp.bfloat16


# 96 and 72 channels are folded by two and eight rows
@pytest.mark.parametrize("shape", [(4, 8, 8, 3), (6, 7, 7, 5), (3, 5, 7, 2), (4, 8, 8, 96), (8, 4, 4, 72)])
@pytest.mark.parametrize("stable", [False, True])
def test_sums_in_two_steps_are_the_sums(shape, stable, monkeypatch):
    monkeypatch.setattr("headrace.ops.normalization.on_gpu", lambda: True)
    x, gamma, beta, probe = images(shape)

    def run():
        norm = partial(ops.batch_norm_train, epsilon=EPSILON, stable=stable)

        def loss(x, gamma, beta):
            results = norm(x, gamma, beta)
            return (results[0] * probe).sum(), results

        # jitted here: no program of another test, or of the other form
        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x, gamma, beta)

    found, results = run()
    for a, b in zip(results, batch_norm(x.astype(np.float64), gamma, beta), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    monkeypatch.setattr("headrace.ops.normalization.on_gpu", lambda: False)
    wanted, _ = run()
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_gradients_of_large_images_are_the_gradients(monkeypatch):
    monkeypatch.setattr("headrace.ops.normalization._SMALL", 0)
    # a shape of no other test: the limit is no argument of what is traced once
    x, gamma, beta, _ = images((4, 6, 6, 7))

    def loss(x, gamma, beta):  # mean and variance have gradients of their own
        return sum((y * y).sum() for y in ops.batch_norm_train(x, gamma, beta, EPSILON))

    found = []
    for gpu in (True, False):
        monkeypatch.setattr("headrace.ops.normalization.on_gpu", lambda gpu=gpu: gpu)
        found.append(jax.jit(jax.grad(loss, (0, 1, 2)))(x, gamma, beta))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 2048), st.sampled_from([_STATISTICS, _GRADIENT]))
def test_rows_are_divided_into_equal_parts_of_a_good_size(num_images, pixels, channels, grain):
    rows = num_images * pixels * pixels
    parts, folded = _division(rows, channels, grain)
    assert rows % (parts * folded) == 0
    left = rows // (parts * folded)
    assert left % 2 or left <= grain.most_rows  # longer only where they cannot be divided further
    assert parts == 1 or 2 * left > 32


@pytest.mark.parametrize(("stable", "exchanges"), [(False, 2), (True, 3)])
def test_replicas_that_share_statistics_exchange_their_sums_together(stable, exchanges):
    """One exchange forward and one backward; the stable variance needs the mean first."""
    x, gamma, beta, probe = images(shape=(8, 4, 4, 3))
    mesh = jax.make_mesh((4,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
    shared, replica = ("replica", ((0, 1), (2, 3))), jax.sharding.PartitionSpec("replica")

    def gradient(x, probe):
        norm = partial(ops.batch_norm_train, epsilon=EPSILON, stable=stable, shared=shared)
        return jax.grad(lambda x: (norm(x, gamma, beta)[0] * probe).sum())(x)

    program = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=replica, out_specs=replica, check_vma=False))
    assert str(jax.make_jaxpr(program)(x, probe)).count("psum") == exchanges
    shares = np.asarray(program(x, probe))
    for half in (slice(0, 4), slice(4, 8)):  # what the two groups of replicas see

        def alone(x, half=half):
            return (ops.batch_norm_train(x, gamma, beta, EPSILON, stable)[0] * probe[half]).sum()

        np.testing.assert_allclose(shares[half], jax.jit(jax.grad(alone))(x[half]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", [((1, 1), (1, 1)), "SAME", "VALID"])
def test_norm_relu_and_max_pool_in_one_are_the_three(padding, monkeypatch):
    """Values and gradients, also through mean and variance; about half of the channels have a negative scale."""
    monkeypatch.setattr("headrace.ops.normalization.on_gpu", lambda: True)
    rng = np.random.default_rng(0)
    x = rng.normal(1, 2, (3, 9, 8, 6)).astype(np.float32)
    gamma, beta = rng.normal(size=6).astype(np.float32), rng.normal(size=6).astype(np.float32)
    pads = pad_pixels(padding, (9, 8), (3, 3), 2)

    def apart(x, gamma, beta):
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        scale, shift = (each[None, None, None] for each in (gamma / jnp.sqrt(variance + 1e-3), beta))
        y = jnp.maximum((x - mean[None, None, None]) * scale + shift, 0)
        windows = (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), *pads, (0, 0))
        return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, *windows), mean, variance

    def together(x, gamma, beta):
        found = ops.find_norm_pool(x, gamma, beta, 1e-3, None, ops.Windows(3, 2, pads))
        assert found is not None
        return found

    probes = [rng.normal(size=each.shape).astype(np.float32) for each in apart(x, gamma, beta)]

    def total(function, *given):
        return sum((each * probe).sum() for each, probe in zip(function(*given), probes, strict=True))

    for found, wanted in zip(together(x, gamma, beta), apart(x, gamma, beta), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    gradients = [jax.grad(partial(total, function), (0, 1, 2))(x, gamma, beta) for function in (together, apart)]
    for found, wanted in zip(*gradients, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
