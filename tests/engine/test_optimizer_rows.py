"""Muon, Lion, RAdam, NAdam and lookahead against loops in NumPy float64; what every row of the table promises."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.config.params import complete
from headrace.config.schema import Learning
from headrace.core.errors import ConfigError
from headrace.core.tree import flatten_named
from headrace.engine.optimizer import make_optimizer
from headrace.plan.memory import optimizer_slots
from headrace.rows.optimizers import OPTIMIZERS
from headrace.rows.optimizers.muon import HEADS, orthogonal
from headrace.rows.values import REQUIRED

SHAPES = {
    "conv/kernel": (3, 3, 4, 6),
    "wide/kernel": (1, 1, 12, 5),
    "depthwise/kernel": (3, 3, 1, 4),
    "conv/gamma": (6,),
    "predictions/kernel": (6, 3),
    "predictions/bias": (3,),
}
# Settings of the rows whose keys have no defaults.
NEEDED: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "momentum": {"momentum": 0.9},
    "lars": {"momentum": 0.9, "weight_decay": 1e-4, "eeta": 0.02, "epsilon": 0},
    "rmsprop": {"momentum": 0.9, "decay": 0.9, "epsilon": 1e-3},
}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        block, leaf = name.split("/")
        tree.setdefault(block, {})[leaf] = value
    return tree


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def grads_at(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(100 + step)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def rate_at(step: int) -> float:
    return 0.1 / (1 + step)


def train(name: str, params: dict[str, Any], num_steps: int = 6, **options: Any) -> dict[str, np.ndarray]:
    curve = lambda step: 0.1 / (1.0 + jnp.asarray(step).astype(jnp.float32))  # noqa: E731
    tx = make_optimizer(Learning(optimizer=name, optimizer_params=params, **options), curve, 1)
    now = nested({key: jnp.asarray(value) for key, value in weights().items()})
    state, update = jax.jit(tx.init)(now), jax.jit(tx.update)
    for step in range(num_steps):
        updates, state = update(nested(grads_at(step)), state, now, step=step)
        now = jax.tree.map(jnp.add, now, updates)
    return {key: np.asarray(value) for key, value in flatten_named(now).items()}


def by_hand(rule: Any, num_steps: int = 6) -> dict[str, np.ndarray]:
    """Run `rule(name, w, g, slots, rate, n) -> w` in float64 on every tensor; n counts from 1."""
    now = {name: value.astype(np.float64) for name, value in weights().items()}
    slots: dict[str, dict[str, Any]] = {name: {} for name in now}
    for step in range(num_steps):
        for name, g in grads_at(step).items():
            now[name] = rule(name, now[name], g.astype(np.float64), slots[name], rate_at(step), step + 1)
    return now


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float = 2e-5) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=2e-6, err_msg=name)


def adam(g: np.ndarray, slots: dict[str, Any], n: int, beta2: float, *, nesterov: bool = False) -> np.ndarray:
    slots["m"] = 0.9 * slots.get("m", 0.0) + 0.1 * g
    slots["v"] = beta2 * slots.get("v", 0.0) + (1 - beta2) * g * g
    mean = slots["m"] / (1 - 0.9**n)
    if nesterov:  # Dozat's: the next step's momentum, and this gradient once more
        mean = 0.9 * slots["m"] / (1 - 0.9 ** (n + 1)) + 0.1 * g / (1 - 0.9**n)
    return mean / (np.sqrt(slots["v"] / (1 - beta2**n)) + 1e-8)


def test_lion_matches_numpy():
    def rule(name, w, g, slots, rate, n):
        m = slots.get("m", np.zeros_like(w))
        slots["m"] = 0.99 * m + 0.01 * g
        return w - rate * np.sign(0.9 * m + 0.1 * g)

    assert_same(train("lion", {}), by_hand(rule))


@pytest.mark.parametrize("name", ["adam", "nadam"])
def test_adam_and_nadam_match_numpy(name):
    ahead = name == "nadam"
    rule = lambda key, w, g, slots, rate, n: w - rate * adam(g, slots, n, 0.999, nesterov=ahead)  # noqa: E731
    assert_same(train(name, {}), by_hand(rule))


def test_radam_matches_numpy():
    """Liu et al. 2019, algorithm 2: momentum alone until the variance is known, then rectified Adam."""

    def rule(name, w, g, slots, rate, n):
        slots["m"] = 0.9 * slots.get("m", 0.0) + 0.1 * g
        slots["v"] = 0.999 * slots.get("v", 0.0) + 0.001 * g * g
        mean, longest = slots["m"] / (1 - 0.9**n), 2 / (1 - 0.999) - 1
        length = longest - 2 * n * 0.999**n / (1 - 0.999**n)
        if length < 5:
            return w - rate * mean
        rectified = math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
        return w - rate * rectified * mean / (np.sqrt(slots["v"] / (1 - 0.999**n)) + 1e-8)

    assert_same(train("radam", {}, 9), by_hand(rule, 9), rtol=5e-3)  # float32 knows 1 - 0.999^n to five digits


def newton_schulz(matrix: np.ndarray, rounds: int) -> np.ndarray:
    """Return the singular vectors with values taken through the quintic: an SVD in place of products of matrices."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    s = s / np.sqrt((s * s).sum())
    for _ in range(rounds):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ np.diag(s) @ v


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (5, 5)])
def test_matrices_are_made_orthogonal(shape):
    matrix = np.random.default_rng(1).normal(size=shape)
    found = np.asarray(orthogonal(jnp.asarray(matrix, jnp.float32)[None], 5))[0]
    np.testing.assert_allclose(found, newton_schulz(matrix, 5), atol=2e-4)
    assert np.all(np.abs(np.linalg.svd(found, compute_uv=False) - 1) < 0.35)


