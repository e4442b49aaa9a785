"""The CPU kernels in every compiled variant: values and gradients against the definition in float64."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.native import library
from headrace.native.library import KERNEL_SOURCES, KERNELS, SUFFIX, find_kernels, kernels_library, source_hash
from headrace.ops import check_kernels, conv2d, describe_missing_kernels, native_kernels
from headrace.ops.native_kernels import HALF_PRODUCTS, find_window
from headrace.ops.native_units import BatchNorm, Unit, conv_unit, unit_eval, unit_packed, unit_train

from . import naive

FOLDER = library._FOLDER
BUILT = [name for name in KERNELS if (FOLDER / f"{name}{SUFFIX}").is_file()]
PRODUCTS, WINOGRAD, DEPTHWISE, GROUPED, HALF = range(5)
EPSILON = 1e-3


@dataclass(frozen=True)
class Case:
    x: tuple[int, int, int, int]
    window: int
    outputs: int
    stride: int = 1
    padding: Any = "SAME"
    groups: int = 1
    act: str | None = None
    residual: bool = False
    mode: str = "on"
    method: int = PRODUCTS


# Odd sizes, images of one pixel, channels that do not fill vectors or panels, sums in several passes (more than 256
# inputs), more weights than one thread's share, fewer images than threads, windows on the edge of the padding.
CASES = [
    Case((3, 9, 7, 16), 3, 32, act="relu", residual=True, method=WINOGRAD),
    Case((2, 6, 6, 32), 3, 16, padding="VALID", act="swish", method=WINOGRAD),
    Case((2, 3, 2, 16), 3, 16, act="relu6", method=WINOGRAD),
    Case((1, 12, 5, 16), 3, 48, act="relu", method=WINOGRAD),
    Case((150, 3, 5, 144), 3, 160, act="relu", method=WINOGRAD),  # large weights by points, in two groups of tiles
    Case((3, 9, 7, 16), 3, 32, act="relu", residual=True, mode="no-winograd"),
    Case((3, 5, 4, 400), 1, 520, act="swish"),  # large weights, divided between threads
    Case((2, 6, 5, 150), 3, 150, stride=2, act="relu"),
    Case((2, 21, 20, 20), 1, 40, act="relu"),  # more pixels than one pass adds up
    Case((3, 7, 5, 10), 1, 7, act="hard_swish"),
    Case((2, 5, 5, 300), 1, 70, act="relu", residual=True),
    Case((2, 9, 9, 24), 1, 40, stride=2),
    Case((3, 9, 8, 5), 3, 6, stride=2, act="relu6"),
    Case((2, 13, 12, 3), 7, 20, stride=2, padding=((3, 3), (3, 3)), act="relu"),
    Case((1, 4, 3, 260), 3, 96, padding=((1, 1), (1, 1)), act="relu", mode="no-winograd"),
    Case((2, 10, 10, 4), 5, 6, stride=3, padding=((2, 2), (1, 2))),
    Case((3, 8, 8, 24), 3, 24, groups=24, act="hard_swish", method=DEPTHWISE),
    Case((2, 9, 7, 40), 5, 40, stride=2, groups=40, act="relu6", residual=True, method=DEPTHWISE),
    Case((1, 8, 8, 16), 5, 16, groups=16, act="swish", method=DEPTHWISE),
    Case((2, 1, 1, 19), 3, 19, groups=19, method=DEPTHWISE),
    Case((1, 3, 6, 1024), 1, 320, act="relu6", residual=True),  # pixels 4 KB apart, more weights than stay in the cache
    Case((2, 9, 32, 3), 3, 24, stride=2, act="hard_swish"),  # rows of one tile and a few pixels
    # Groups: several in a vector; one that fills it; an odd number of them; wide ones; other windows and strides.
    Case((3, 9, 17, 64), 3, 64, groups=16, act="relu", residual=True, method=GROUPED),
    Case((2, 7, 6, 48), 3, 48, groups=3, stride=2, act="swish", method=GROUPED),
    Case((1, 8, 5, 24), 3, 24, groups=3, act="hard_swish", method=GROUPED),
    Case((5, 6, 6, 80), 3, 80, groups=2, stride=2, padding=((1, 1), (1, 1)), act="relu", method=GROUPED),
    Case((2, 11, 4, 12), 5, 12, groups=6, stride=3, padding=((2, 2), (1, 2)), act="relu6", method=GROUPED),
    Case((2, 5, 3, 14), 1, 14, groups=7, method=GROUPED),
    # Large weights and few tiles: by panels, of two and three blocks of channels.
    Case((3, 7, 6, 144), 3, 176, act="relu", residual=True, method=WINOGRAD),
    Case((1, 6, 9, 272), 3, 96, padding="VALID", act="swish", method=WINOGRAD),
]


@pytest.fixture(params=BUILT, autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> native_kernels.Library:
    """Run each test with each library that this processor can run."""
    with monkeypatch.context() as only:
        only.setattr(library, "KERNELS", (request.param,))
        found, reason = find_kernels(FOLDER)
    if found is None:
        pytest.skip(reason)
    kernels = native_kernels.register(found)
    monkeypatch.setattr(native_kernels, "load_kernels", lambda: (kernels, ""))
    return kernels


def activation(name: str | None, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the value and the slope, from the definitions."""
    s = 1 / (1 + np.exp(-v))
    return {
        None: (v, np.ones_like(v)),
        "relu": (np.maximum(v, 0), (v > 0) * 1.0),
        "relu6": (np.clip(v, 0, 6), ((v > 0) & (v < 6)) * 1.0),
        "swish": (v * s, s + v * s * (1 - s)),
        "hard_swish": (v * np.clip(v + 3, 0, 6) / 6, np.where(v > 3, 1, (v > -3) * (2 * v + 3) / 6)),
    }[name]


