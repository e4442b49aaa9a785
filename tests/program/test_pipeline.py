"""pipeline(): the weights of plain single-device training, for every schedule, mapping, replica count and reduction."""

import threading
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from headrace import (
    Infeed,
    OptimizerOutput,
    Outfeed,
    Stage,
    cross_replica,
    loops,
    pipeline,
    recomputation_checkpoint,
)
from headrace.engine.visible import Visible, count_replicas
from headrace.program import pipeline as pipeline_module

SCHEDULES = ("Grouped", "Interleaved", "Sequential")
RNG = np.random.default_rng(0)
W0, W1A, W1B, W2 = (0.5 * RNG.normal(size=shape).astype(np.float32) for shape in ((5, 8), (8, 4), (8, 3), (7, 2)))
DATA = [(RNG.normal(size=(6, 5)).astype(np.float32), RNG.integers(0, 2, 6).astype(np.int32)) for _ in range(24)]
RATE = 0.1


def s0(p, x, y):
    return jnp.tanh(x @ p["w"] + p["b"][None]), y


def s1(p, h, y):
    return jnp.concatenate([jnp.sin(h @ p["a"]), jnp.tanh(h @ p["b"])], -1), y


def s1a(p, h, y):
    return jnp.sin(h @ p), y


def s1b(p, h, y):
    return jnp.tanh(h @ p)


def s2(p, c, y):
    return jnp.mean(jnp.square(c @ p - jax.nn.one_hot(y, 2)))


def s2_joined(p, a, y, b):
    return s2(p, jnp.concatenate([a, b], -1), y)


FIRST = {"w": W0, "b": np.zeros(8, np.float32)}
THREE = [Stage(s0, FIRST), Stage(s1, {"a": W1A, "b": W1B}), Stage(s2, W2)]
CONCURRENT = [Stage(s0, FIRST), [Stage(s1a, W1A), Stage(s1b, W1B)], Stage(s2_joined, W2)]


def momentum(loss):
    return OptimizerOutput(optax.sgd(RATE, momentum=0.9), loss, apart=True)


def composed(params, x, y):
    """The same model as one function, for one device."""
    first, (a, b), last = params
    return s2(last, *s1({"a": a, "b": b}, *s0(first, x, y)))


GRADIENT = jax.jit(jax.value_and_grad(composed))


def clipped(gradient, limit):
    norm = np.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(gradient)))
    return jax.tree.map(lambda g: g * min(1, limit / norm), gradient)


def hidden(optimizer):
    """Return the optimizer inside a loop of one turn and a branch."""

    def update(updates, state, params=None):
        del params

        def turn(carry, _):
            return lax.cond(True, lambda: optimizer.update(updates, carry[1]), lambda: carry), None

        return lax.scan(turn, (jax.tree.map(jnp.zeros_like, updates), state), None, 1)[0]

    return optax.GradientTransformation(optimizer.init, update)


@lru_cache
def plain_training(count, replicas=1, steps=2, mean=False, clip=None, apart=False):
    """Return the weights after steps of momentum by hand, on one device, with gradients of single micro batches.

    `clip` is the largest norm of all gradients together, or of each stage's.
    """
    params = [FIRST, [W1A, W1B], W2]
    trace = jax.tree.map(np.zeros_like, params)
    losses = []
    size = count * replicas
    for step in range(steps):
        results = [GRADIENT(params, *DATA[step * size + i]) for i in range(size)]
        losses += [float(loss) for loss, _ in results]
        scale = 1 / (replicas * (count if mean else 1))
        gradient = jax.tree.map(lambda *gs, scale=scale: scale * sum(gs), *(g for _, g in results))
        if clip is not None:
            gradient = [clipped(part, clip) for part in gradient] if apart else clipped(gradient, clip)
        trace = jax.tree.map(lambda t, g: 0.9 * t + g, trace, gradient)
        params = jax.tree.map(lambda p, t: p - RATE * t, params, trace)
    return jax.tree.leaves(params), losses


