"""The pipeline of a network on paper: sums over stages, memory of devices, advice."""

import json
from typing import Any

import pytest

from headrace.config.load import config_from
from headrace.core.errors import ConfigError
from headrace.model.network import Network
from headrace.model.zoo import build_network
from headrace.plan.pipeline import PipelineOptions, make_pipeline_plan

SPLITS = [f"conv{i}_block1_post_addition_relu" for i in (2, 3, 4)]


def built(name: str, size: int, classes: int) -> Network:
    return build_network(config_from({"model_name": name}).model, classes, (size, size, 3))


RESNET8 = built("cifar_resnet8", 32, 10)


def test_stages_share_out_the_whole_network():
    plan = make_pipeline_plan(RESNET8, PipelineOptions(splits=SPLITS, num_micros=8, micro_batch_size=32))
    total = RESNET8.total_cost()
    assert plan.splits == tuple(SPLITS)
    assert sum((stage.block_names for stage in plan.stages), ()) == RESNET8.block_names
    assert sum(stage.num_parameters for stage in plan.stages) == total.params == 75_290
    assert sum(stage.flops_per_image for stage in plan.stages) == total.flops
    assert sum(stage.stored_bytes for stage in plan.stages) == total.product_elements * 4 * 32
    assert sum(stage.time_share for stage in plan.stages) == pytest.approx(1)
    # 32x32x16 after conv2_block1, 16x16x32 after conv3_block1, 8x8x64 after conv4_block1; the last sends nothing on
    assert [s.output_bytes for s in plan.stages] == [32 * 4 * n for n in (32 * 32 * 16, 16 * 16 * 32, 8 * 8 * 64, 0)]
    assert [s.input_bytes for s in plan.stages][1:] == [s.output_bytes for s in plan.stages][:-1]
    assert [(s.device, s.first, s.end) for s in plan.stages] == [(0, 0, 2), (1, 2, 4), (2, 4, 6), (3, 6, 9)]
    assert plan.num_devices == plan.num_stages == 4


def test_memory_follows_the_peaks_of_the_schedule():
    options: dict[str, Any] = {"splits": SPLITS, "num_micros": 8, "micro_batch_size": 32}
    interleaved = make_pipeline_plan(RESNET8, PipelineOptions(schedule="interleaved", **options))
    grouped = make_pipeline_plan(RESNET8, PipelineOptions(schedule="grouped", **options))
    each = [stage.input_bytes + stage.stored_bytes for stage in interleaved.stages]
    assert interleaved.activation_bytes() == tuple(n * size for n, size in zip((4, 3, 2, 1), each, strict=True))
    assert grouped.activation_bytes() == tuple(n * size for n, size in zip((7, 5, 3, 1), each, strict=True))
    inputs = [stage.input_bytes for stage in interleaved.stages]
    stored = [stage.stored_bytes for stage in interleaved.stages]
    assert grouped.activation_bytes(recomputation=True) == tuple(
        n * a + b for n, a, b in zip((7, 5, 3, 1), inputs, stored, strict=True)
    )
    assert sum(interleaved.weight_bytes()) == 16 * 75_290
    assert interleaved.bubble == grouped.bubble == pytest.approx(3 / 11)
    assert interleaved.expected_bubble > interleaved.bubble


def test_stages_that_share_a_device_share_its_memory():
    options = PipelineOptions(splits=SPLITS, device_mapping=[0, 1, 1, 0], num_micros=1, schedule="Sequential")
    plan = make_pipeline_plan(RESNET8, options)
    own = [stage.stored_bytes + stage.input_bytes for stage in plan.stages]
    assert plan.activation_bytes() == (own[0] + own[3], own[1] + own[2])
    inputs, stored = zip(*((stage.input_bytes, stage.stored_bytes) for stage in plan.stages), strict=True)
    assert plan.activation_bytes(recomputation=True) == (
        inputs[0] + inputs[3] + max(stored[0], stored[3]),
        inputs[1] + inputs[2] + max(stored[1], stored[2]),
    )
    assert plan.weight_bytes()[1] == 16 * (plan.stages[1].num_parameters + plan.stages[2].num_parameters)


