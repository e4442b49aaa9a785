"""Stochastic rounding against NumPy's own idea of 16-bit neighbours (ml_dtypes), in statistics and at the edges."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from headrace.core.rng import bits
from headrace.engine.precision import element_bits, stochastic_round

HALF = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
LARGEST = {"bfloat16": float(ml_dtypes.finfo(ml_dtypes.bfloat16).max), "float16": 65504.0}
SMALLEST = {"bfloat16": float(ml_dtypes.finfo(ml_dtypes.bfloat16).smallest_subnormal), "float16": 2.0**-24}

VALUES = [1.0, 1 / 3, 0.1, -0.7, 3.14159, 999.999, -1000.001, 1.0 + 2.0**-20, 2.0 - 2.0**-20, 5e4, -6.1e-5, 1e-6, 3e-7]
VALUES += [6.0e-8, -3.3e-8, 1e-9, 2.0**-33, 65503.9, 0.0]
WIDE = [*VALUES, 1e-30, 1e-38, 1.1e-38, -1.2e-38, 3e-39, 1e-40, 3.0e38]  # beyond float16's exponents


def values_for(name: str) -> list[float]:
    return WIDE if name == "bfloat16" else VALUES


def all_patterns(name: str) -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(HALF[name])


def widened(half: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaN
        return half.astype(np.float32)


def neighbours(x: float, name: str) -> tuple[float, float]:
    """Return the nearest representable values below and above, from the sorted list of all of them."""
    grid = widened(all_patterns(name))
    grid = np.unique(grid[np.isfinite(grid)].astype(np.float64))
    return float(grid[grid <= x].max()), float(grid[grid >= x].min())


rounded = jax.jit(stochastic_round, static_argnums=1)


@pytest.mark.parametrize("name", HALF)
def test_only_neighbours_occur_and_the_mean_is_unbiased(name):
    lanes, values = 1 << 17, np.array(values_for(name), np.float32)
    random_bits = bits(np.uint32(7), np.arange(lanes, dtype=np.uint32))
    for x in values:
        y = np.asarray(rounded(jnp.full((lanes,), x), name, random_bits)).astype(np.float64)
        low, high = neighbours(float(x), name)
        assert set(np.unique(y)) <= {low, high}, x
        share = (float(x) - low) / (high - low) if high > low else 0.0
        error = 4 * (high - low) * np.sqrt(share * (1 - share) / lanes)
        assert abs(y.mean() - float(x)) <= error + 2.0**-56, x


@pytest.mark.parametrize("name", HALF)
def test_probability_is_exact_at_every_threshold(name):
    """Evenly spread bits instead of random ones: the share that goes up is the fraction itself, to the last place."""
    every = jnp.arange(1 << 16, dtype=jnp.uint32) << 16
    one_up = 2.0**-7 if name == "bfloat16" else 2.0**-10
    for part in (1, 2, 3, 1000, 4095):
        x = np.float32(1 + one_up * part / 4096)
        y = np.asarray(rounded(jnp.full(every.shape, x), name, every)).astype(np.float64)
        assert np.mean(y > 1) == part / 4096


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("random_word", [0, 0x7FFFFFFF, 0xFFFFFFFF])
def test_representable_values_stay(name, random_word):
    """All 65,536 patterns: finite ones and infinities come back bit for bit, NaN stays NaN."""
    grid = all_patterns(name)
    wide = jnp.asarray(widened(grid))
    back = np.asarray(rounded(wide, name, jnp.full(grid.shape, random_word, jnp.uint32)))
    nan = np.isnan(widened(grid))
    np.testing.assert_array_equal(back.view(np.uint16)[~nan], grid.view(np.uint16)[~nan])
    assert np.isnan(widened(back)[nan]).all()
    assert nan.sum() > 0


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("random_word", [0, 0xFFFFFFFF])
def test_finite_values_saturate(name, random_word):
    top = np.nextafter(np.float32(np.finfo(np.float32).max), np.float32(0))
    beyond = 70000.0 if name == "float16" else 3.39e38
    x = np.array([LARGEST[name], top, -top, beyond, np.inf, -np.inf], np.float32)
    y = np.asarray(rounded(jnp.asarray(x), name, jnp.full(x.shape, random_word, jnp.uint32))).astype(np.float64)
    np.testing.assert_array_equal(y[:4], np.array([1, 1, -1, 1]) * LARGEST[name])
    assert (y[4], y[5]) == (np.inf, -np.inf)


@pytest.mark.parametrize("name", HALF)
def test_signs_of_zero_and_the_smallest_step(name):
    y = np.asarray(rounded(jnp.float32([0.0, -0.0]), name, jnp.zeros(2, jnp.uint32))).astype(np.float32)
    assert list(np.signbit(y)) == [False, True]
    half_step = jnp.full((2,), np.float32(SMALLEST[name] / 2))
    y = np.asarray(rounded(half_step, name, jnp.uint32([0, 0xFFFFFFFF]))).astype(np.float64)
    assert list(y) == [SMALLEST[name], 0.0]


def test_bits_are_an_address():
    """Each of name, seed, step and element changes the bits; nothing else does; traced and whole steps agree."""
    eager = element_bits("conv/kernel", (3, 3, 4, 8), 5, 17)
    traced = jax.jit(element_bits, static_argnums=(0, 1))
    base = np.asarray(traced("conv/kernel", (3, 3, 4, 8), 5, 17))
    np.testing.assert_array_equal(base, eager)
    for other in (("conv/bias", 5, 17), ("conv/kernel", 6, 17), ("conv/kernel", 5, 18)):
        changed = np.asarray(traced(other[0], (3, 3, 4, 8), *other[1:]))
        assert np.mean(changed == base) < 0.02
    assert len(np.unique(base)) == base.size
    flat = np.asarray(traced("conv/kernel", (288,), 5, 17))
    np.testing.assert_array_equal(base.reshape(-1), flat)  # the element's number counts, not the shape
    assert traced("scale", (), 5, 17).shape == ()


def test_bits_are_even_and_uncorrelated_over_steps():
    lanes = 1 << 16
    a, b = (np.asarray(element_bits("w", (lanes,), 0, step)).astype(np.float64) / 2**32 for step in (0, 1))
    for u in (a, b):
        assert abs(u.mean() - 0.5) < 4 * np.sqrt(1 / 12 / lanes)
        assert abs(np.mean((u[1:] - 0.5) * (u[:-1] - 0.5)) * 12) < 4 / np.sqrt(lanes)
    assert abs(np.mean((a - 0.5) * (b - 0.5)) * 12) < 4 / np.sqrt(lanes)


def test_any_seed_of_32_bits_addresses_the_bits():
    large = element_bits("w", (4,), 2**32 - 1, 0)
    assert np.array_equal(large, element_bits("w", (4,), -1, 0))
    assert not np.array_equal(large, element_bits("w", (4,), 2**31, 0))