def train(stages, count, **options):
    """Run two steps; return (weights as leaves, results of the outfeed, the pipeline)."""
    outfeed = options.pop("outfeed", None) or Outfeed()
    options = {"optimizer_function": momentum, "infeed": Infeed(DATA), "repeat_count": 2} | options
    pipe = pipeline(stages, count, outfeed=outfeed, **options)
    state = pipe(pipe.init())
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)], outfeed.dequeue(), pipe


def assert_close(found, wanted, tolerance=1e-5):
    for a, b in zip(found, wanted, strict=True):
        assert np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(b))


def test_three_schedules_give_the_weights_of_one_device_and_the_same_bits():
    wanted, losses = plain_training(4)
    first = None
    for schedule in SCHEDULES:
        found, results, pipe = train(THREE, 4, pipeline_schedule=schedule)
        assert_close(found, wanted)
        assert np.allclose(results, losses, rtol=1e-5)
        assert pipe.peaks == pipe.table.peak_by_node()  # what was really held is what the schedule says
        first = first or found
        assert all(np.array_equal(a, b) for a, b in zip(found, first, strict=True))


def test_concurrent_stages_likewise():
    wanted, losses = plain_training(4)
    first = None
    for schedule in SCHEDULES:
        found, results, pipe = train(CONCURRENT, 4, pipeline_schedule=schedule, device_mapping=[0, [1, 2], 2])
        assert_close(found, wanted)
        assert np.allclose(results, losses, rtol=1e-5)
        assert pipe.peaks == pipe.table.peak_by_node()
        first = first or found
        assert all(np.array_equal(a, b) for a, b in zip(found, first, strict=True))


@pytest.mark.parametrize(
    ("stages", "count", "options"),
    [
        (THREE, 3, {"device_mapping": [0, 1, 0], "pipeline_schedule": "interleaved"}),
        (THREE, 1, {"device_mapping": [0, 0, 0], "pipeline_schedule": "GPipe"}),
        (CONCURRENT, 3, {"device_mapping": [0, [0, 1], 1], "replicas": 2, "recomputation": True}),
        (THREE, 4, {"pipeline_schedule": "ZeroBubble"}),
        (CONCURRENT, 4, {"pipeline_schedule": "ZeroBubble", "device_mapping": [0, [1, 2], 2]}),
        (CONCURRENT, 3, {"pipeline_schedule": "ZeroBubble", "replicas": 2, "recomputation": True}),
    ],
    ids=[
        "two devices",
        "one device, one micro batch",
        "replicas and recomputation",
        "split",
        "split, two",
        "split, all",
    ],
)
def test_mappings_counts_replicas_and_recomputation(stages, count, options):
    wanted, losses = plain_training(count, options.get("replicas", 1))
    found, results, _ = train(stages, count, **options)
    assert_close(found, wanted)
    assert results.shape == ((2 * count, 2) if "replicas" in options else (2 * count,))
    assert np.allclose(results.reshape(-1), losses, rtol=1e-5)


@pytest.mark.parametrize("reduction", ["MEAN", "RUNNING_MEAN"])
def test_reductions_and_accumulator_types(reduction):
    wanted, _ = plain_training(4, mean=True)
    types = []

    def choose(weight):
        types.append(weight.shape)
        return jnp.float32

    found, _, _ = train(THREE, 4, reduction_method=reduction, gradient_accumulation_dtype=choose)
    assert_close(found, wanted)
    assert {(5, 8), (8,), (8, 4), (8, 3), (7, 2)} <= set(types)


@pytest.mark.parametrize(
    "optimizer", [optax.adamw(0.01), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))]
)
def test_gradients_summed_in_float16_reach_the_optimizer_in_float32(optimizer):
    """In float16 the squares of AdamW underflow: its losses went from 1.8 to 4,450 within five steps."""

    def run(dtype):
        options = {"infeed": Infeed(DATA, repeat=True), "repeat_count": 20, "gradient_accumulation_dtype": dtype}
        finish = lambda loss: OptimizerOutput(optimizer, loss)  # noqa: E731
        return train(THREE, 4, optimizer_function=finish, reduction_method="MEAN", **options)

    (found, losses, _), (wanted, wanted_losses, _) = run(jnp.float16), run(jnp.float32)
    assert_close(found, wanted, 5e-3)
    assert np.allclose(losses, wanted_losses, rtol=5e-3)


