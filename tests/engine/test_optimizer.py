"""Optimizers against loops in NumPy float64 and closed forms."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from headrace.config.schema import Learning
from headrace.core.errors import ConfigError
from headrace.engine import optimizer as optimizer_module
from headrace.engine.optimizer import global_norm, make_optimizer

LARS = {"momentum": 0.9, "weight_decay": 0.01, "eeta": 0.02, "epsilon": 1e-3}
RMSPROP = {"momentum": 0.9, "decay": 0.9, "epsilon": 1e-3}


def rates(step: Any) -> jax.Array:
    """Return a rate that moves at every step, which tells apart the forms of momentum."""
    return 0.1 / (1.0 + jnp.asarray(step).astype(jnp.float32))


def rate_at(step: int) -> float:
    return 0.1 / (1 + step)


def make(name: str, params: dict[str, Any], curve: Any = rates, batch: int = 1, **options: Any) -> Any:
    return make_optimizer(Learning(optimizer=name, optimizer_params=params, **options), curve, batch)


def constant(value: float):
    return lambda step: jnp.float32(value) + 0 * jnp.asarray(step)


def train(tx: Any, start: Any, grads_of: Any, num_steps: int) -> Any:
    params = jax.tree.map(jnp.asarray, start)
    state, update = tx.init(params), jax.jit(tx.update)
    for step in range(num_steps):
        updates, state = update(grads_of(step), state, params, step=step)
        params = jax.tree.map(lambda w, u: w + u, params, updates)
    return params


@pytest.fixture
def start() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"kernel": (3, 4), "bias": (4,), "gamma": (4,)}
    return {"conv": {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}}


def grads_at(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(100 + step)
    shapes = {"kernel": (3, 4), "bias": (4,), "gamma": (4,)}
    return {"conv": {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}}


def by_hand(start: Any, num_steps: int, rule: Any) -> dict[str, np.ndarray]:
    """Run `rule(name, w, g, slots, rate) -> w` in float64 on every tensor."""
    weights = {name: value.astype(np.float64) for name, value in start["conv"].items()}
    slots: dict[str, dict[str, Any]] = {name: {} for name in weights}
    for step in range(num_steps):
        for name, grad in grads_at(step)["conv"].items():
            weights[name] = rule(name, weights[name], grad.astype(np.float64), slots[name], rate_at(step))
    return weights


def assert_same(params: Any, expected: dict[str, np.ndarray]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(params["conv"][name], value, rtol=2e-5, atol=2e-6, err_msg=name)


# ------------------------------------------------------------------------------------------------------------------ SGD
def test_momentum_sequence_in_closed_form():
    """With a constant gradient and rate, after n steps w = w0 - lr g sum_k (1 - m^k)/(1 - m)."""
    tx = make("sgd", {"momentum": 0.9}, constant(0.5))
    params = train(tx, {"w": np.array([2.0], np.float32)}, lambda step: {"w": jnp.ones(1)}, 10)
    expected = 2.0 - 0.5 * sum((1 - 0.9**k) / (1 - 0.9) for k in range(1, 11))
    assert float(params["w"][0]) == pytest.approx(expected, rel=1e-5)


def test_velocity_holds_rates_of_the_past():
    """Keras' form: v = m v - lr g. Two steps with rates 0.1, 0.05, gradient 1, m 0.5: -(0.1 + 0.05 + 0.5 x 0.1)."""
    params = train(
        make("sgd", {"momentum": 0.5}), {"w": np.array([0.0], np.float32)}, lambda step: {"w": jnp.ones(1)}, 2
    )
    assert float(params["w"][0]) == pytest.approx(-0.2, rel=1e-6)


def test_momentum_holds_gradients_of_the_past():
    """TensorFlow 1's form: v = m v + g, w -= lr v. Rates 0.1, 0.05, gradient 1, m 0.5: -(0.1 + 0.05 x 1.5)."""
    tx = make("momentum", {"momentum": 0.5})
    params = train(tx, {"w": np.array([0.0], np.float32)}, lambda step: {"w": jnp.ones(1)}, 2)
    assert float(params["w"][0]) == pytest.approx(-0.175, rel=1e-6)