def test_equal_measured_times_give_the_ideal_bubble():
    seconds = dict.fromkeys(RESNET8.block_names, 0.01)
    plan = make_pipeline_plan(RESNET8, PipelineOptions(splits=3, num_micros=4, block_seconds=seconds))
    assert [stage.first for stage in plan.stages] == [0, 3, 6]
    assert plan.expected_bubble == pytest.approx(plan.bubble) == pytest.approx(2 / 6)
    # stages of 1/3 of the network, forward and twice that backward, for 4 + 2 micro batches; one by one for 4 x 3
    assert plan.expected_table().total_time == pytest.approx(6 * (1 / 3 + 2 / 3))
    assert plan.expected_table("Sequential").total_time == pytest.approx(4 * 3 * (1 / 3 + 2 / 3))


def test_a_poor_cut_is_said():
    poor = make_pipeline_plan(RESNET8, PipelineOptions(splits=["fc_layer"], num_micros=4))
    assert len(poor.advice) == 1
    assert "longer than with --pipeline-splits" in poor.advice[0]
    assert make_pipeline_plan(RESNET8, PipelineOptions(splits=4, num_micros=4)).advice == ()


def fullest(plan):
    return max(map(sum, zip(plan.weight_bytes(), plan.activation_bytes(), strict=True)))


def test_memory_limits_move_the_cut_or_are_refused():
    options: dict[str, Any] = {"splits": 2, "num_micros": 4, "micro_batch_size": 8}
    # As if the last blocks took longest: the free cut leaves most activations to stage 0.
    options["block_seconds"] = {name: 1 + number for number, name in enumerate(RESNET8.block_names)}
    free = make_pipeline_plan(RESNET8, PipelineOptions(**options))
    limit = fullest(free) - 1
    bound = make_pipeline_plan(RESNET8, PipelineOptions(device_bytes=limit, **options))
    assert bound.splits != free.splits
    assert fullest(bound) <= limit
    with pytest.raises(ConfigError, match="No cut into 2 stages fits"):
        make_pipeline_plan(RESNET8, PipelineOptions(device_bytes=1000, **options))


def test_the_published_cut_of_resnet50():
    names = ["conv2_block2_out", "conv3_block1_out", "conv4_block2_out"]
    network = built("resnet50", 224, 1000)
    options = PipelineOptions(splits=names, num_micros=128, micro_batch_size=16, bytes_per_number=2)
    plan = make_pipeline_plan(network, options)
    assert plan.bubble == pytest.approx(3 / 131)
    assert plan.advice == ()  # 8 % from the best by the model: not much
    assert [stage.output_bytes for stage in plan.stages] == [
        2 * 16 * n for n in (56 * 56 * 256, 28 * 28 * 512, 14 * 14 * 1024, 0)
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"splits": 0}, "too few"),
        ({"splits": 10}, "cannot be cut into 10 stages"),
        ({"splits": ["nothing"]}, "no block 'nothing'"),
        ({"splits": 2, "device_mapping": [0]}, "1 entries"),
        ({"splits": 2, "schedule": "groupd"}, "Did you mean Grouped"),
        ({"splits": 2, "num_micros": 0}, "nothing to do"),
    ],
)
def test_what_cannot_be(options, words):
    with pytest.raises(ConfigError, match=words):
        make_pipeline_plan(RESNET8, PipelineOptions(**options))


def test_one_stage():
    plan = make_pipeline_plan(RESNET8, PipelineOptions(splits=1, num_micros=3))
    assert (plan.splits, plan.bubble, plan.num_devices) == ((), 0, 1)


def test_the_plan_is_plain_values():
    plan = make_pipeline_plan(RESNET8, PipelineOptions(splits=SPLITS, num_micros=8, device_mapping=[0, 1, 1, 0]))
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["device_mapping"] == [0, 1, 1, 0]
    assert values["stages"][1]["block_names"][0] == SPLITS[0]
    assert values["peak_by_stage"] == [4, 3, 2, 1]