def test_the_optimizers_state_can_be_cut_over_replicas():
    def finish(loss):
        return OptimizerOutput(optax.adam(0.01), loss)

    wanted, _, _ = train(THREE, 3, optimizer_function=finish, replicas=2, device_mapping=[0, 1, 1])
    options = {"optimizer_function": finish, "infeed": Infeed(DATA), "repeat_count": 2, "outfeed": Outfeed()}
    options |= {"replicas": 2, "device_mapping": [0, 1, 1], "replicated_optimizer_state_sharding": True}
    pipe = pipeline(THREE, 3, **options)
    state = pipe(pipe.init())
    assert_close([np.asarray(leaf) for leaf in jax.tree.leaves(state.params)], wanted)
    cut = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim == 2]
    assert cut
    assert all(shard.data.size == leaf.size // 2 for leaf in cut for shard in leaf.addressable_shards)


CLIPPED = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(RATE, momentum=0.9))


@pytest.mark.parametrize(
    ("optimizer", "replicas"),
    [(CLIPPED, 1), (cross_replica(CLIPPED), 1), (cross_replica(CLIPPED), 2), (hidden(CLIPPED), 1)],
    ids=["plain", "cross_replica", "cross_replica of two", "inside a loop and a branch"],
)
def test_an_optimizer_that_looks_at_all_gradients_sees_all(optimizer, replicas):
    """Clipping by the global norm is not clipping stage by stage, whatever it is wrapped in."""
    wanted, _ = plain_training(4, replicas, clip=0.05)
    found, _, _ = train(THREE, 4, optimizer_function=lambda loss: OptimizerOutput(optimizer, loss), replicas=replicas)
    assert_close(found, wanted)


def test_apart_means_that_every_stage_clips_by_its_own_norm():
    wanted, _ = plain_training(4, clip=0.05, apart=True)
    found, _, _ = train(THREE, 4, optimizer_function=lambda loss: OptimizerOutput(CLIPPED, loss, apart=True))
    assert_close(found, wanted)


def test_weights_updated_apart_stay_on_their_devices_and_are_those_of_together():
    def run(apart):
        finish = lambda loss: OptimizerOutput(optax.adam(0.01), loss, apart=apart)  # noqa: E731
        pipe = pipeline(THREE, 4, optimizer_function=finish, infeed=Infeed(DATA), outfeed=Outfeed(), repeat_count=2)
        state = pipe(pipe.init())
        used = [
            {device.id for leaf in jax.tree.leaves(slots) for device in leaf.devices()} for slots in state.optimizer
        ]
        return [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)], used

    (apart, devices), (together, one) = run(True), run(False)
    assert_close(apart, together, 1e-6)
    assert devices == [{0}, {1}, {2}]
    assert one == [{0}]


def test_a_rate_that_comes_through_the_stages_and_changes_from_run_to_run():
    def a(p, rate, x):
        return x * p, rate

    def b(p, h, rate):
        return jnp.mean(h) * p, rate

    def finish(loss, rate):
        return OptimizerOutput(optax.sgd, loss, arguments=(rate,))

    out = Outfeed()
    elements = [{"x": np.full(3, i + 1, np.float32)} for i in range(6)]
    stages = [Stage(a, np.float32(2)), Stage(b, np.float32(3))]
    pipe = pipeline(
        stages,
        2,
        optimizer_function=finish,
        inputs=[0.1],
        infeed=Infeed(elements),
        outfeed=out,
        outfeed_mask=[False, True],
    )
    state = start = pipe.init()
    p, q = 2.0, 3.0
    for run, rate in enumerate((0.1, 0.01, 0.0)):
        state = pipe(state, inputs=[rate])
        xs = [2 * run + 1, 2 * run + 2]
        assert np.allclose(out.dequeue(), [p * q * x for x in xs])
        p, q = p - rate * q * sum(xs), q - rate * p * sum(xs)
    assert np.allclose(state.params, [p, q], rtol=1e-6)
    assert np.array_equal(start.params, [2, 3])  # a state stays what it was


