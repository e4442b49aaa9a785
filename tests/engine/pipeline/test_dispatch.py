"""Stage programs: number formats, where the optimizer's state lives, what is kept, and when actions really ran."""

import sys
import threading
import time
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.core.jax_private import without_arguments
from headrace.engine.pipeline.nodes import keep_products
from headrace.engine.placement import Placement
from headrace.model.context import Ctx
from headrace.model.norm import NormSpec
from headrace.model.zoo import build_network
from headrace.plan.schedule import Op

from ...harness import (
    OPTIONS,
    Stages,
    assert_close,
    first_state,
    make_block,
    make_samples,
    make_stages,
    small_residual,
    train_pipelined,
    train_steps,
)

THREE = Stages(cut=(1, 3), mapping=(0, 1, 2), count=2)


@pytest.fixture(scope="module")
def samples():
    return make_samples()


@pytest.mark.slow
def test_sixteen_bit_weights_dynamic_scaling_and_skipped_steps_are_the_same(samples):
    """Rounding is addressed by tensor and step, a skipped step is skipped on every stage."""
    scaling = {"initial": 2.0**24, "growth_interval": 1000, "max": 2.0**24}
    options = {"precision": "16.16", "half_type": "float16", "loss_scaling": "dynamic", "loss_scaling_params": scaling}
    config = config_from(OPTIONS | options)
    network = small_residual(NormSpec())
    one, its_metrics = train_steps(config, network, *samples, replicas=1, count=2)
    state, metrics = train_pipelined(config, network, samples, THREE)
    np.testing.assert_array_equal(metrics["skipped"], its_metrics["skipped"])
    assert metrics["skipped"].sum() > 0
    np.testing.assert_array_equal(metrics["loss_scale"], its_metrics["loss_scale"])
    for part in ("params", "stats", "opt"):
        assert_close(
            jax.tree.map(lambda a: np.asarray(a, np.float32), state[part]),
            jax.tree.map(lambda a: np.asarray(a, np.float32), one[part]),
            5e-3,
        )


PLACEMENTS = {
    "host": Placement(in_host_memory=True),
    "sharded": Placement(sharded=True),
    "both": Placement(in_host_memory=True, sharded=True),
}
OPTIMIZERS = {
    "sgd": {"momentum": 0.9},
    "lars": {
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "eeta": 0.001,
        "epsilon": 0.0,
    },  # its norms are of whole tensors, wherever their parts are
    "adamw": {},
    "muon": {},  # its products are of whole matrices
}


@pytest.mark.parametrize(
    ("placement", "optimizer", "cut"),
    [
        ("host", "sgd", (1,)),
        ("sharded", "lars", ()),
        pytest.param("sharded", "adamw", (1,), marks=pytest.mark.slow),
        ("both", "adamw", ()),
        pytest.param("both", "lars", (1,), marks=pytest.mark.slow),
        ("sharded", "muon", ()),
        ("host", "muon", (1,)),
    ],
)
def test_wherever_the_optimizer_state_is_the_weights_are_the_same(samples, placement, optimizer, cut):
    config = config_from(OPTIONS | {"optimizer": optimizer, "optimizer_params": OPTIMIZERS[optimizer]})
    network = small_residual(NormSpec())
    wanted, _ = train_steps(config, network, *samples, replicas=2, count=2)
    stages = Stages(replicas=2, count=2, cut=cut, mapping=tuple(range(len(cut) + 1)), placement=PLACEMENTS[placement])
    state, _ = train_pipelined(config, network, samples, stages)
    for part in ("params", "stats", "opt", "ema"):
        assert_close(state[part], wanted[part], 1e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_state_stays_where_it_is_placed(samples, placement):
    """Before and after a call, and in a copy: memory kind and pieces are what was asked for."""
    config = config_from(OPTIONS)
    stages = Stages(replicas=2, count=2, cut=(), mapping=(0,), placement=PLACEMENTS[placement])
    spec, dispatcher = make_stages(config, small_residual(NormSpec()), samples[0], stages)
    block = dispatcher.put(make_block(samples[0], samples[1], 2), "steps")
    placed = dispatcher.place(first_state(spec))
    copied = dispatcher.copy_to_save(placed)
    after, _ = dispatcher(placed, None, block)
    for state in (copied, dispatcher.join(after)):
        kernels = [leaf for leaf in jax.tree.leaves((state["opt"], state["ema"])) if leaf.ndim == 4]
        assert kernels
        for leaf in kernels:
            assert leaf.sharding.memory_kind == ("pinned_host" if PLACEMENTS[placement].in_host_memory else "device")
            pieces = [shard.data.size for shard in leaf.addressable_shards]
            assert pieces == [leaf.size // (2 if PLACEMENTS[placement].sharded else 1)] * 2
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state["params"]))
    jax.block_until_ready(after)


