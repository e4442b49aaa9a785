"""Loss scaling against a hand-run of its rules."""

import jax
import jax.numpy as jnp
import pytest

from headrace.config.schema import Numerics
from headrace.engine.precision import init_loss_scale, next_loss_scale, overflow_expected

PARAMS = {"initial": 8.0, "growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.5, "max": 64.0}


def run(numerics: Numerics, finite: str):
    """Return (scale, good steps, skipped) after each step; a dot is a finite step, an x is not."""
    state, seen = init_loss_scale(numerics), []
    step = jax.jit(lambda state, finite: next_loss_scale(state, finite, numerics))
    for mark in finite:
        state = step(state, mark == ".")
        seen.append((float(state["scale"]), int(state["good_steps"]), int(state["skipped"])))
    return seen


def test_dynamic_scale_grows_shrinks_and_counts():
    numerics = Numerics(loss_scaling="dynamic", loss_scaling_params=PARAMS)
    assert run(numerics, "...x.x...") == [
        (8, 1, 0),
        (8, 2, 0),
        (32, 0, 0),  # grown after three good steps
        (16, 0, 1),  # halved
        (16, 1, 1),
        (8, 0, 2),  # halved, and the good steps start again
        (8, 1, 2),
        (8, 2, 2),
        (32, 0, 2),
    ]


def test_dynamic_scale_stays_between_one_and_its_maximum():
    numerics = Numerics(loss_scaling="dynamic", loss_scaling_params=PARAMS)
    assert max(scale for scale, _, _ in run(numerics, "." * 20)) == 64.0
    assert [scale for scale, _, _ in run(numerics, "xxxxx")] == [4, 2, 1, 1, 1]


def test_defaults():
    numerics = Numerics(loss_scaling="dynamic")
    state = init_loss_scale(numerics)
    assert float(state["scale"]) == 32768
    almost = {**state, "good_steps": jnp.int32(1998)}
    assert float(next_loss_scale(almost, True, numerics)["scale"]) == 32768
    due = {**state, "good_steps": jnp.int32(1999), "scale": jnp.float32(2**24)}
    assert float(next_loss_scale(due, True, numerics)["scale"]) == 2**24
    assert float(next_loss_scale(due, False, numerics)["scale"]) == 2**23


@pytest.mark.parametrize(("given", "scale"), [(0.0, 1.0), (128.0, 128.0)])
def test_static_scale_stays_and_counts(given, scale):
    assert run(Numerics(loss_scaling=given), "..x.x") == [(scale, 0, n) for n in (0, 0, 1, 1, 2)]


def test_only_a_dynamic_scale_above_one_forgives():
    dynamic = Numerics(loss_scaling="dynamic", loss_scaling_params=PARAMS)
    assert bool(overflow_expected(init_loss_scale(dynamic), dynamic))
    assert not bool(overflow_expected({**init_loss_scale(dynamic), "scale": jnp.float32(1)}, dynamic))
    static = Numerics(loss_scaling=128.0)
    assert not bool(overflow_expected(init_loss_scale(static), static))


def test_state_keeps_its_types_through_a_scan():
    numerics = Numerics(loss_scaling="dynamic", loss_scaling_params=PARAMS)
    finite = jnp.array([True, False, True])
    state, _ = jax.lax.scan(lambda s, f: (next_loss_scale(s, f, numerics), None), init_loss_scale(numerics), finite)
    assert {name: leaf.dtype for name, leaf in state.items()} == {
        "scale": jnp.float32,
        "good_steps": jnp.int32,
        "skipped": jnp.int32,
    }


def test_scaling_saves_float16_gradients_and_cancels():
    """A gradient of 1e-8 is 0 in float16; scaled by 2^15 it is not, and the scale comes out again."""

    def grad(scale: float) -> float:
        def loss(w: jax.Array) -> jax.Array:
            return w.astype(jnp.float16).astype(jnp.float32) * 1e-8 * scale

        return float(jax.grad(loss)(jnp.float32(1.0))) / scale

    assert grad(1.0) == 0.0
    assert grad(2.0**15) == pytest.approx(1e-8, rel=1e-3)