@pytest.mark.parametrize("fixed_norm", [True, False])
def test_muon_matches_numpy(fixed_norm):
    matrices = ("conv/kernel", "wide/kernel")

    def rule(name, w, g, slots, rate, n):
        if name not in matrices:
            return w - rate * 0.05 * adam(g, slots, n, 0.99)
        slots["m"] = 0.95 * slots.get("m", 0.0) + 0.05 * g
        ahead = (0.95 * slots["m"] + 0.05 * g).reshape(-1, w.shape[-1])
        step = newton_schulz(ahead, 5).reshape(w.shape)
        if not fixed_norm:
            return w - rate * 0.2 * math.sqrt(max(ahead.shape)) * step
        norm = np.linalg.norm(w)
        there = w - rate * norm * step / np.linalg.norm(step)
        return there * norm / np.linalg.norm(there)

    found = train("muon", {"fixed_norm": fixed_norm})
    assert_same(found, by_hand(rule), rtol=5e-4)
    if fixed_norm:
        for name in matrices:
            assert np.linalg.norm(found[name]) == pytest.approx(np.linalg.norm(weights()[name]), rel=1e-5)


def test_products_in_bfloat16_leave_matrices_about_as_orthogonal():
    """Three rounds from small singular values: beside float32 they differ by less than the rounds leave open."""
    matrices = np.random.default_rng(3).normal(size=(2, 288, 64)).astype(np.float32)
    for rounds, low, high in ((3, 0.3, 1.3), (5, 0.6, 1.3)):
        whole, half = (np.asarray(orthogonal(jnp.asarray(matrices), rounds, each)) for each in (False, True))
        assert half.dtype == np.float32
        for mine in (whole, half):
            values = np.linalg.svd(mine, compute_uv=False)
            assert values.min() > low
            assert values.max() < high
        # The same directions: the factor of the polar decomposition, by SVD in float64.
        left, _, right = np.linalg.svd(matrices.astype(np.float64), full_matrices=False)
        for mine, limit in ((whole, 0.05), (half, 0.06)):
            cosine = np.sum(mine * (left @ right)) / np.linalg.norm(mine) / np.linalg.norm(left @ right)
            assert cosine > 1 - limit