def test_recompute_points_change_what_is_kept_and_nothing_else(samples):
    config, network = config_from(OPTIONS), small_residual(NormSpec())
    wanted, _ = train_steps(config, network, *samples, replicas=1, count=2)
    for cut, points in (((), (1, 3)), ((2,), (1, 4)), ((3,), (4,))):
        stages = Stages(count=2, cut=cut, mapping=tuple(range(len(cut) + 1)), recompute=True)
        state, _ = train_pipelined(config, network, samples, stages, recompute_points=points)
        assert_close(state["params"], wanted["params"], 1e-5)
    state, _ = train_steps(config, network, *samples, replicas=1, count=2, recompute_points=(1, 3))
    assert_close(state["params"], wanted["params"], 1e-5)


def test_calls_of_some_rows_of_a_block_run_the_same_steps_as_one_call(samples):
    spec, dispatcher = make_stages(config_from(OPTIONS), small_residual(NormSpec()), samples[0], THREE)
    block = dispatcher.put(make_block(samples[0], samples[1], 2), "steps")
    whole, its_metrics = dispatcher(dispatcher.place(first_state(spec)), None, block)
    state = dispatcher.place(first_state(spec))
    for rows in (range(1), range(1, 3)):
        state, metrics = dispatcher(state, None, block, rows)
        for name, found in metrics.items():
            np.testing.assert_array_equal(found[rows.start : rows.stop], its_metrics[name][rows.start : rows.stop])
    jax.tree.map(np.testing.assert_array_equal, state, whole)


def test_a_call_costs_the_host_the_same_however_many_arrays_the_state_has(samples):
    """The state stays cut between calls: nothing walks through its leaves, of which AdamW has more than SGD."""
    network, counts = small_residual(NormSpec()), []
    for name in ("sgd", "adamw"):
        config = config_from(OPTIONS | {"optimizer": name, "optimizer_params": OPTIMIZERS[name]})
        spec, dispatcher = make_stages(config, network, samples[0], THREE)
        block = dispatcher.put(make_block(samples[0], samples[1], 2), "steps")
        parts, _ = dispatcher(dispatcher.place(first_state(spec)), None, block)
        calls = Counter()

        def count(frame, event, _, calls=calls):
            if event == "call" and frame.f_globals.get("__name__", "").startswith("headrace."):
                calls[frame.f_code.co_qualname] += 1

        sys.setprofile(count)
        try:
            parts, metrics = dispatcher(parts, None, block)
        finally:
            sys.setprofile(None)
        jax.block_until_ready((parts, metrics))
        counts.append((len(jax.tree.leaves(parts)), calls))
    assert counts[0][0] < counts[1][0]
    assert counts[0][1] == counts[1][1]


def test_the_parts_of_a_state_join_to_the_same_state(samples):
    spec, dispatcher = make_stages(config_from(OPTIONS), small_residual(NormSpec()), samples[0], THREE)
    state = first_state(spec)
    parts = dispatcher.place(state)
    jax.tree.map(np.testing.assert_array_equal, dispatcher.join(parts), state)
    jax.tree.map(np.testing.assert_array_equal, dispatcher.copy_to_save(parts), state)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(parts)]
    assert len(pointers) == len(set(pointers)), "each part is donated by itself"


def test_flags_name_the_block_in_a_pipeline_as_on_one_device(samples):
    """A weight that is not a number makes its block and all after it bad, and no gradient is left."""
    config, network = config_from(OPTIONS | {"fp_exceptions": True}), small_residual(NormSpec())
    spec, dispatcher = make_stages(config, network, samples[0], THREE)
    state = first_state(spec)
    state["params"]["unit"]["conv"]["kernel"] = np.full_like(state["params"]["unit"]["conv"]["kernel"], np.nan)
    block = dispatcher.put(make_block(samples[0], samples[1], 2), "steps")
    _, metrics = jax.device_get(dispatcher(dispatcher.place(state), None, block))
    np.testing.assert_array_equal(metrics["forward_finite"], [[True, False, False, False, False]] * 3)
    # the relu's and the pool's have no weights; the dense layer and all before it get gradients that are no numbers
    np.testing.assert_array_equal(metrics["gradient_finite"], [[False, False, True, True, False]] * 3)
    np.testing.assert_array_equal(metrics["bad"], [1, 1, 1])


