"""The whole plan, from a configuration: defaults that follow from each other, switches, the record."""

import dataclasses
import json

import pytest

from headrace.config.load import config_from
from headrace.core.errors import ConfigError
from headrace.data.dataset import describe_dataset
from headrace.model.zoo import build_network
from headrace.plan.plan import Plan, make_plan

CIFAR = {"dataset": "cifar10", "micro_batch_size": 8, "gradient_accumulation_count": 8, "num_epochs": 6}


def plan_of(**options) -> Plan:
    config = config_from(options)
    info = describe_dataset(config.data)
    return make_plan(config, info, build_network(config.model, info.num_classes, info.image_hwc))


def test_the_reference_run_is_planned_from_its_options():
    plan = plan_of(**CIFAR, validation=False)
    assert plan.batch.global_batch_size == 64
    assert (plan.steps.updates_per_epoch, plan.steps.epoch.dropped) == (781, 16)
    assert (plan.steps.num_calls, plan.steps.steps_per_call, plan.steps.total_steps) == (6, 781, 4686)
    assert plan.warnings == ()


@pytest.mark.parametrize(("logs", "periods"), [(1, (781, 781, 781)), (11, (71, 781, 781)), ("1/3", (2343, 2343, 2343))])
def test_checkpoints_and_validations_follow_the_logs_but_at_most_once_per_epoch(logs, periods):
    steps = plan_of(**CIFAR, logs_per_epoch=logs).steps
    assert (steps.log_every, steps.checkpoint_every, steps.validate_every) == periods
    assert steps.steps_per_call == min(periods)


def test_no_logs_and_nothing_else_said_is_one_call():
    plan = plan_of(**CIFAR, logs_per_epoch=0)
    assert (plan.steps.num_calls, plan.steps.checkpoint_every, plan.steps.validate_every) == (1, 4686, 4686)
    assert "goes without an event" in plan.warnings[0]


def test_explicit_validations_decide_the_calls():
    steps = plan_of(**CIFAR, logs_per_epoch=0, validations_per_epoch=1).steps
    assert (steps.log_every, steps.checkpoint_every, steps.validate_every, steps.num_calls) == (4686, 4686, 781, 6)


def test_zero_means_only_at_the_end_and_off_means_never():
    steps = plan_of(**CIFAR, ckpts_per_epoch=0, validation=False).steps
    assert (steps.checkpoint_every, steps.validate_every, steps.num_calls) == (4686, 0, 6)
    steps = plan_of(**CIFAR, checkpoints=False).steps
    assert (steps.checkpoint_every, steps.validate_every) == (0, 781)


def test_half_a_log_per_epoch_in_five_epochs():
    steps = plan_of(**{**CIFAR, "num_epochs": 5}, logs_per_epoch=0.5).steps
    assert [step // 781 for step in range(5 * 781 + 1) if steps.log_due(step)] == [2, 4, 5]


def test_events_that_divide_an_epoch_are_an_option():
    assert plan_of(**CIFAR, logs_per_epoch=10, events_divide_epoch=True).steps.log_every == 71
    assert plan_of(**CIFAR, logs_per_epoch=10).steps.to_dict()["log_every"] == 78.1


def test_accumulation_and_global_batch_together_are_refused():
    with pytest.raises(ConfigError, match="gradient_accumulation_count"):
        plan_of(**CIFAR, global_batch_size=64)


def test_a_step_larger_than_the_set_is_refused_when_training_and_harmless_when_not():
    with pytest.raises(ConfigError, match="One step takes 2,000 samples, the training set has 1,437"):
        plan_of(micro_batch_size=2000)
    steps = plan_of(micro_batch_size=2000, training=False).steps
    assert (steps.total_steps, steps.num_calls) == (0, 0)
    assert steps.updates_per_epoch > 0  # others divide by it


def test_warnings_of_all_parts_are_gathered():
    plan = plan_of(dataset="cifar10", micro_batch_size=3, num_replicas=2, global_batch_size=10, logs_per_epoch=1e5)
    assert plan.batch.global_batch_size == 12
    assert [warning.split()[0] for warning in plan.warnings] == ["--global-batch-size", "--logs-per-epoch"]


def test_devices_are_those_of_training_or_validation_whichever_needs_more():
    assert plan_of(num_replicas=2).num_devices == 2
    assert plan_of(num_replicas=2, validation_num_replicas=3).num_devices == 3


# Data that is sent: 224 x 224 x 3 bytes, a label and an index per image.
SENT = {
    "dataset": "generated",
    "image_size": 224,
    "num_samples": 6400,
    "model_name": "resnet18",
    "micro_batch_size": 64,
    "dataset_device_budget": "300MB",
}
STEP_BYTES = 64 * (224 * 224 * 3 + 8)


def test_blocks_of_data_that_is_sent_fit_the_budget():
    plan = plan_of(**SENT)
    assert plan.cache.where == "host"
    fits = [k for k in range(1, 101) if 3 * k * STEP_BYTES <= 300e6]
    assert plan.steps.steps_per_call == max(fits) == 10
    assert plan.memory.bytes_of("data") == 3 * 10 * STEP_BYTES


def test_images_preprocessed_on_the_host_are_four_times_as_large():
    plan = plan_of(**SENT, accelerator_side_preprocess=False)
    assert plan.steps.steps_per_call == 2
    assert plan.memory.bytes_of("data") == 3 * 2 * 64 * (4 * 224 * 224 * 3 + 8)


def test_replicas_share_a_block():
    plan = plan_of(**{**SENT, "micro_batch_size": 16}, num_replicas=4)
    assert plan.steps.steps_per_call == 41  # 300 MB / (3 x a quarter of a step)
    assert plan.memory.bytes_of("data") == 3 * 41 * STEP_BYTES // 4


def test_a_resident_set_does_not_bound_the_call():
    plan = plan_of(dataset="cifar10", micro_batch_size=64, dataset_device_budget="1GB")
    assert plan.cache.where == "device"
    assert plan.steps.steps_per_call == 781
    assert plan.memory.bytes_of("data") == 60_000 * (3072 + 4)


def test_synthetic_images_are_few():
    plan = plan_of(dataset="synthetic", num_samples=100_000, image_size=32, micro_batch_size=10)
    assert plan.memory.bytes_of("data") == 2 * 1024 * (3072 + 4)
    assert plan.steps.steps_per_call == 10_000


def test_the_plan_is_frozen_and_its_record_is_json():
    plan = plan_of(**CIFAR, num_replicas=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.batch = None  # pyright: ignore[reportAttributeAccessIssue]
    record = json.loads(json.dumps(plan.to_dict()))
    assert record["batch"]["global_batch_size"] == 128
    assert record["steps"]["updates_per_epoch"] == 390
    assert record["steps"]["num_calls"] == 6
    assert record["validation"] == {
        "micro_batch_size": 8,
        "num_replicas": 2,
        "num_devices": 2,
        "batch_size": 16,
        "num_samples": 10_000,
        "num_batches": 625,
        "padding": 0,
        "cache": {"where": "device", "reason": "with the training images", "bytes": 10_000 * (32 * 32 * 3 + 4)},
    }
    assert record["memory"]["total_bytes"] == sum(row["bytes"] for row in record["memory"]["rows"])
    assert record["num_parameters"] == 75_290
    assert record["dataset_cache"]["where"] == "device"