def test_momentum_matches_numpy(start):
    def rule(name, w, g, slots, rate):
        slots["v"] = 0.9 * slots.get("v", 0.0) + g
        return w - rate * slots["v"]

    assert_same(train(make("momentum", {"momentum": 0.9}), start, grads_at, 6), by_hand(start, 6, rule))


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_matches_numpy(start, nesterov):
    def rule(name, w, g, slots, rate):
        slots["v"] = 0.9 * slots.get("v", 0.0) - rate * g
        return w + (0.9 * slots["v"] - rate * g if nesterov else slots["v"])

    params = train(make("sgd", {"momentum": 0.9, "nesterov": nesterov}), start, grads_at, 6)
    assert_same(params, by_hand(start, 6, rule))


def test_sgd_without_momentum_keeps_no_slots(start):
    tx = make("sgd", {"momentum": 0})
    assert jax.tree.leaves(tx.init(start)) == []
    assert_same(train(tx, start, grads_at, 3), by_hand(start, 3, lambda name, w, g, slots, rate: w - rate * g))


# ----------------------------------------------------------------------------------------------------------------- LARS
def test_lars_trust_ratio_by_hand():
    """|w| = 5, |g| = 2, wd 0.1, eeta 0.01, eps 0.5: trust = 0.05 / (2 + 0.5 + 0.5) = 1/60; step = lr/60 (g + 0.1 w)."""
    tx = make("lars", {"momentum": 0.9, "weight_decay": 0.1, "eeta": 0.01, "epsilon": 0.5}, constant(6.0))
    params = {"kernel": jnp.array([3.0, 4.0], np.float32)}
    updates, _ = tx.update({"kernel": jnp.array([2.0, 0.0], np.float32)}, tx.init(params), params, step=0)
    np.testing.assert_allclose(updates["kernel"], [-0.1 * 2.3, -0.1 * 0.4], rtol=1e-6)


def test_lars_epsilon_zero_means_1e_7():
    tx = make("lars", {"momentum": 0, "weight_decay": 0, "eeta": 1.0, "epsilon": 0}, constant(1.0))
    params = {"kernel": jnp.array([1.0], np.float32)}
    updates, _ = tx.update({"kernel": jnp.array([1e-7], np.float32)}, tx.init(params), params, step=0)
    np.testing.assert_allclose(updates["kernel"], [-0.5], rtol=1e-5)


@pytest.mark.parametrize(("weight", "grad", "expected"), [(0.0, 2.0, -2.0), (2.0, 0.0, -0.2)])
def test_lars_trust_is_one_at_a_zero_norm(weight, grad, expected):
    tx = make("lars", LARS | {"weight_decay": 0.1}, constant(1.0))
    params = {"kernel": jnp.array([weight], np.float32)}
    updates, _ = tx.update({"kernel": jnp.array([grad], np.float32)}, tx.init(params), params, step=0)
    np.testing.assert_allclose(updates["kernel"], [expected], rtol=1e-6)


def test_lars_matches_numpy_with_exclusions(start):
    def rule(name, w, g, slots, rate):
        trust, decay = 1.0, 0.0
        if name == "kernel":
            norm_w, norm_g = np.linalg.norm(w), np.linalg.norm(g)
            trust, decay = 0.02 * norm_w / (norm_g + 0.01 * norm_w + 1e-3), 0.01
        slots["v"] = 0.9 * slots.get("v", 0.0) + rate * trust * (g + decay * w)
        return w - slots["v"]

    assert_same(train(make("lars", LARS), start, grads_at, 6), by_hand(start, 6, rule))


def test_lars_has_the_rate_inside_its_velocity_unlike_timm(start):
    """The same as velocity x rate while the rate stands still, another sequence where it changes, as documented."""

    def outside(name, w, g, slots, rate):
        trust, decay = 1.0, 0.0
        if name == "kernel":
            norm_w, norm_g = np.linalg.norm(w), np.linalg.norm(g)
            trust, decay = 0.02 * norm_w / (norm_g + 0.01 * norm_w + 1e-3), 0.01
        slots["v"] = 0.9 * slots.get("v", 0.0) + trust * (g + decay * w)
        return w - rate * slots["v"]

    changing = by_hand(start, 6, outside)
    ours = train(make("lars", LARS), start, grads_at, 6)
    assert max(np.abs(np.asarray(ours["conv"][name]) - changing[name]).max() for name in changing) > 0.05
    steady = by_hand(start, 6, lambda name, w, g, slots, _rate: outside(name, w, g, slots, 0.1))
    assert_same(train(make("lars", LARS, constant(0.1)), start, grads_at, 6), steady)