@pytest.mark.parametrize("recompute", [True, False])
def test_no_empty_array_enters_or_leaves_a_stage_program(samples, recompute):
    """XLA of jax 0.11 ends the process where one crosses the border of a mapped program on several devices."""
    stages = Stages(cut=(1, 3), mapping=(0, 1, 2), count=2, replicas=2, recompute=recompute)
    spec, dispatcher = make_stages(config_from(OPTIONS), small_residual(NormSpec()), samples[0], stages)
    crossed = []

    def watched(program):
        def run(*arguments):
            crossed.extend(leaf.shape for leaf in jax.tree.leaves(arguments))
            results = program(*arguments)
            crossed.extend(leaf.shape for leaf in jax.tree.leaves(results))
            return results

        return run

    block = dispatcher.put(make_block(samples[0], samples[1], 2), "steps")
    state = dispatcher.place(first_state(spec))
    start = dispatcher._start(state, None, block)
    steps = dispatcher.plan.compile(start)
    watching = replace(steps, launches=tuple(launch._replace(call=watched(launch.call)) for launch in steps.launches))
    jax.block_until_ready(list(watching(start, 3).values()))
    assert crossed
    assert not [shape for shape in crossed if 0 in shape]


def test_a_stage_keeps_its_convolution_outputs_alone():
    """Without recomputation, forward hands on to backward what convolutions put out, and nothing between them."""
    stage = small_residual(NormSpec())
    params, stats = stage.init(0)
    x = np.zeros((4, 8, 8, 8), np.float32)

    def unit(params, x):
        return stage.apply_range(1, 3, params, stats, x, Ctx(train=True))

    kept = jax.checkpoint(unit, policy=keep_products())
    _, vjp, _ = jax.vjp(kept, {"unit": params["unit"]}, x, has_aux=True)
    saved = [leaf.shape for leaf in jax.tree.leaves(without_arguments(vjp)) if np.ndim(leaf) == 4]
    assert saved == [(4, 8, 8, 8)], "the one convolution of the unit"


def test_the_trace_has_every_action_once_and_in_a_possible_order(samples):
    config = config_from(OPTIONS)
    spec, dispatcher = make_stages(config, small_residual(NormSpec()), samples[0], THREE)
    block = dispatcher.put(make_block(samples[0], samples[1], 2), "steps")
    state = dispatcher.place(first_state(spec))
    dispatcher.compile(state, None, block)
    table = dispatcher.trace(state, None, block)
    assert table.unit == "seconds"
    assert sorted(cell.action for cell in table.cells) == sorted(table.work.actions())
    ends = {cell.action: cell.end for cell in table.cells}
    for cell in table.cells:
        assert cell.start <= cell.end
        if cell.action.op is Op.B:
            forward = cell.action._replace(op=Op.F)
            assert ends[forward] <= cell.end
    # the state is a copy: the original can still be trained
    _, metrics = dispatcher(state, None, block)
    assert np.isfinite(metrics["loss"]).all()


def test_stage_programs_of_different_devices_overlap():
    """A short program ends long before the one that was dispatched before it, unless both are on the same device."""

    def program(turns):
        return jax.jit(lambda x: jax.lax.fori_loop(0, turns, lambda _, y: jnp.tanh(y @ x), x))

    def ends(devices):
        values = [jax.device_put(np.full((128, 128), 1e-3, np.float32), device) for device in devices]
        programs = [program(2000), program(50)]
        jax.block_until_ready([run(value) for run, value in zip(programs, values, strict=True)])
        found, begin = {}, time.perf_counter()

        def wait(number, result):
            jax.block_until_ready(result)
            found[number] = time.perf_counter() - begin

        results = [run(value) for run, value in zip(programs, values, strict=True)]
        threads = [threading.Thread(target=wait, args=pair) for pair in enumerate(results)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found[0], found[1]

    first, second = jax.devices()[:2]
    long, short = ends((first, second))
    assert short < 0.5 * long
    long, short = ends((first, first))
    assert short >= 0.9 * long


@pytest.mark.slow
def test_a_real_resnet_in_four_stages(samples):
    config = config_from(OPTIONS)
    network = build_network(config.model, 10, (16, 16, 3))
    one, _ = train_steps(config, network, *samples, replicas=1, count=4)
    state, _ = train_pipelined(config, network, samples, Stages(cut=(1, 3, 5), mapping=(0, 1, 2, 3)))
    for part in ("params", "stats", "opt"):
        assert_close(state[part], one[part], 5e-5)


def test_a_step_with_split_backward_passes_is_measured_action_by_action(samples):
    stages = replace(THREE, schedule="ZeroBubble")
    spec, dispatcher = make_stages(config_from(OPTIONS), small_residual(NormSpec()), samples[0], stages)
    block = dispatcher.put(make_block(samples[0], samples[1], 2), "steps")
    measured = dispatcher.trace(dispatcher.place(first_state(spec)), None, block)
    assert sorted(cell.action for cell in measured.cells) == sorted(dispatcher.table.work.actions())
    ends = {cell.action: cell.end for cell in measured.cells}
    late = [action for action in ends if action.op is Op.W]
    assert len(late) == 2 * 2, "all stages but the first, two micro batches"
    assert all(ends[action._replace(op=Op.B)] <= ends[action] for action in late)
