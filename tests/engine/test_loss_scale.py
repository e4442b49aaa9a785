"""Loss scaling against a hand-run of its rules."""

import jax
import jax.numpy as jnp
import pytest

from headrace.config.params import complete
from headrace.config.schema import Numerics
from headrace.core.errors import ConfigError
from headrace.engine.loss_scale import (
    init_loss_scale,
    make_loss_scaling,
    next_loss_scale,
    overflow_expected,
    resumed_loss_scale,
)
from headrace.rows.row import Span

SPAN = Span(global_batch_size=8, updates_per_epoch=2, num_epochs=2)
PARAMS = {"initial": 8.0, "growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.5, "max": 64.0}


def run(numerics: Numerics, finite: str):
    """Return (scale, good steps, skipped) after each step; a dot is a finite step, an x is not."""
    scaling = make_loss_scaling(numerics, SPAN)
    state, seen = init_loss_scale(scaling), []
    step = jax.jit(lambda state, finite: next_loss_scale(state, finite, scaling))
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
    scaling = make_loss_scaling(Numerics(loss_scaling="dynamic"), SPAN)
    state = init_loss_scale(scaling)
    assert float(state["scale"]) == 32768
    almost = {**state, "good_steps": jnp.int32(1998)}
    assert float(next_loss_scale(almost, True, scaling)["scale"]) == 32768
    due = {**state, "good_steps": jnp.int32(1999), "scale": jnp.float32(2**24)}
    assert float(next_loss_scale(due, True, scaling)["scale"]) == 2**24
    assert float(next_loss_scale(due, False, scaling)["scale"]) == 2**23


@pytest.mark.parametrize(("given", "scale"), [(0.0, 1.0), (128.0, 128.0)])
def test_static_scale_stays_and_counts(given, scale):
    assert run(Numerics(loss_scaling=given), "..x.x") == [(scale, 0, n) for n in (0, 0, 1, 1, 2)]


def test_only_a_dynamic_scale_above_one_forgives():
    dynamic = make_loss_scaling(Numerics(loss_scaling="dynamic", loss_scaling_params=PARAMS), SPAN)
    assert bool(overflow_expected(init_loss_scale(dynamic), dynamic))
    assert not bool(overflow_expected({**init_loss_scale(dynamic), "scale": jnp.float32(1)}, dynamic))
    static = make_loss_scaling(Numerics(loss_scaling=128.0), SPAN)
    assert not bool(overflow_expected(init_loss_scale(static), static))


def test_state_keeps_its_types_through_a_scan():
    scaling = make_loss_scaling(Numerics(loss_scaling="dynamic", loss_scaling_params=PARAMS), SPAN)
    finite = jnp.array([True, False, True])
    state, _ = jax.lax.scan(lambda s, f: (next_loss_scale(s, f, scaling), None), init_loss_scale(scaling), finite)
    assert {name: leaf.dtype for name, leaf in state.items()} == {
        "scale": jnp.float32,
        "good_steps": jnp.int32,
        "skipped": jnp.int32,
    }


def doubling(initial: float, final: float) -> Numerics:
    return Numerics(loss_scaling="doubling", loss_scaling_params={"initial": initial, "final": final})


def by_hand(numerics: Numerics, span: Span) -> list[float]:
    """Return the scale of every step of a run, as the state goes through it."""
    scaling = make_loss_scaling(numerics, span)
    after = jax.jit(lambda state, step: next_loss_scale(state, True, scaling, step))
    state, seen = resumed_loss_scale(init_loss_scale(scaling), 0, scaling), []
    for step in range(span.num_epochs * span.updates_per_epoch):
        seen.append(float(state["scale"]))
        state = after(state, step)
    return seen


def test_doubling_fills_equal_parts_of_the_run():
    """16 to 128 in 100 epochs: 16 in the first 25, then 32, 64 and 128, as the reference's ramp has it."""
    span = Span(global_batch_size=8, updates_per_epoch=2, num_epochs=100)
    assert by_hand(doubling(16, 128), span) == [16.0] * 50 + [32.0] * 50 + [64.0] * 50 + [128.0] * 50
    odd = Span(global_batch_size=8, updates_per_epoch=7, num_epochs=1)  # parts begin at floor(k x 7 / 3)
    assert by_hand(doubling(1, 4), odd) == [1, 1, 2, 2, 4, 4, 4]
    assert by_hand(doubling(4, 4), odd) == [4] * 7
    short = Span(global_batch_size=8, updates_per_epoch=2, num_epochs=1)  # fewer steps than parts
    assert by_hand(doubling(1, 8), short) == [2, 8]


def test_stepped_changes_at_its_epochs():
    numerics = Numerics(loss_scaling="stepped", loss_scaling_params={"values": [8, 2, 32], "boundaries": [1, 2.5]})
    span = Span(global_batch_size=8, updates_per_epoch=4, num_epochs=4)
    assert by_hand(numerics, span) == [8] * 4 + [2] * 6 + [32] * 6


def test_a_resumed_scale_is_that_of_the_options():
    span = Span(global_batch_size=8, updates_per_epoch=10, num_epochs=4)
    saved = {"scale": jnp.float32(5), "good_steps": jnp.int32(2), "skipped": jnp.int32(1)}

    def resumed(numerics: Numerics, step: int) -> float:
        found = resumed_loss_scale(saved, step, make_loss_scaling(numerics, span))
        assert (int(found["good_steps"]), int(found["skipped"])) == (2, 1)
        return float(found["scale"])

    assert [resumed(doubling(1, 8), step) for step in (9, 10, 29, 30)] == [1, 2, 4, 8]
    assert resumed(Numerics(loss_scaling=64.0), 10) == 64
    assert resumed(Numerics(), 10) == 1
    assert resumed(Numerics(loss_scaling="dynamic"), 10) == 5, "it follows the run, not the options"


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("stepped", {"values": [1, 2], "boundaries": [1, 2]}, "2 values for 2 boundaries"),
        ("stepped", {"values": [0, 2], "boundaries": [1]}, "more than 0"),
        ("stepped", {"values": [1, 2, 3], "boundaries": [2, 1]}, "must rise"),
        ("stepped", {}, "lacks boundaries, values"),
        ("doubling", {"initial": 16, "final": 100}, "doubled a whole number of times"),
        ("doubling", {"initial": 16, "final": 8}, "doubled a whole number of times"),
    ],
)
def test_schedules_that_cannot_be_meant_are_refused(name, params, said):
    with pytest.raises(ConfigError, match=said):
        complete("loss_scaling", name, params)


def test_scaling_saves_float16_gradients_and_cancels():
    """A gradient of 1e-8 is 0 in float16; scaled by 2^15 it is not, and the scale comes out again."""

    def grad(scale: float) -> float:
        def loss(w: jax.Array) -> jax.Array:
            return w.astype(jnp.float16).astype(jnp.float32) * 1e-8 * scale

        return float(jax.grad(loss)(jnp.float32(1.0))) / scale

    assert grad(1.0) == 0.0
    assert grad(2.0**15) == pytest.approx(1e-8, rel=1e-3)
