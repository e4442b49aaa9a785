"""accumulate_gradients and cross_replica against NumPy's formulas and against one large batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from headrace import HeadraceError, Infeed, accumulate_gradients, cross_replica, loops

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 8, 3)).astype(np.float32), RNG.normal(size=(24, 8)).astype(np.float32)
W0 = np.array([0.5, -0.25, 1.0], np.float32)


def numpy_gradient(w, x, y):
    """Return the gradient of mean((x w - y)^2)."""
    return 2 * x.T @ (x @ w - y) / len(y)


def numpy_momentum(gradients, rate=0.1, momentum=0.9):
    w, trace = W0.astype(np.float64), np.zeros(3)
    for gradient in gradients:
        trace = momentum * trace + gradient(w)
        w = w - rate * trace
    return w


def train(optimizer, n, replicas=1, *, with_state=False):
    """Train a linear model for n iterations on the batches in order; return the weights (and the state)."""

    def body(w, state, x, y):
        gradient = jax.grad(lambda w: jnp.mean(jnp.square(x @ w - y)))(w)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state

    state = optimizer.init(jnp.asarray(W0))
    found = loops.repeat(n, body, [W0, state], Infeed(zip(X, Y, strict=True)), replicas=replicas)
    return found if with_state else found[0]


def group(first, count):
    return X[first : first + count].reshape(-1, 3), Y[first : first + count].reshape(-1)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("reduction", ["mean", "RUNNING_MEAN", "sum"])
def test_updates_are_those_of_one_large_batch(replicas, count, reduction):
    """The mean over micro batches (and replicas) is the gradient of all their samples together."""
    optimizer = accumulate_gradients(
        cross_replica(optax.sgd(0.1, momentum=0.9)), num_mini_batches=count, reduction=reduction
    )
    steps = 4
    w = train(optimizer, steps * count, replicas)
    factor = count if reduction == "sum" else 1
    size = count * replicas
    wanted = numpy_momentum([lambda w, s=s: factor * numpy_gradient(w, *group(s * size, size)) for s in range(steps)])
    assert np.allclose(w, wanted, rtol=1e-5, atol=1e-6)


def test_weights_move_only_at_every_nth_call():
    optimizer = accumulate_gradients(optax.sgd(1.0), 3)
    params: Any = jnp.float32(0)
    state = optimizer.init(params)
    seen = []
    for gradient in (1, 2, 3, 10, 20, 30, 100):
        updates, state = optimizer.update(jnp.float32(gradient), state, params)
        params = optax.apply_updates(params, updates)
        seen.append(float(params))
    assert seen == [0, 0, -6, -6, -6, -66, -66]


def test_adam_counts_updates_and_not_calls():
    optimizer = accumulate_gradients(optax.adam(0.1), 4, reduction="mean")
    w = train(optimizer, 8)
    m = v = 0.0
    wanted = W0.astype(np.float64)
    for t in (1, 2):
        g = numpy_gradient(wanted, *group(4 * (t - 1), 4))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        wanted = wanted - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    assert np.allclose(w, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (None, [jnp.bfloat16, jnp.float32]),
        (jnp.float32, [jnp.float32, jnp.float32]),
        ("float16", [jnp.float16, jnp.float16]),
        (lambda weight: jnp.float32 if weight.dtype == jnp.bfloat16 else None, [jnp.float32, jnp.float32]),
    ],
)
def test_gradients_are_summed_in_the_type_asked_for_and_given_in_at_least_float32(dtype, wanted):
    given = []

    def record(updates, state, params=None):
        given.append([leaf.dtype for leaf in jax.tree.leaves(updates)])
        return updates, state

    spy = optax.GradientTransformation(lambda params: optax.EmptyState(), record)
    optimizer = accumulate_gradients(spy, 2, dtype=dtype)
    params = [jnp.ones(2, jnp.bfloat16), jnp.ones(2)]
    state: Any = optimizer.init(params)
    assert [leaf.dtype for leaf in state.totals] == wanted
    updates, state = optimizer.update(params, state, params)
    updates, _ = optimizer.update(params, state, params)
    assert given[-1] == [jnp.float32, jnp.float32]
    assert [leaf.dtype for leaf in jax.tree.leaves(optax.apply_updates(params, updates))] == [jnp.bfloat16, jnp.float32]


def test_a_wider_type_keeps_what_a_narrow_one_loses():
    """256 gradients of 1/256 and one of 256: bfloat16 has 8 bits and cannot add the small ones to the large one."""
    gradients = [256.0] + [1 / 256] * 256
    totals = {}
    for dtype in (None, jnp.float32):
        optimizer = accumulate_gradients(optax.identity(), len(gradients), dtype=dtype)
        state = optimizer.init(jnp.bfloat16(0))
        step, updates = jax.jit(optimizer.update), jnp.bfloat16(0)
        for gradient in gradients:
            updates, state = step(jnp.bfloat16(gradient), state)
        totals[dtype] = float(updates)
    assert totals == {None: 256.0, jnp.float32: 257.0}


def test_replicas_exchange_only_when_the_optimizer_acts():
    optimizer = accumulate_gradients(cross_replica(optax.sgd(0.1)), 4)
    mesh = jax.make_mesh((2,), ("replica",))

    def update(gradient, state):
        return optimizer.update(gradient, state)

    spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(update, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    lines = jax.jit(mapped).lower(jnp.ones(3), optimizer.init(jnp.ones(3))).as_text().splitlines()
    exchange = next(number for number, line in enumerate(lines) if "all_reduce" in line)
    assert any('"stablehlo.case"' in line for line in lines[:exchange])  # inside the branch that acts


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("make", [lambda: optax.sgd(0.1, momentum=0.9), lambda: optax.adam(0.1)])
def test_state_in_host_memory_gives_the_same_bits(make, replicas):
    found = {}
    for asked in (True, None, False):
        optimizer = accumulate_gradients(cross_replica(make()), 3, offload_weight_update_variables=asked)
        w, state = train(optimizer, 9, replicas, with_state=True)
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.inner)}
        assert kinds == {"device" if asked is False else "pinned_host"}
        assert {leaf.sharding.memory_kind for leaf in (w, state.totals, state.number)} == {"device"}
        found[asked] = [np.asarray(leaf) for leaf in jax.tree.leaves((w, state))]
    for asked in (True, None):
        assert all(np.array_equal(one, other) for one, other in zip(found[asked], found[False], strict=True))


def test_the_memory_of_the_state_in_a_plain_jit():
    """A single gradient is not accumulated, so its state stays; what has been moved by hand stays where it is."""

    @jax.jit
    def step(w, state):
        updates, state = optimizer.update(w, state, w)
        return optax.apply_updates(w, updates), state

    def memory(state):
        return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.inner)}

    optimizer = accumulate_gradients(optax.sgd(0.1, momentum=0.9), 1)
    assert memory(optimizer.init(W0)) == {"device"}
    optimizer = accumulate_gradients(optax.sgd(0.1, momentum=0.9), 2)
    w, state = jnp.asarray(W0), jax.jit(optimizer.init)(W0)
    for _ in range(2):
        w, state = step(w, state)
    assert memory(state) == {"pinned_host"}
    moved = jax.device_put(state, jax.memory.Space.Device)
    for _ in range(2):
        w, moved = step(w, moved)
    assert memory(moved) == {"device"}


def test_offloading_where_host_memory_is_out_of_reach(monkeypatch):
    monkeypatch.setattr("headrace.program.gradients.host_memory_of", lambda device: False)
    state: Any = accumulate_gradients(optax.sgd(0.1, momentum=0.9), 2).init(W0)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.inner)} == {"device"}
    with pytest.raises(HeadraceError, match="cannot reach host memory"):
        accumulate_gradients(optax.sgd(0.1), 2, offload_weight_update_variables=True).init(W0)


def test_cross_replica_outside_replicas_is_refused():
    optimizer = cross_replica(optax.sgd(0.1))
    with pytest.raises(HeadraceError, match=r"no replicas.*loops\.repeat"):
        jax.jit(optimizer.update)(jnp.ones(3), optimizer.init(jnp.ones(3)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: accumulate_gradients(optax.sgd(0.1), 0), "num_mini_batches is 0"),
        (lambda: accumulate_gradients(optax.sgd(0.1), 2.0), "whole number"),  # pyright: ignore[reportArgumentType]
        (lambda: accumulate_gradients(0.1, 2), "optimizer is of type float"),  # pyright: ignore[reportArgumentType]
        (lambda: accumulate_gradients(optax.sgd(0.1), 2, dtype="floaty"), "dtype is 'floaty'"),
        (lambda: accumulate_gradients(optax.sgd(0.1), 2, dtype=jnp.int32), "floating-point"),
        (lambda: accumulate_gradients(optax.sgd(0.1), 2, dtype=lambda w: "x").init(W0), "dtype returned 'x'"),
        (lambda: accumulate_gradients(optax.sgd(0.1), 2, reduction="max"), "SUM, MEAN, RUNNING_MEAN"),
        (lambda: accumulate_gradients(optax.sgd(1.0), 2, offload_weight_update_variables=1), "variables is 1"),  # pyright: ignore[reportArgumentType]
        (lambda: cross_replica(None), "of type NoneType"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(HeadraceError, match=message):
        make()