def numbers(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    inputs = case.x[3] // case.groups
    w = rng.standard_normal((case.window, case.window, inputs, case.outputs)) / np.sqrt(case.window**2 * inputs)
    found = {"x": rng.standard_normal(case.x), "w": w}
    y_shape = naive.conv(found["x"], w, case.stride, case.padding, case.groups)[0].shape
    found |= {"gamma": rng.uniform(0.5, 2, case.outputs), "beta": rng.standard_normal(case.outputs)}
    found |= {"residual": rng.standard_normal(y_shape)} if case.residual else {}
    found |= {"dy": rng.standard_normal(y_shape), "dmean": rng.standard_normal(case.outputs)}
    return found | {"dvariance": rng.standard_normal(case.outputs)}


Rounding = Callable[[np.ndarray], np.ndarray]


def expected(case: Case, a: dict[str, np.ndarray], rounded: Rounding = np.asarray) -> dict[str, np.ndarray]:
    """Return results and gradients of a unit, by the textbook; the gradient behind the convolution is `rounded`."""
    axes = (0, 1, 2)
    z = naive.conv(a["x"], a["w"], case.stride, case.padding, case.groups)[0]
    count, mean, variance = z[..., 0].size, z.mean(axes), z.var(axes)
    deviation = np.sqrt(variance + EPSILON)
    normal = (z - mean) / deviation
    v = normal * a["gamma"] + a["beta"] + a.get("residual", 0)
    y, slope = activation(case.act, v)
    d = a["dy"] * slope
    dnormal = d * a["gamma"]
    dz = (dnormal - dnormal.mean(axes) - normal * (dnormal * normal).mean(axes)) / deviation
    dz += a["dmean"] / count + a["dvariance"] * 2 * (z - mean) / count
    _, dx, dw = naive.conv(a["x"], a["w"], case.stride, case.padding, case.groups, rounded(dz))
    found = {"y": y, "mean": mean, "variance": variance, "x": dx, "w": dw}
    found |= {"gamma": (d * normal).sum(axes), "beta": d.sum(axes)}
    return found | ({"residual": d} if case.residual else {})


def assert_close(found: Any, wanted: np.ndarray, limit: float, what: str) -> None:
    error = np.abs(np.asarray(found, np.float64) - wanted).max() / max(np.abs(wanted).max(), 1e-3)
    assert error < limit, f"{what}: {error:.1e}"


def name_of(case: Case) -> str:
    return f"{'x'.join(map(str, case.x))}-{case.window}-{case.outputs}-{case.stride}-{case.groups}-{case.mode}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_unit_and_its_gradients_follow_the_definition(case: Case, variant: native_kernels.Library) -> None:
    a = numbers(case)
    f: dict[str, Any] = {name: value.astype(np.float32) for name, value in a.items()}
    window = find_window(f["x"], f["w"], case.stride, case.padding, case.groups, case.mode)
    assert window is not None
    assert window.method == case.method
    unit = Unit(window=window, activation=case.act, epsilon=EPSILON)
    names = ("x", "w", "gamma", "beta") + (("residual",) if case.residual else ())

    @jax.jit
    def run(*arrays: Any) -> Any:
        def function(x: Any, w: Any, gamma: Any, beta: Any, residual: Any = None) -> Any:
            return unit_train(x, w, gamma, beta, residual, unit)

        results, vjp = jax.vjp(function, *arrays)
        # The scale and shift of a norm that does not look at the batch: here with the batch's own statistics.
        scale = f["gamma"] * jax.lax.rsqrt(results[2] + EPSILON)
        affine = (f["w"], scale, f["beta"] - results[1] * scale)
        again = unit_eval(f["x"], *affine, f.get("residual"), unit)
        packed = unit_packed(f["x"], lambda: affine, f.get("residual"), unit)
        return results, vjp((f["dy"], f["dmean"], f["dvariance"])), (again, packed)

    results, gradients, (again, packed) = run(*(f[name] for name in names))
    wanted = expected(case, a)
    # Winograd's sums have a few times the rounding errors of plain ones.
    limit = 2e-5 if case.method == WINOGRAD else 4e-6
    for name, value in zip(("y", "mean", "variance", *names), (*results, *gradients), strict=True):
        assert_close(value, wanted[name], limit, name)
    assert_close(again, wanted["y"], limit, "unit_eval")
    assert_close(packed, wanted["y"], limit, "unit_packed")


# Channels that fill vectors or not, so many that sums are kept in memory, a few pixels, and depthwise.
LARGE_MEANS = [((8, 16, 16, 16), 1), ((3, 9, 7, 10), 1), ((2, 7, 7, 512), 1), ((5, 1, 1, 24), 1), ((4, 8, 8, 24), 24)]


@pytest.mark.parametrize(("mean", "deviation"), [(0, 1), (10, 1), (100, 1), (1000, 1), (3000, 2)])
@pytest.mark.parametrize(("shape", "groups"), LARGE_MEANS)
def test_a_large_mean_costs_no_digits_but_its_own(
    mean: float, deviation: float, shape: tuple[int, int, int, int], groups: int
) -> None:
    """As good as a second pass over the images: what is left is that a mean has 24 bits."""
    rng, channels = np.random.default_rng(6), shape[3]
    x: Any = (mean + deviation * rng.standard_normal(shape)).astype(np.float32)
    w: Any = np.eye(channels, dtype=np.float32)[None, None]  # so that the convolution's result is x
    if groups > 1:
        w = np.zeros((3, 3, 1, channels), np.float32)
        w[1, 1] = 1
    window = find_window(x, w, 1, "SAME", groups, "on")
    assert window is not None
    unit = Unit(window=window, activation=None, epsilon=EPSILON)
    dy = rng.standard_normal(shape).astype(np.float32)
    ones = np.ones(channels, np.float32)

    @jax.jit
    def run(x: Any, w: Any, gamma: Any, beta: Any) -> Any:
        results, vjp = jax.vjp(lambda *arrays: unit_train(*arrays, None, unit), x, w, gamma, beta)
        return results, vjp((dy, jnp.zeros(channels), jnp.zeros(channels)))

    (y, found_mean, found_variance), (dx, _, dgamma, _) = run(x, w, ones, ones)
    exact = x.astype(np.float64)
    wanted_mean, wanted_variance = exact.mean((0, 1, 2)), exact.var((0, 1, 2))
    scale = 1 / np.sqrt(wanted_variance + EPSILON)
    normal = (exact - wanted_mean) * scale
    slope = (dy * normal).mean((0, 1, 2))
    digits = 2e-6 + 2**-24 * mean / deviation * 2
    np.testing.assert_allclose(found_mean, wanted_mean, rtol=2e-7, atol=1e-6)
    np.testing.assert_allclose(found_variance, wanted_variance, rtol=3e-6)
    np.testing.assert_allclose(y, normal + 1, rtol=0, atol=digits * np.abs(normal).max())
    np.testing.assert_allclose(
        dgamma, (dy * normal).sum((0, 1, 2)), rtol=0, atol=digits * np.abs(dy).sum((0, 1, 2)).max()
    )
    wanted_dx = scale * (dy - dy.mean((0, 1, 2), np.float64) - normal * slope)
    np.testing.assert_allclose(dx, wanted_dx, rtol=0, atol=digits * 4 * np.abs(wanted_dx).max())


def test_replicas_that_share_statistics_lose_no_digits_of_a_large_mean() -> None:
    """One exchange forward, of means and variances, and one backward."""
    rng, shape = np.random.default_rng(7), (8, 6, 6, 16)
    x: Any = (1000 + rng.standard_normal(shape)).astype(np.float32)
    x[2:4] += 3  # replicas with means of their own
    w: Any = np.eye(16, dtype=np.float32)[None, None]
    ones: Any = np.ones(16, np.float32)
    mesh = jax.make_mesh((4,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
    shared, replica = ("replica", ((0, 1), (2, 3))), jax.sharding.PartitionSpec("replica")
    window = find_window(x[:2], w, 1, "SAME", 1, "on")
    assert window is not None
    unit = Unit(window=window, activation=None, epsilon=EPSILON, shared=shared)

    def run(x: Any) -> Any:
        results, vjp = jax.vjp(lambda x: unit_train(x, w, ones, ones, None, unit), x)
        y, mean, variance = results  # pyright: ignore[reportGeneralTypeIssues]
        return y, mean[None], variance[None], vjp((jnp.square(y), mean * 0, mean * 0))[0]

    program = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=replica, out_specs=replica, check_vma=False))
    text = str(jax.make_jaxpr(program)(x))
    assert (text.count("all_gather["), text.count("psum")) == (1, 1)
    y, mean, variance, _ = (np.asarray(array) for array in program(x))
    for i, half in enumerate((x[:4], x[4:])):
        exact = half.astype(np.float64)
        wanted = exact.mean((0, 1, 2)), exact.var((0, 1, 2))
        np.testing.assert_allclose(mean[2 * i], wanted[0], rtol=2e-7)
        np.testing.assert_allclose(variance[2 * i : 2 * i + 2], [wanted[1]] * 2, rtol=3e-4)
        normal = (exact - wanted[0]) / np.sqrt(wanted[1] + EPSILON)
        np.testing.assert_allclose(y[4 * i : 4 * i + 4], normal + 1, atol=1e-3)


@pytest.mark.parametrize("case", [CASES[0], CASES[12], CASES[17]], ids=name_of)
def test_a_convolution_alone_and_its_gradients_follow_the_definition(case: Case) -> None:
    a = numbers(case)
    x, w, dy = (a[name].astype(np.float32) for name in ("x", "w", "dy"))
    y, vjp = jax.vjp(lambda x, w: conv2d(x, w, case.stride, case.padding, case.groups, "on"), x, w)
    wanted = naive.conv(a["x"], a["w"], case.stride, case.padding, case.groups, a["dy"])
    for name, found, value in zip(("y", "dx", "dw"), (y, *vjp(dy)), wanted, strict=True):
        assert_close(found, value, 2e-5, name)


# Also few and odd channels, rows of more than two tiles, windows on the edge, more weights than pixels; for the
# gradient of the weights bands of images, several bands or images in one product, windows whose columns are channels,
# and large weights of more pixels than one product has.
HALF_CASES = [
    *(CASES[i] for i in (0, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)),
    Case((1, 3, 40, 33), 3, 35, padding="VALID"),
    Case((2, 30, 31, 3), 7, 64, stride=2, padding=((3, 3), (3, 3))),
    Case((1, 75, 60, 3), 7, 8, stride=2),
    Case((1, 1, 1, 1), 1, 1),
    Case((1, 7, 7, 16), 3, 48),
    Case((40, 7, 7, 20), 3, 17),
    Case((70, 4, 4, 37), 1, 33, stride=2),
    Case((3, 60, 57, 18), 3, 33, stride=2, padding=((1, 1), (1, 1))),
    Case((2, 50, 50, 130), 1, 70),
    Case((2, 33, 35, 160), 3, 144),
    Case((9, 21, 20, 260), 1, 800),
    Case((2, 8, 9, 6), 2, 5, stride=2, padding="VALID"),
    Case((2, 7, 8, 20), 2, 36, stride=3),
]


def use_products(products: str, variant: native_kernels.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply bfloat16 values in one way; skip the test where the kernels or the processor do not have it."""
    half = HALF_PRODUCTS[products]
    if variant.half < half and products != "emulated":
        pytest.skip(f"no products of bfloat16 values by {products}")
    monkeypatch.setattr(native_kernels, "load_kernels", lambda: (variant._replace(half=half), ""))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bit_convolutions_without_kernels_of_their_own_are_computed_in_float32(
    dtype: Any, variant: native_kernels.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_kernels, "load_kernels", lambda: (variant._replace(half=0), ""))
    assert_summed_in_float32(dtype, CASES[0], in_half=False)


@pytest.mark.parametrize("products", HALF_PRODUCTS)
@pytest.mark.parametrize("case", HALF_CASES, ids=name_of)
def test_bfloat16_convolutions_are_summed_in_float32_and_rounded_once(
    case: Case, products: str, variant: native_kernels.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_products(products, variant, monkeypatch)
    assert_summed_in_float32(jnp.bfloat16, case, in_half=True)


def assert_summed_in_float32(dtype: Any, case: Case, *, in_half: bool) -> None:
    a = numbers(case)
    x, w, dy = (a[name].astype(np.float32).astype(dtype) for name in ("x", "w", "dy"))
    mode = "no-winograd" if in_half else "on"
    convolve = lambda x, w: conv2d(x, w, case.stride, case.padding, case.groups, mode)  # noqa: E731
    text = str(jax.make_jaxpr(convolve)(x, w))
    assert "headrace_convolve" in text
    assert ("headrace_convolve_half" in text) == in_half
    y, vjp = jax.vjp(convolve, x, w)
    assert ("headrace_gradients_half" in str(jax.make_jaxpr(vjp)(dy))) == in_half
    images, weights, gradient = (np.asarray(v, np.float64) for v in (x, w, dy))
    wanted = naive.conv(images, weights, case.stride, case.padding, case.groups, gradient)
    for found, value in zip((y, *vjp(dy)), wanted, strict=True):
        assert found.dtype == dtype
        error = np.abs(np.asarray(found, np.float64) - value)
        half_a_unit = float(jnp.finfo(dtype).eps) / 2
        assert (error <= half_a_unit * np.abs(value) + 2e-5 * np.abs(value).max()).all()


@pytest.mark.parametrize("products", HALF_PRODUCTS)
@pytest.mark.parametrize("mode", ["on", "no-winograd"])
@pytest.mark.parametrize("case", [CASES[0], CASES[6], CASES[13]], ids=name_of)
def test_gradients_of_bfloat16_in_a_loop_are_those_of_each_call(
    case: Case, mode: str, products: str, variant: native_kernels.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a call with NaN: what a thread packed before is not seen again."""
    use_products(products, variant, monkeypatch)
    a = numbers(case)
    x, w, dy = (jnp.array(a[name], jnp.bfloat16) for name in ("x", "w", "dy"))
    batches = jnp.stack([x * jnp.nan, x, -x, x[::-1]])

    def gradients(x: Any) -> Any:
        return jax.vjp(lambda x, w: conv2d(x, w, case.stride, case.padding, 1, mode), x, w)[1](dy)

    looped = jax.jit(lambda batches: jax.lax.scan(lambda carry, x: (carry, gradients(x)), 0, batches)[1])(batches)
    assert np.isnan(np.asarray(looped[1][0], np.float32)).any()
    for i in range(1, 4):
        for found, wanted in zip(looped, gradients(batches[i]), strict=True):
            assert np.isfinite(np.asarray(wanted, np.float32)).all()
            np.testing.assert_array_equal(np.asarray(found[i], np.float32), np.asarray(wanted, np.float32))


DEPTHWISE_CASES = [case for case in CASES if case.method == DEPTHWISE]
WINOGRAD_CASES = [case for case in CASES if case.method == WINOGRAD]
PLAIN_CASES = [replace(CASES[0], mode="no-winograd"), CASES[9], CASES[10], CASES[13]]


@pytest.mark.parametrize("products", HALF_PRODUCTS)
@pytest.mark.parametrize("case", [*PLAIN_CASES, *WINOGRAD_CASES, *DEPTHWISE_CASES], ids=name_of)
def test_units_of_bfloat16_are_rounded_once(
    case: Case, products: str, variant: native_kernels.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_products(products, variant, monkeypatch)
    a = numbers(case)
    x, w = (jnp.array(a[name], jnp.bfloat16) for name in ("x", "w"))
    residual = jnp.array(a["residual"], jnp.bfloat16) if case.residual else None
    scale, shift = (jnp.array(a[name], jnp.float32) for name in ("gamma", "beta"))
    window = find_window(x, w, case.stride, case.padding, case.groups, case.mode)
    assert window is not None
    unit = Unit(window=window, activation=case.act, epsilon=EPSILON)
    y = unit_packed(x, lambda: (w, scale, shift), residual, unit)
    images, kernel = np.asarray(x, np.float64), np.asarray(w, np.float64)
    z = naive.conv(images, kernel, case.stride, case.padding, case.groups)[0]
    v = z * np.asarray(scale) + np.asarray(shift) + (0 if residual is None else np.asarray(residual, np.float64))
    wanted = activation(case.act, v)[0]
    assert y.dtype == jnp.bfloat16
    error = np.abs(np.asarray(y, np.float64) - wanted)
    assert (error <= 2**-8 * np.abs(wanted) + 2e-5 * np.abs(wanted).max()).all()


@pytest.mark.parametrize("case", [WINOGRAD_CASES[0], DEPTHWISE_CASES[0]], ids=name_of)
def test_scale_and_shift_behind_bfloat16_are_not_dropped(
    case: Case, variant: native_kernels.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are part of packed weights where products are not of bfloat16 values; nothing else computes them."""
    use_products("emulated", variant, monkeypatch)
    a = numbers(case)
    x, w = (jnp.array(a[name], jnp.bfloat16) for name in ("x", "w"))
    scale, shift = (jnp.array(a[name], jnp.float32) for name in ("gamma", "beta"))
    window = find_window(x, w, case.stride, case.padding, case.groups, case.mode)
    assert window is not None
    assert window.method == case.method
    unit = Unit(window=window, activation=case.act, epsilon=EPSILON)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT: .*need packed weights for images"):
        jax.block_until_ready(unit_eval(x, w, scale, shift, None, unit))


def whole_numbers(case: Case) -> dict[str, np.ndarray]:
    """Return numbers whose products and their sums, up to 256, are exact in bfloat16; so are the statistics."""
    rng = np.random.default_rng(5)
    a: dict[str, np.ndarray] = {name: in_bfloat16(value) for name, value in numbers(case).items()}
    size = case.window**2 * case.x[3] // case.groups
    a["x"] = rng.integers(-2, 3, case.x) * 1.0
    a["w"] = rng.integers(-1, 2, a["w"].shape) * (rng.random(a["w"].shape) < 500 / size) * 1.0
    return a


def in_bfloat16(a: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(a, jnp.float32).astype(jnp.bfloat16), np.float64)


OTHER_ACTIVATIONS = [
    Case((2, 9, 7, 24), 1, 40, act=act, residual=residual) for act in (None, "relu6") for residual in (False, True)
]


@pytest.mark.parametrize("products", HALF_PRODUCTS)
@pytest.mark.parametrize("case", [*HALF_CASES[1:], *WINOGRAD_CASES, *DEPTHWISE_CASES, *OTHER_ACTIVATIONS], ids=name_of)
def test_a_unit_of_bfloat16_and_its_gradients_follow_the_definition(
    case: Case, products: str, variant: native_kernels.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value is rounded once; sums and the vectors between the calls are float32."""
    use_products(products, variant, monkeypatch)
    a = whole_numbers(case)
    names = ("x", "w", "gamma", "beta") + (("residual",) if case.residual else ())
    floats = ("gamma", "beta", "dmean", "dvariance")
    f = {name: jnp.asarray(value, jnp.float32 if name in floats else jnp.bfloat16) for name, value in a.items()}
    mode = "on" if case in WINOGRAD_CASES else "no-winograd"
    window = find_window(f["x"], f["w"], case.stride, case.padding, case.groups, mode)
    assert window is not None
    in_half = case.method == PRODUCTS or (case.method == WINOGRAD and products == "amx")
    assert window.method == (HALF if in_half else case.method)
    unit = Unit(window=window, activation=case.act, epsilon=EPSILON)

    @jax.jit
    def run(*arrays: Any) -> Any:
        def function(x: Any, w: Any, gamma: Any, beta: Any, residual: Any = None) -> Any:
            return unit_train(x, w, gamma, beta, residual, unit)

        results, vjp = jax.vjp(function, *arrays)
        return results, vjp((f["dy"], f["dmean"], f["dvariance"]))

    results, gradients = run(*(f[name] for name in names))
    wanted = expected(case, a, in_bfloat16 if window.method == HALF else np.asarray)
    half = 2.0**-8  # of a unit
    for name, value in zip(("y", "mean", "variance", *names), (*results, *gradients), strict=True):
        error, scale = np.abs(np.asarray(value, np.float64) - wanted[name]), np.abs(wanted[name])
        if name in ("mean", "variance", "gamma", "beta"):
            assert value.dtype == jnp.float32
            assert (error <= 1e-5 * max(scale.max(), 1e-3)).all(), name
        else:
            assert value.dtype == jnp.bfloat16
            # A gradient that is within rounding of the middle between two bfloat16 values may become the other one.
            slack = 2e-3 if name in ("x", "w") and window.method == HALF else 2e-5
            assert (error <= half * scale + slack * max(scale.max(), 1e-3)).all(), f"{name}: {error.max()}"


def test_winograd_is_used_where_tiles_are_filled(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_kernels, "load_kernels", lambda: (variant._replace(half=1), ""))
    w = jnp.zeros((3, 3, 16, 16))
    for size, method in ((1, PRODUCTS), (2, PRODUCTS), (3, WINOGRAD), (5, WINOGRAD), (8, WINOGRAD)):
        x = jnp.zeros((4, size, size, 16))
        assert getattr(find_window(x, w, 1, "SAME", 1, "on"), "method", None) == method
        half = find_window(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), 1, "SAME", 1, "on")
        assert getattr(half, "method", None) == WINOGRAD


def test_amx_multiplies_bfloat16_without_winograd(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = jnp.zeros((2, 8, 8, 16), jnp.bfloat16), jnp.zeros((3, 3, 16, 16), jnp.bfloat16)
    for products, method in (("emulated", WINOGRAD), ("avx512_bf16", WINOGRAD), ("amx", HALF)):
        found = variant._replace(half=HALF_PRODUCTS[products])
        monkeypatch.setattr(native_kernels, "load_kernels", lambda found=found: (found, ""))
        window = find_window(x, w, 1, "SAME", 1, "on")
        assert window is not None
        assert window.method == method


def test_a_gradient_that_nobody_asks_for_is_not_computed() -> None:
    """The images of the first layer and frozen weights have none."""
    x, w = jnp.ones((2, 4, 4, 3)), jnp.ones((3, 3, 3, 4))

    def wanted(*arguments: int) -> list[str]:
        gradient = jax.grad(lambda x, w: conv2d(x, w, kernels="on").sum(), arguments)
        return re.findall(r"'wants', np.int64\((\d)\)", str(jax.make_jaxpr(gradient)(x, w)))

    assert wanted(0, 1) == ["3"]
    assert wanted(1) == ["1"]
    assert wanted(0) == ["2"]


def test_a_gradient_of_bfloat16_that_nobody_asks_for_is_not_computed(
    variant: native_kernels.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_products("emulated", variant, monkeypatch)
    x, w = jnp.ones((2, 4, 4, 3), jnp.bfloat16), jnp.ones((3, 3, 3, 4), jnp.bfloat16)

    def wanted(mode: str, *arguments: int) -> list[str]:
        gradient = jax.grad(lambda x, w: conv2d(x, w, 2, kernels=mode).sum(), arguments)
        return re.findall(r"'wants', np.int64\((\d)\)", str(jax.make_jaxpr(gradient)(x, w)))

    assert wanted("on", 0, 1) == ["3"]
    assert wanted("on", 1) == ["1"]
    assert wanted("on", 0) == ["2"]
    assert wanted("off", 0, 1) == []


def test_nan_and_infinity_stay_what_they_are() -> None:
    """The trainer stops at them; a relu that swallowed them would hide them."""
    x = jnp.ones((2, 4, 4, 16)).at[0, 1, 1, 3].set(jnp.nan)
    w, ones = jnp.ones((1, 1, 16, 16)), jnp.ones(16)
    window = find_window(x, w, 1, "SAME", 1, "on")
    assert window is not None
    y, mean, variance = conv_unit(x, w, window, BatchNorm(gamma=ones, beta=ones, epsilon=1e-3), None, "relu")
    assert np.isnan(y).all()
    assert mean is not None
    assert variance is not None
    assert np.isnan(np.asarray(mean)).all()
    assert np.isnan(np.asarray(variance)).all()


@pytest.mark.parametrize("value", [np.inf, 2.0**127])
def test_what_winograd_makes_of_infinity_stays_in_its_tiles(value: float) -> None:
    """NaN beside infinities, as documented; the trainer stops at both. Plain products keep infinity."""
    x: Any = np.ones((3, 12, 12, 16), np.float32)
    w: Any = np.ones((3, 3, 16, 16), np.float32)
    x[1, 5, 5, 3] = value
    for mode, has_nan in (("on", True), ("no-winograd", False)):
        y = np.asarray(jax.jit(lambda x, mode=mode: conv2d(x, w, 1, "SAME", 1, mode))(x))
        bad = ~np.isfinite(y)
        assert bad.any() == (has_nan or value == np.inf)
        assert np.isnan(y).any() == has_nan
        assert not bad[[0, 2]].any()
        if has_nan:  # a tile of 4x4 outputs sees 6x6 inputs: pixel 5 is in two of each row and column at most
            assert not bad[1, 8:].any()
            assert not bad[1, :, 8:].any()
        elif value == np.inf:
            assert (np.argwhere(bad)[:, 1:3].min(), np.argwhere(bad)[:, 1:3].max()) == (4, 6)


def test_what_the_kernels_do_not_compute_is_left_to_xla() -> None:
    x, w = jnp.ones((2, 8, 8, 16)), jnp.ones((3, 3, 16, 16))
    assert find_window(x, w, 1, "SAME", 1, "off") is None
    assert find_window(x.astype(jnp.float16), w.astype(jnp.float16), 1, "SAME", 1, "on") is None
    assert find_window(x, jnp.ones((3, 3, 4, 32)), 1, "SAME", 4, "on") is None  # more outputs than inputs
    assert find_window(x, w, 1, ((3, 3), (3, 3)), 1, "on") is None


def test_kernels_that_are_asked_for_and_missing_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_kernels, "load_kernels", lambda: (None, "no compiler"))
    for mode in ("auto", "off"):
        check_kernels(mode)
    with pytest.raises(ConfigError, match="no compiler"):
        check_kernels("on")


def test_a_run_on_a_cpu_says_that_it_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_missing_kernels("auto") == []
    monkeypatch.setattr(native_kernels, "load_kernels", lambda: (None, "no compiler"))
    assert describe_missing_kernels("off") == []
    (said,) = describe_missing_kernels("auto")
    assert "XLA computes convolutions" in said
    assert said.endswith("no compiler")


def test_the_kernels_are_compiled_wherever_they_can_be() -> None:
    assert source_hash(FOLDER, KERNEL_SOURCES)
    assert kernels_library()[0] is not None, f"{kernels_library()[1]}. Build them: make native"


PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FAULTS = """
import ctypes, resource, sys, jax, jax.numpy as jnp
if sys.argv[1] == "small":
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
from headrace.ops import conv2d
x, w = jnp.ones((32, 112, 112, 64)), jnp.ones((1, 1, 64, 64))
run = jax.jit(lambda x, w: conv2d(jnp.tanh(conv2d(x, w, kernels="on")), w, kernels="on").sum())
run(x, w).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
run(x, w).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not BUILT, reason="the kernels are not compiled")
@pytest.mark.skipif(not PAGES.is_file() or "[never]" in PAGES.read_text(), reason="the system has no large pages")
def test_kernels_write_into_large_pages():
    """Arrays of 103 MB, 25,088 small pages, which the C library returns to the system after each call."""
    large, small = (
        int(subprocess.run([sys.executable, "-c", FAULTS, pages], capture_output=True, text=True, check=True).stdout)
        for pages in ("large", "small")
    )
    assert large < small / 8
    assert small > 25_000
