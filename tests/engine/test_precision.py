"""Number formats and the writing of weights: what is stored, what moves, what does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config.schema import Batch, Numerics
from headrace.core.errors import ConfigError
from headrace.engine import precision as precision_module
from headrace.engine.precision import make_precision, store_weights

write_weights = jax.jit(precision_module.write_weights, static_argnames="precision")

LANES = 1 << 16


def precision_of(name="16.16", half="bfloat16", stochastic=True, accumulate="float32"):
    numerics = Numerics(precision=name, half_type=half, stochastic_rounding=stochastic)
    return make_precision(numerics, Batch(gradient_accumulation_dtype=accumulate))


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize(("name", "compute", "weight"), [("16.16", 16, 16), ("16.32", 16, 32), ("32.32", 32, 32)])
def test_formats(name, half, compute, weight):
    precision = precision_of(name, half, accumulate="bfloat16")
    by_width = {16: jnp.dtype(half), 32: jnp.dtype("float32")}
    assert (precision.compute_dtype, precision.weight_dtype) == (by_width[compute], by_width[weight])
    assert precision.accumulator_dtype == jnp.dtype("bfloat16")
    assert hash(precision) == hash(precision_of(name, half, accumulate="bfloat16"))
    stored = store_weights({"w": np.ones(3, np.float32)}, precision)
    assert stored["w"].dtype == by_width[weight]


def drift(half: str, stochastic: bool, num_lanes: int) -> np.ndarray:
    """Return how far weights of 1000 get in 250 updates of -0.001."""
    precision = precision_of("16.16", half, stochastic)
    params = {"w": jnp.full((num_lanes,), 1000.0, precision.weight_dtype)}
    updates = {"w": jnp.full((num_lanes,), -0.001, jnp.float32)}

    @jax.jit
    def run(params):
        def one(step, params):
            return write_weights(params, updates, 11, step, precision=precision)

        return jax.lax.fori_loop(0, 250, one, params)

    return np.asarray(run(params)["w"]).astype(np.float64) - 1000.0


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_small_updates_vanish_when_rounded_to_nearest(half):
    np.testing.assert_array_equal(drift(half, False, 8), 0.0)


@pytest.mark.parametrize(("half", "place"), [("bfloat16", 4.0), ("float16", 0.5)])
def test_small_updates_add_up_when_rounded_stochastically(half, place):
    """Each update is -place with probability p: drift -250 p place = -0.25 on average, variance 250 p (1 - p) place^2.

    The sum is made in float32 first, which turns 999.999 into 1000 - 16/16384: p place is 16/16384, not 0.001.
    """
    moved = drift(half, True, LANES)
    p = 16 / 16384 / place
    error = np.sqrt(250 * p * (1 - p) * place**2 / LANES)
    assert abs(moved.mean() + 250 * p * place) < 4 * error
    assert moved.mean() == pytest.approx(-0.25, abs=0.02)
    assert moved.var() == pytest.approx(250 * p * (1 - p) * place**2, rel=0.05)
    assert set(np.unique(moved / place)) <= set(-np.arange(0.0, 12.0))


def test_the_same_update_moves_a_float32_weight():
    params, updates = {"w": jnp.full((1,), 1000.0)}, {"w": jnp.full((1,), -0.001)}
    moved = write_weights(params, updates, 0, 0, precision=precision_of("16.32"))
    assert moved["w"].dtype == jnp.float32
    assert float(moved["w"][0]) == np.float32(999.999)


def test_a_tensor_keeps_its_bits_whatever_else_is_in_the_tree():
    precision, weight = precision_of(), jnp.full((64,), 1.001, jnp.bfloat16)
    update = jnp.full((64,), 1e-4)
    params, updates = {"a": weight, "b": {"w": weight}}, {"a": update, "b": {"w": update}}
    alone = write_weights({"b": params["b"]}, {"b": updates["b"]}, 3, 9, precision=precision)
    beside = write_weights(params, updates, 3, 9, precision=precision)
    np.testing.assert_array_equal(alone["b"]["w"], beside["b"]["w"])
    assert np.any(np.asarray(beside["a"]) != np.asarray(beside["b"]["w"]))


def test_gradients_underflow_in_half_compute_only():
    """1e-7 x 0.1 is 0 in float16 and not in float32 (REFERENCE: precision tests)."""
    for name, underflows in (("16.16", True), ("16.32", True), ("32.32", False)):
        dtype = precision_of(name, "float16").compute_dtype
        product = jnp.asarray(1e-7, dtype) * jnp.asarray(0.1, dtype)
        assert (float(product) == 0) is underflows


def test_nan_and_infinity_are_written_as_they_are():
    params, updates = {"w": jnp.ones(3, jnp.bfloat16)}, {"w": jnp.float32([np.nan, np.inf, -np.inf])}
    written = np.asarray(write_weights(params, updates, 0, 0, precision=precision_of())["w"]).astype(np.float64)
    np.testing.assert_array_equal(written, [np.nan, np.inf, -np.inf])


@pytest.mark.parametrize("name", ["foo", "32.16", "16"])
def test_unsupported_precision_is_refused(name):
    with pytest.raises(ConfigError, match=r"compute\.update"):
        precision_of(name)