@pytest.mark.parametrize("name", ["sgd", "muon", "adamw"])
def test_lookahead_matches_numpy(name):
    """Six steps of the rule between meetings; then halfway between the slow weights and where it got."""
    given = NEEDED.get(name, {})
    found = train(name, given, 3, lookahead=3)
    fast = train(name, given, 3)
    assert_same(found, {key: start + 0.5 * (fast[key] - start) for key, start in weights().items()})
    assert_same(train(name, given, 2, lookahead=3), train(name, given, 2))


def test_lookahead_goes_on_from_the_slow_weights():
    """SGD without momentum, constant gradients and a known rate, in closed form."""
    tx = make_optimizer(
        Learning(optimizer="sgd", optimizer_params={"momentum": 0}, lookahead=2), lambda step: jnp.float32(0.1), 1
    )
    w = {"w": jnp.zeros(1)}
    state = tx.init(w)
    path = []
    for step in range(4):
        updates, state = tx.update({"w": jnp.ones(1)}, state, w, step=step)
        w = jax.tree.map(jnp.add, w, updates)
        path.append(float(w["w"][0]))
    assert path == pytest.approx([-0.1, -0.1, -0.2, -0.2])


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "given"])  # test_given_optimizer.py
def test_a_row_counts_its_slots_and_says_its_scope(name):
    """The memory plan's slots are those that init makes, and an element's update depends on what the row says."""
    row, given = OPTIMIZERS[name], NEEDED.get(name, {})
    assert row.says
    assert {key.name for key in row.keys.params if key.default is REQUIRED} <= set(given)
    learning = Learning(optimizer=name, optimizer_params=given)
    options = complete("optimizer", name, given) | {"global_batch_size": 1, "weight_decay": 0.1}
    options["decayed"] = lambda name: True
    big = {"conv": {"kernel": jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)}}
    slots = jax.eval_shape(row.rule(options).init, big)
    assert sum(leaf.size for leaf in jax.tree.leaves(slots)) // (9 * 64 * 64) == optimizer_slots(learning)
    # change one element's gradient: which updates move?
    now = nested({key: jnp.asarray(value) for key, value in weights().items()})
    decayed = Learning(optimizer=name, optimizer_params=given, weight_decay=0.1 * (row.decay != "none"))
    tx = make_optimizer(decayed, lambda step: jnp.float32(0.1), 1)
    state, update = tx.init(now), jax.jit(tx.update)

    def updates(change: float) -> dict[str, np.ndarray]:
        grads = grads_at(0)
        grads["conv/kernel"][0, 0, 0, 0] *= change
        return flatten_named(update(nested(grads), state, now, step=0)[0])

    plain, changed = updates(1.0), updates(-3.0)
    moved = {key: not np.array_equal(plain[key], changed[key]) for key in SHAPES}
    others = np.array_equal(plain["conv/kernel"].reshape(-1)[1:], changed["conv/kernel"].reshape(-1)[1:])
    assert not any(moved[key] for key in SHAPES if key != "conv/kernel")
    assert others == (row.scope == "element")


def test_the_last_layer_is_no_matrix_for_muon():
    assert "predictions" in HEADS
    still = train("muon", {"other_rate": 1e-9}, 2)
    for name in ("predictions/kernel", "depthwise/kernel", "conv/gamma"):
        np.testing.assert_allclose(still[name], weights()[name], atol=1e-6)
    assert not np.allclose(still["conv/kernel"], weights()["conv/kernel"], atol=1e-3)


def test_adam_refuses_decoupled_decay():
    with pytest.raises(ConfigError, match="weight_decay") as error:
        config_from({"optimizer": "adam", "weight_decay": 0.01, "optimizer_params": {}})
    assert "adamw" in str(error.value)