# -------------------------------------------------------------------------------------------------------------- RMSprop
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rmsprop_matches_numpy(start, momentum):
    def rule(name, w, g, slots, rate):
        slots["s"] = 0.9 * slots.get("s", 0.0) + 0.1 * g**2
        slots["v"] = momentum * slots.get("v", 0.0) + rate * g / np.sqrt(slots["s"] + 1e-3)
        return w - slots["v"]

    tx = make("rmsprop", RMSPROP | {"momentum": momentum})
    assert_same(train(tx, start, grads_at, 6), by_hand(start, 6, rule))


def test_rmsprop_can_start_from_ones():
    """The older form: ms starts at 1, so after one step it is rho + (1 - rho) g^2."""
    tx = make("rmsprop", RMSPROP | {"initial_accumulator": 1.0}, constant(0.1))
    params = {"w": jnp.zeros(1)}
    _, slots = tx.update({"w": jnp.full(1, 2.0)}, tx.init(params), params, step=0)
    assert float(slots["mean_square"]["w"][0]) == pytest.approx(0.9 + 0.1 * 4, rel=1e-6)


def test_rmsprop_epsilon_is_inside_the_root():
    """g = 1e-3, rho 0, eps 1e-2: step = lr 1e-3 / sqrt(1e-6 + 1e-2) (outside it would be 1e-3 / 1.1e-2)."""
    tx = make("rmsprop", {"momentum": 0, "decay": 0.0, "epsilon": 1e-2}, constant(1.0))
    updates, _ = tx.update(
        {"w": jnp.array([1e-3], np.float32)}, tx.init({"w": jnp.zeros(1)}), {"w": jnp.zeros(1)}, step=0
    )
    assert float(updates["w"][0]) == pytest.approx(-1e-3 / math.sqrt(1e-6 + 1e-2), rel=1e-5)


def test_rmsprop_rho_from_the_global_batch():
    """Exponent -14 and a global batch of 768 give 0.953125 (REFERENCE): ms after one step is (1 - rho) g^2."""
    tx = make("rmsprop", {"momentum": 0, "base_decay_exponent": -14, "epsilon": 0.0}, constant(1.0), batch=768)
    _, state = tx.update({"w": jnp.array([2.0], np.float32)}, tx.init({"w": jnp.zeros(1)}), {"w": jnp.zeros(1)}, step=0)
    assert float(state["mean_square"]["w"][0]) == pytest.approx((1 - 0.953125) * 4, rel=1e-6)
    params = {"momentum": 0, "base_decay_exponent": -9, "epsilon": 0.0}
    make("rmsprop", params, constant(1.0), batch=512)
    with pytest.raises(ConfigError, match=r"-9 with a global batch of 1,024 is a decay of -1\."):
        make("rmsprop", params, constant(1.0), batch=1024)


# ---------------------------------------------------------------------------------------------------------------- AdamW
def test_adamw_matches_numpy(start):
    def rule(name, w, g, slots, rate):
        n = slots["n"] = slots.get("n", 0) + 1
        slots["m"] = 0.8 * slots.get("m", 0.0) + 0.2 * g
        slots["s"] = 0.95 * slots.get("s", 0.0) + 0.05 * g**2
        step = slots["m"] / (1 - 0.8**n) / (np.sqrt(slots["s"] / (1 - 0.95**n)) + 1e-6)
        return w - rate * (step + 0.3 * w)

    tx = make("adamw", {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6}, weight_decay=0.3)
    assert_same(train(tx, start, grads_at, 6), by_hand(start, 6, rule))


