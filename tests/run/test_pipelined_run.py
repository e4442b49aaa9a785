"""Whole runs as pipelines: the same weights as without stages, checkpoints that any other plan restores."""

import numpy as np
import pytest

from headrace.checkpoint.store import list_checkpoints
from headrace.core.errors import ConfigError
from headrace.run.fit import resume, train

from .conftest import assert_same_bits, final_state

SMALL = {
    "num_epochs": 2,
    "weight_updates_per_epoch": 6,
    "micro_batch_size": 8,
    "global_batch_size": 32,
    "lr_schedule_params": {"initial_learning_rate": 0.0001},
}


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        if name.startswith(("params/", "stats/", "ema/", "opt/")):
            np.testing.assert_allclose(found[name], array, rtol=2e-4, atol=2e-5, err_msg=name)


def test_a_pipelined_run_gives_the_weights_and_accuracies_of_one_stage(quick):
    plain = train(quick(run_name="plain", **SMALL))
    stages = {"pipeline_splits": ["max_pool_0", "conv2d_1"], "device_mapping": [0, 1, 0], "recomputation": True}
    staged = train(quick(run_name="staged", **SMALL, **stages, pipeline_schedule="grouped"))
    assert_close(final_state(staged.directory), final_state(plain.directory))
    assert staged.validation["raw"].top1 == plain.validation["raw"].top1


def test_an_optimizer_that_counts_its_steps_works_in_a_pipeline(quick):
    counting = {**SMALL, "optimizer": "adamw", "optimizer_params": {"epsilon": 0.1}}
    plain = train(quick(run_name="plain", **counting))
    staged = train(quick(run_name="staged", **counting, num_pipeline_stages=2))  # two calls: the state is split twice
    assert_close(final_state(staged.directory), final_state(plain.directory))


def test_a_checkpoint_of_one_plan_restores_on_any_other(quick, tmp_path):
    whole = train(quick(run_name="whole", **SMALL))
    train(quick(run_name="cut", **SMALL, num_pipeline_stages=2, num_replicas=2))
    newest = list_checkpoints(tmp_path / "runs" / "cut" / "checkpoints")[-1]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    (tmp_path / "runs" / "cut" / "metrics.jsonl").unlink()
    resumed = resume(tmp_path / "runs" / "cut", {"num_pipeline_stages": 1, "num_replicas": 1})
    assert resumed.step == 12
    found = final_state(resumed.directory)
    for name, array in final_state(whole.directory).items():
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
        quick(**SMALL, num_replicas=2, dbn_replica_group_size=3)
    apart = train(quick(run_name="apart", **SMALL, num_replicas=2))
    shared = train(quick(run_name="shared", **SMALL, num_replicas=2, dbn_replica_group_size=2))
    name = "params/conv2d_0/conv/kernel"
    difference = np.abs(final_state(apart.directory)[name] - final_state(shared.directory)[name]).max()
    assert difference > 1e-5, "other statistics are another computation"
    staged = train(quick(run_name="staged", **SMALL, num_replicas=2, dbn_replica_group_size=2, num_pipeline_stages=2))
    assert_close(final_state(staged.directory), final_state(shared.directory))


def test_splits_that_do_not_exist_are_refused_with_the_possible_ones(quick, tmp_path):
    with pytest.raises(ConfigError, match="max_pool_1"):
        train(quick(**SMALL, pipeline_splits=["max_pool_9"]))
    assert not (tmp_path / "runs").exists()
