"""Whole runs as pipelines: the same weights as without stages, checkpoints that any other plan restores."""

import json
import re

import numpy as np
import pytest

from headrace.checkpoint.store import list_checkpoints
from headrace.config.load import resolve
from headrace.core.errors import ConfigError
from headrace.run.fit import resume, train

from .conftest import QUICK, assert_close, assert_same_bits, final_state

SMALL = {
    "num_epochs": 2,
    "weight_updates_per_epoch": 6,
    "micro_batch_size": 8,
    "global_batch_size": 32,
    "lr_schedule_params": {"initial_learning_rate": 0.0001},
}
TRAINED = {**SMALL, "validation": False}  # for tests that look at weights alone


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return the small run on one device, which several tests compare theirs with."""
    log_dir = str(tmp_path_factory.mktemp("plain"))
    return train(resolve(QUICK | SMALL | {"log_dir": log_dir, "run_name": "plain"}, "none", environ={}))


def test_a_pipelined_run_gives_the_weights_and_accuracies_of_one_stage(quick, plain):
    stages = {"pipeline_splits": ["max_pool_0", "conv2d_1"], "device_mapping": [0, 1, 0], "recomputation": True}
    staged = train(quick(run_name="staged", **SMALL, **stages, pipeline_schedule="grouped"))
    assert_close(final_state(staged.directory), final_state(plain.directory))
    assert staged.validation["raw"].top1 == plain.validation["raw"].top1


def test_an_optimizer_that_counts_its_steps_works_in_a_pipeline(quick):
    # Few steps. Compiled as the tests are (LLVM at level 0, without fusion emitters), two programs with the same
    # operations in the same order need not round alike: LLVM makes a fused multiply-add of m = 0.9 m + 0.1 g in the
    # stage's update and not in the device loop's. That is 3e-11 at first, but within a few steps it lets a max pool
    # choose another pixel. Without FMA instructions, and compiled as a run is, the two are equal to the bit. A wrong
    # count would be off by halves at once.
    few = {**TRAINED, "weight_updates_per_epoch": 1}
    counting = {**few, "optimizer": "adamw", "optimizer_params": {"epsilon": 0.1}}
    plain = train(quick(run_name="plain", **counting))
    staged = train(quick(run_name="staged", **counting, num_pipeline_stages=2))  # two calls: the state is split twice
    assert_close(final_state(staged.directory), final_state(plain.directory))


def test_a_checkpoint_of_one_plan_restores_on_any_other(quick, plain, tmp_path):
    train(quick(run_name="cut", **TRAINED, num_pipeline_stages=2, num_replicas=2))
    newest = list_checkpoints(tmp_path / "runs" / "cut" / "checkpoints")[-1]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    (tmp_path / "runs" / "cut" / "metrics.jsonl").unlink()
    resumed = resume(tmp_path / "runs" / "cut", {"num_pipeline_stages": 1, "num_replicas": 1})
    assert resumed.step == 12
    found = final_state(resumed.directory)
    for name, array in final_state(plain.directory).items():
        if name.startswith(
            "params/"
        ):  # two replicas sum in another order, and a max pool may then choose another pixel
            assert np.abs(found[name] - array).max() <= 1e-5 + 0.01 * np.abs(array).max(), name


@pytest.mark.slow
def test_a_pipelined_run_is_reproducible_to_the_bit(quick):
    staged = {"num_pipeline_stages": 2, "precision": "16.16", "train_augmentation": "flip-crop"}
    first = train(quick(run_name="first", **SMALL, **staged))
    second = train(quick(run_name="second", **SMALL, **staged))
    assert_same_bits(final_state(first.directory), final_state(second.directory))


def test_shared_batch_norm_statistics_need_groups_that_divide_the_replicas(quick):
    with pytest.raises(ConfigError, match="dbn_replica_group_size 3"):
        quick(**TRAINED, num_replicas=2, dbn_replica_group_size=3)
    apart = train(quick(run_name="apart", **TRAINED, num_replicas=2))
    shared = train(quick(run_name="shared", **TRAINED, num_replicas=2, dbn_replica_group_size=2))
    name = "params/conv2d_0/conv/kernel"
    difference = np.abs(final_state(apart.directory)[name] - final_state(shared.directory)[name]).max()
    assert difference > 1e-5, "other statistics are another computation"
    staged = train(quick(run_name="staged", **TRAINED, num_replicas=2, dbn_replica_group_size=2, num_pipeline_stages=2))
    assert_close(final_state(staged.directory), final_state(shared.directory))


def test_splits_that_do_not_exist_are_refused_with_the_possible_ones(quick, tmp_path):
    with pytest.raises(ConfigError, match="max_pool_1"):
        train(quick(**SMALL, pipeline_splits=["max_pool_9"]))
    assert not (tmp_path / "runs").exists()


def test_state_elsewhere_pipelined_validation_and_a_traced_schedule(quick):
    """All that concerns where things are leaves the weights and the accuracy alone."""
    plain = train(quick(run_name="plain", **SMALL, num_replicas=2, ema_decay=0.9))
    elsewhere = {
        "pipeline_splits": ["max_pool_0", "conv2d_1"],
        "optimizer_state_offloading": True,
        "replicated_optimizer_state_sharding": True,
        "pipeline_validation_model": True,
        "trace_schedule": True,
        "fp_exceptions": True,
    }
    staged = train(quick(run_name="staged", **SMALL, num_replicas=2, ema_decay=0.9, **elsewhere))
    assert_close(final_state(staged.directory), final_state(plain.directory))
    assert staged.validation["raw"].top1 == plain.validation["raw"].top1
    assert staged.validation["ema"].top1 == plain.validation["ema"].top1
    for suffix in (".svg", ".png", ".json", ".txt"):
        assert (staged.directory / f"schedule{suffix}").stat().st_size > 500
    trace = json.loads((staged.directory / "schedule.json").read_text())
    measured = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
    assert len(measured) == 2 * 3 * 2  # forward and backward, three stages, two micro batches
    notes = (staged.directory / "metrics.jsonl").read_text()
    assert "devices idle" in notes
    assert "the CPU's memory is the host's" in notes


def test_measured_blocks_become_part_of_the_configuration(quick):
    result = train(quick(run_name="measured", **TRAINED, num_pipeline_stages=2, measure_splits=True))
    saved = json.loads((result.directory / "config.json").read_text())
    flat = json.dumps(saved)
    assert '"measured"' in flat
    plan = json.loads((result.directory / "plan.json").read_text())
    names = [name for stage in plan["pipeline"]["stages"] for name in stage["block_names"]]
    seconds = next(value for key, value in _walk(saved) if key == "block_seconds")
    assert sorted(seconds) == sorted(names)
    # the cut is the best one by these times: no other has a quicker slowest stage
    times = [seconds[name] for name in names]
    slowest = [max(sum(times[:cut]), sum(times[cut:])) for cut in range(1, len(times))]
    chosen = len(plan["pipeline"]["stages"][0]["block_names"])
    assert slowest[chosen - 1] == pytest.approx(min(slowest))


def _walk(tree):
    for key, value in tree.items():
        yield key, value
        if isinstance(value, dict):
            yield from _walk(value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"recomputation": True, "recomputation_points": ["no_such"]}, "matches no block"),
        ({"recomputation": True, "recomputation_points": ["("]}, "must be regular expressions"),
        ({"num_pipeline_stages": 2, "block_seconds": {"conv2d_0": 1.0}}, "block_seconds does not fit the network"),
        ({"num_pipeline_stages": 2, "device_memory": "1KiB"}, "No cut into 2 stages fits"),
    ],
)
def test_what_cannot_work_is_refused_before_a_run_is_made(quick, tmp_path, options, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        train(quick(run_name="bad", **SMALL, **options))
    assert not (tmp_path / "runs" / "bad").exists()


def test_recomputation_of_a_run_without_stages_changes_no_weight(quick, plain):
    again = train(quick(run_name="again", **TRAINED, recomputation=True))
    assert_close(final_state(again.directory), final_state(plain.directory))