def test_shared_weights_get_the_gradients_of_all_their_uses():
    shared = {"w": np.float32(1.5)}

    def times(p, x):
        return x * p["w"]

    def finish(y):
        return OptimizerOutput(optax.sgd(0.01), jnp.mean(y))

    stages = [Stage(times, shared), Stage(lambda p, x: x + p, np.float32(0)), Stage(times, shared)]
    pipe = pipeline(
        stages,
        2,
        optimizer_function=finish,
        device_mapping=[0, 1, 0],
        infeed=Infeed([np.ones(2), 2 * np.ones(2)]),
        outfeed=Outfeed(),
        reduction_method="RUNNING_MEAN",
    )
    params = pipe(pipe.init()).params
    # y = w (w x + b), so dy/dw = 2 w x + b, and its mean over x = 1, 2 is 3 w
    assert np.allclose(params[0]["w"], 1.5 - 0.01 * 3 * 1.5)
    assert params[2]["w"] is params[0]["w"]


def test_states_move_with_every_micro_batch_and_are_the_mean_over_replicas():
    def running(p, state, x):
        state = {"mean": 0.5 * state["mean"] + 0.5 * jnp.mean(x), "seen": state["seen"] + 1}
        return (x - state["mean"]) * p, state

    def finish(y):
        return OptimizerOutput(optax.sgd(0.0), jnp.mean(y))

    stages = [lambda x: 2 * x, Stage(running, np.float32(1), {"mean": np.float32(0), "seen": 0})]
    out = Outfeed()
    elements = [np.full(2, i, np.float32) for i in range(12)]
    pipe = pipeline(
        stages,
        3,
        optimizer_function=finish,
        infeed=Infeed(elements),
        outfeed=out,
        replicas=2,
        repeat_count=2,
        device_mapping=[0, 0],
        recomputation=True,
    )
    state = pipe(pipe.init())
    mean, rows = np.zeros(2), []
    for step in range(2):
        for micro in range(3):
            x = 2 * np.arange(12.0).reshape(2, 3, 2)[step, micro]
            mean = 0.5 * mean + 0.5 * x
            rows.append(x - mean)
        mean = np.full(2, mean.mean())
    assert np.allclose(out.dequeue(), np.repeat(np.array(rows)[..., None], 2, -1))
    assert state.state[0] is None
    assert np.allclose(state.state[1]["mean"], mean[0])
    assert state.state[1]["seen"] == 6


def test_inference_with_concurrent_first_and_last_stages():
    scale = {"by": np.float32(3)}
    stages = [
        [lambda k, x: (x + k, k), lambda k, x: x * x],
        lambda a, k, b: (a + b, k),
        [Stage(lambda p, c, k: p["by"] * c, scale), lambda c, k: {"low": c.astype(jnp.int32), "k": k}],
    ]
    out = Outfeed()
    xs = [np.full(2, i, np.float32) for i in range(10)]
    pipe = pipeline(stages, 5, inputs=[10.0], infeed=Infeed(xs), outfeed=out, device_mapping=[[0, 1], 1, [1, 2]])
    state = pipe(pipe(pipe.init()), inputs=[10.0])
    first, second = out.dequeue()
    wanted = np.array([x + 10 + x * x for x in xs])
    assert np.array_equal(first, 3 * wanted)
    assert np.array_equal(second["low"], wanted.astype(np.int32))
    assert np.array_equal(second["k"], np.full(10, 10))
    assert state.params[2][0]["by"] == 3


@pytest.mark.parametrize(("dtype", "kind"), [(None, np.float32), (jnp.float16, np.float16)])
def test_the_sum_over_the_micro_batches_leaves_once_per_step(dtype, kind):
    _, losses = plain_training(4)
    _, results, _ = train(THREE, 4, accumulate_outfeed=True, accumulate_outfeed_dtype=dtype, outfeed_loss=True)
    assert results.dtype == kind
    assert np.allclose(results, np.reshape(losses, (2, 4)).sum(1), rtol=1e-5 if dtype is None else 1e-2)