# ----------------------------------------------------------------------------------------------------------------- LAMB
def test_lamb_matches_numpy(start):
    """The step is as long as the weight times the rate, whatever the gradient; names without decay take Adam's step."""

    def rule(name, w, g, slots, rate):
        n = slots["n"] = slots.get("n", 0) + 1
        slots["m"] = 0.8 * slots.get("m", 0.0) + 0.2 * g
        slots["s"] = 0.95 * slots.get("s", 0.0) + 0.05 * g**2
        step = slots["m"] / (1 - 0.8**n) / (np.sqrt(slots["s"] / (1 - 0.95**n)) + 1e-6)
        if name != "kernel":
            return w - rate * step
        step = step + 0.3 * w
        return w - rate * np.linalg.norm(w) / np.linalg.norm(step) * step

    options: dict[str, Any] = {"weight_decay": 0.3, "weight_decay_exclude": ("bias$", "gamma$")}
    tx = make("lamb", {"beta1": 0.8, "beta2": 0.95}, **options)
    assert_same(train(tx, start, grads_at, 6), by_hand(start, 6, rule))


def test_lamb_is_optax_lamb_where_nothing_is_excluded(start):
    theirs = optax.lamb(rate_at(0), b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.02)
    tx = make("lamb", {}, constant(rate_at(0)), weight_decay=0.02)
    ours = train(tx, start, grads_at, 4)
    params: Any = jax.tree.map(jnp.asarray, start)
    state = theirs.init(params)
    for step in range(4):
        updates, state = theirs.update(grads_at(step), state, params)
        params = optax.apply_updates(params, updates)
    assert_same(ours, params["conv"])


def test_lamb_takes_the_plain_step_where_a_norm_is_zero():
    grads = {"zero": jnp.ones(2), "still": jnp.zeros(2)}
    tx = make("lamb", {}, constant(0.1))
    moved = train(tx, {"zero": np.zeros(2, np.float32), "still": np.ones(2, np.float32)}, lambda step: grads, 1)
    np.testing.assert_allclose(moved["zero"], -0.1, rtol=1e-4)  # Adam's first step has length 1
    np.testing.assert_array_equal(moved["still"], 1.0)


# ------------------------------------------------------------------------------------- clipping, L2, decay, their order
def test_decay_alone_takes_rate_times_decay_off():
    """Zero gradient, rate 1: w = 1 - wd; rate 0.5: 1 - wd / 2."""
    zero, one = {"w": jnp.zeros(1)}, {"w": np.array([1.0], np.float32)}
    for rate in (1.0, 0.5):
        tx = make("sgd", {"momentum": 0}, constant(rate), weight_decay=0.1)
        assert float(train(tx, one, lambda step: zero, 1)["w"][0]) == pytest.approx(1 - 0.1 * rate, rel=1e-6)


def test_l2_alone_takes_rate_times_l2_off():
    tx = make("sgd", {"momentum": 0}, constant(1.0), l2_regularization=0.1)
    params = train(tx, {"w": np.array([1.0], np.float32)}, lambda step: {"w": jnp.zeros(1)}, 1)
    assert float(params["w"][0]) == pytest.approx(0.9, rel=1e-6)


def test_l2_goes_through_momentum_and_decay_does_not():
    """Zero gradient, rate 1, m 0.5, factor 0.1. L2: 1 -> 0.9 -> 0.9 - 0.05 - 0.09; decay: 1 -> 0.9 -> 0.81."""
    zero, one = {"w": jnp.zeros(1)}, {"w": np.array([1.0], np.float32)}
    coupled = train(make("sgd", {"momentum": 0.5}, constant(1.0), l2_regularization=0.1), one, lambda s: zero, 2)
    decoupled = train(make("sgd", {"momentum": 0.5}, constant(1.0), weight_decay=0.1), one, lambda s: zero, 2)
    assert float(coupled["w"][0]) == pytest.approx(0.76, rel=1e-6)
    assert float(decoupled["w"][0]) == pytest.approx(0.81, rel=1e-6)


