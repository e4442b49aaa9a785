"""Calls of the shipped recipes: as long as their data and their events allow."""

import math
from dataclasses import replace

import pytest

from headrace.config.load import Resolved, named_blocks, resolve
from headrace.config.schema import ModelSection, PipelineSection
from headrace.config.yaml_blocks import listed
from headrace.core.units import parse_bytes
from headrace.data.dataset import describe_dataset
from headrace.model.zoo import build_network
from headrace.plan.plan import Plan, make_plan

# These need image files or splits to be planned.
NOT_PLANNED = {"images", "mk2_efficientnet_b4_16ipus_base"}
NAMES = [block.name for block in listed(named_blocks(None)) if block.name not in NOT_PLANNED]


def planned(resolved: Resolved) -> Plan:
    """Plan with a tiny network without stages: neither changes a call, and both take time to plan."""
    config = resolved.config
    small = replace(config, pipeline=PipelineSection(), model=ModelSection(model_name="toy_model"))
    info = describe_dataset(config.data, absent_ok=True)
    return make_plan(small, info, build_network(small.model, info.num_classes, info.image_hwc))


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_as_long_as_data_and_events_allow(name):
    resolved = resolve({}, name, environ={})
    plan, config = planned(resolved), resolved.config
    if not config.run.training:
        assert plan.steps.num_calls == 0
        return
    events = [
        every for every in (plan.steps.log_every, plan.steps.checkpoint_every, plan.steps.validate_every) if every
    ]
    limits = [math.ceil(min(events)), config.batch.max_steps_per_call or math.inf]
    if plan.cache.where == "host":
        image = 3 * describe_dataset(config.data, absent_ok=True).image_hwc[0] ** 2
        image *= 1 if plan.feed.eight_bit_transfer else 4
        step = plan.batch.micro_batch_size * plan.batch.gradient_accumulation_count * (image + 8)
        blocks = 1 + config.data.prefetch_depth
        limits.append(max(1, parse_bytes(config.data.dataset_device_budget) // (blocks * step)))
    assert plan.steps.steps_per_call == min(limits)
    stretches = max(plan.steps.num_events(every) for every in events)
    assert plan.steps.num_calls <= stretches * math.ceil(math.ceil(min(events)) / plan.steps.steps_per_call)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("name", "most", "logs_per_epoch"),
    [
        ("mk2_resnext101_16ipus", 49, 16),
        ("mk2_efficientnet_b4_g1_16ipus", 8, 16),
        ("mk2_efficientnet_b4_g16_16ipus", 8, 16),
        ("mk1_resnet50_16ipus", 18, 16),
        ("mk2_resnet50_mlperf_pod16", 33, 5),
        ("mk2_resnet50_bn_16ipus", 1, 1),  # a step's 16,384 images fill the device budget
    ],
)
def test_recipes_whose_events_do_not_divide_an_epoch(name, most, logs_per_epoch):
    steps = planned(resolve({}, name, environ={})).steps
    assert steps.steps_per_call == most
    assert steps.num_events(steps.log_every) == logs_per_epoch * steps.num_epochs


@pytest.mark.reference
def test_plain_imagenet_has_sixteen_logs_in_the_first_application():
    steps = planned(resolve({"application": "tf1", "dataset": "imagenet"}, environ={})).steps
    assert (steps.updates_per_epoch, steps.num_events(steps.log_every)) == (320_291, 16 * 100)
    assert steps.steps_per_call == 1000  # batches_per_step of that application
    assert steps.warnings == ()