def test_last_keeps_the_last():
    out = Outfeed(mode="LAST")
    pipe = pipeline([lambda x: x + 1, lambda x: x * x], 3, infeed=Infeed([1.0, 2.0, 3.0]), outfeed=out)
    pipe(pipe.init())
    assert out.dequeue() == 16


def test_results_stream_while_the_pipeline_runs():
    """The dataset of the second step waits until the results of the first were seen."""
    out, seen, first_seen = Outfeed(), [], threading.Event()

    def dataset():
        yield from (np.float32(i) for i in range(4))
        assert first_seen.wait(30)
        yield from (np.float32(i) for i in range(4, 8))

    def watch():
        for value in out:
            seen.append(float(value))
            if len(seen) == 4:
                first_seen.set()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    pipe = pipeline([lambda x: x + 1, lambda x: x * x], 4, infeed=Infeed(dataset), outfeed=out, repeat_count=2)
    pipe(pipe.init())
    thread.join(30)
    assert seen == [(i + 1) ** 2 for i in range(8)]


@pytest.mark.parametrize(
    ("count", "asked", "memory"),
    [
        (2, None, "pinned_host"),  # the default, where gradients are accumulated
        (2, False, "device"),
        (1, None, "device"),
        (1, True, "pinned_host"),
    ],
)
def test_where_the_optimizers_state_lives(count, asked, memory):
    infeed = Infeed([np.ones(3), 2 * np.ones(3)], repeat=True)
    stages = [Stage(lambda p, x: x * p, np.float32(2)), Stage(lambda p, x: jnp.mean(p * x), np.ones(3, np.float32))]
    pipe = pipeline(
        stages,
        count,
        optimizer_function=momentum,
        infeed=infeed,
        outfeed=Outfeed(),
        repeat_count=4 // count,
        offload_weight_update_variables=asked,
    )
    state = pipe(pipe.init())
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.optimizer)}
    assert kinds == {memory}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)} == {"device"}
    a, b, trace_a, trace_b = 2.0, 1.0, 0.0, 0.0  # loss = a b x, with x = 1 and 2 in turn
    for x in (1, 2, 1, 2) if count == 1 else (3, 3):
        trace_a, trace_b = 0.9 * trace_a + x * b, 0.9 * trace_b + x * a / 3
        a, b = a - RATE * trace_a, b - RATE * trace_b
    assert np.allclose(state.params[0], a)
    assert np.allclose(state.params[1], b)