@pytest.mark.parametrize("option", ["l2_regularization", "weight_decay"])
def test_exclusions_apply_to_l2_and_decay(option):
    excluded: dict[str, Any] = {"weight_decay_exclude": ("(beta|gamma)$", "^head/"), option: 0.1}
    tx = make_optimizer(Learning(optimizer_params={"momentum": 0}, **excluded), constant(1.0), 1)
    names = {"conv": ("kernel", "gamma", "beta", "bias"), "head": ("kernel",)}
    ones = {block: {name: jnp.ones(1) for name in leaves} for block, leaves in names.items()}
    zeros = jax.tree.map(jnp.zeros_like, ones)
    moved = jax.tree.map(lambda w: round(float(w[0]), 6), train(tx, ones, lambda step: zeros, 1))
    assert moved == {"conv": {"kernel": 0.9, "gamma": 1.0, "beta": 1.0, "bias": 0.9}, "head": {"kernel": 1.0}}


def test_order_is_clip_then_l2_then_optimizer_then_decay():
    """g = (3, 4) clipped to norm 1 -> (0.6, 0.8); + 0.5 w -> (1.1, 1.3); rate 0.1; - 0.1 x 0.2 w."""
    tx = make("sgd", {"momentum": 0}, constant(0.1), gradient_clipping=1.0, l2_regularization=0.5, weight_decay=0.2)
    params, grads = {"w": jnp.ones(2)}, {"w": jnp.array([3.0, 4.0], np.float32)}
    updates, _ = tx.update(grads, tx.init(params), params, step=0)
    np.testing.assert_allclose(updates["w"], [-0.11 - 0.02, -0.13 - 0.02], rtol=1e-6)
    # a norm from outside (here: of a larger tree, 10) is used instead of one's own
    updates, _ = tx.update(grads, tx.init(params), params, step=0, grad_norm=jnp.float32(10.0))
    np.testing.assert_allclose(updates["w"], [-0.1 * (0.3 + 0.5) - 0.02, -0.1 * (0.4 + 0.5) - 0.02], rtol=1e-6)


def test_a_gradient_below_the_limit_is_left_alone_to_the_bit(start):
    plain, clipped = make("sgd", {"momentum": 0.9}), make("sgd", {"momentum": 0.9}, gradient_clipping=1e6)
    for a, b in zip(*(jax.tree.leaves(train(tx, start, grads_at, 3)) for tx in (plain, clipped)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("name", "options"),
    [("sgd", {"momentum": 0.9}), ("lars", LARS), ("rmsprop", RMSPROP), ("adamw", {"epsilon": 1e-8}), ("lamb", {})],
)
def test_half_width_weights_and_gradients_are_updated_in_float32(name, options):
    tx = make(name, options, l2_regularization=1e-3, weight_decay=1e-3, gradient_clipping=1.0)
    params = {"kernel": jnp.ones((2, 2), jnp.bfloat16)}
    grads = {"kernel": jnp.ones((2, 2), jnp.float16)}
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params, step=0)
    assert updates["kernel"].dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim} == {jnp.dtype("float32")}


# ----------------------------------------------------------------------------------------------------------------- norm
@pytest.mark.parametrize("limit", [0, 20, 1 << 16])
def test_global_norm_matches_numpy_however_leaves_are_joined(monkeypatch, limit):
    monkeypatch.setattr(optimizer_module, "SMALL_LEAF_SIZE", limit)
    rng = np.random.default_rng(1)
    tree = {str(shape): rng.normal(size=shape).astype(np.float32) for shape in ((), (3,), (4, 5), (3, 3, 8, 8))}
    expected = math.sqrt(sum(float(np.sum(leaf.astype(np.float64) ** 2)) for leaf in tree.values()))
    assert float(global_norm(jax.tree.map(jnp.asarray, tree))) == pytest.approx(expected, rel=1e-6)


def test_global_norm_of_half_gradients_does_not_overflow():
    assert float(global_norm([jnp.full((4,), 300.0, jnp.float16)])) == pytest.approx(600.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_global_norm_shows_a_number_that_is_not_finite(bad):
    assert not math.isfinite(float(global_norm({"a": jnp.ones(3), "b": jnp.array([1.0, bad], np.float32)})))


def test_unknown_optimizer_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="adamw"):
        make("adamv", {})