def test_host_memory_changes_no_bit():
    """Two replicas in three stages, with Adam, whose state also counts."""

    def trained(offload):
        pipe = pipeline(
            THREE,
            3,
            optimizer_function=lambda loss: OptimizerOutput(optax.adam(RATE), loss),
            infeed=Infeed(DATA),
            outfeed=Outfeed(),
            repeat_count=4,
            replicas=2,
            offload_weight_update_variables=offload,
        )
        state = pipe(pipe.init())
        return jax.tree.leaves((state.params, state.optimizer))

    kept, offloaded = trained(False), trained(True)
    assert {leaf.sharding.memory_kind for leaf in offloaded[5:]} == {"pinned_host"}
    for one, other in zip(kept, offloaded, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(("recomputation", "marked", "kept"), [(False, False, 2), (True, False, 0), (True, True, 1)])
def test_what_a_stage_keeps(recomputation, marked, kept):
    """Two products in a stage: both outputs are kept, or nothing, or what is marked."""

    def two(p, x):
        middle = jnp.tanh(x @ p["a"])
        middle = recomputation_checkpoint(middle) if marked else middle
        return jnp.tanh(middle @ p["b"])

    stages = [Stage(two, {"a": np.ones((4, 7)), "b": np.ones((7, 5))}), jnp.mean]
    pipe = pipeline(
        stages,
        2,
        optimizer_function=momentum,
        infeed=Infeed([np.ones((3, 4))] * 2),
        outfeed=Outfeed(),
        recomputation=recomputation,
    )
    node = pipe.table.work.stages[0][0]
    x = jax.ShapeDtypeStruct((1, 3, 4), np.float32)
    forward = pipe._steps.nodes[node].forward.jitted
    _, saved, _, _ = jax.eval_shape(forward, pipe.init().weights[0], (), (), (), [], [x])
    shapes = [leaf.shape for leaf in jax.tree.leaves(saved) if leaf.shape[-1:] in ((7,), (5,))]
    assert len(shapes) == kept


def test_a_pipeline_can_follow_a_loop_on_the_same_infeed():
    infeed = Infeed([np.full(1, i, np.float32) for i in range(20)])
    (total,) = loops.repeat(4, lambda t, x: t + x[0], [0.0], infeed)
    out = Outfeed()
    pipe = pipeline([lambda x: 2 * x, lambda x: x + 1], 3, infeed=infeed, outfeed=out)
    pipe(pipe.init())
    assert total == 6
    assert np.array_equal(out.dequeue()[:, 0], [9, 11, 13])


def test_numbers_of_micro_batches_are_sent_once(monkeypatch):
    options = {"optimizer_function": momentum, "infeed": Infeed(DATA), "outfeed": Outfeed()}
    pipe = pipeline(THREE, 2, reduction_method="RUNNING_MEAN", **options)
    state = pipe.init()
    start = pipe._start(state, ())
    assert [int(start["number", node, 1]) for node in pipe.spec.nodes] == [1, 1, 1]
    monkeypatch.setattr(pipeline_module, "place", None)
    pipe._start(state, ())


def test_the_picture_is_that_of_the_schedule():
    pipe = pipeline([lambda x: x, lambda x: x], 3, inputs=[1.0], outfeed=Outfeed())
    assert pipe.draw().splitlines()[:3] == ["Grouped", "dev 0 |F0|F1|F2|. |", "dev 1 |. |F0|F1|F2|"]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("recomputation", [False, True])
@pytest.mark.parametrize(
    ("stages", "mapping"),
    [
        (THREE, [0, 1, 0]),
        (THREE, [0, 0, 0]),
        (CONCURRENT, [0, [1, 1], 0]),
        (CONCURRENT, [1, [0, 1], 1]),
        (CONCURRENT, [0, [0, 0], 0]),
    ],
)
def test_every_plan_gives_the_same_weights(stages, mapping, count, replicas, recomputation):
    wanted, _ = plain_training(count, replicas)
    results = [
        train(
            stages,
            count,
            device_mapping=mapping,
            replicas=replicas,
            recomputation=recomputation,
            pipeline_schedule=schedule,
        )
        for schedule in SCHEDULES
    ]
    for found, _, pipe in results:
        assert_close(found, wanted)
        assert pipe.peaks == pipe.table.peak_by_node()
        assert all(np.array_equal(a, b) for a, b in zip(found, results[0][0], strict=True))


@pytest.mark.parametrize(("devices", "each", "replicas"), [(8, 2, 4), (24, 4, 6), (25, 4, 6), (3, 4, 1)])
def test_auto_makes_as_many_replicas_as_there_are_devices_for(devices, each, replicas, monkeypatch):
    found = Visible(platform="gpu", count=devices)
    monkeypatch.setattr("headrace.engine.visible.visible_devices", lambda platform, **_: found)
    assert count_replicas(0, each) == replicas
    assert count_replicas(0, each, num_processes=3) == 3 * replicas
    assert count_replicas(5, each) == 5


def test_a_pipeline_takes_all_devices():
    pipe = pipeline(
        [lambda x: x + 1, lambda x: 2 * x],
        gradient_accumulation_count=1,
        infeed=Infeed([np.float32(number) for number in range(4)]),
        outfeed=(out := Outfeed()),
        replicas="auto",
    )
    pipe(pipe.init())
    assert np.array_equal(out.dequeue(), [[2, 4, 6, 8]])  # four replicas of two stages on eight devices
