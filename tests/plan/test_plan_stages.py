"""A pipelined run on paper: devices, validation, memory of each device, strictness, and its text."""

import json

import pytest

from headrace.cli.plan import main
from headrace.config.load import config_from
from headrace.core.errors import ConfigError
from headrace.data.dataset import describe_dataset
from headrace.model.zoo import build_network
from headrace.plan.pipeline import PipelinePlan
from headrace.plan.plan import Plan, make_plan

SPLITS = [f"conv{i}_block1_post_addition_relu" for i in (2, 3, 4)]
RUN = {"dataset": "cifar10", "micro_batch_size": 32, "gradient_accumulation_count": 8, "pipeline_splits": SPLITS}
# cifar_resnet8: stem, then per width (16, 32, 64) two 3x3 convolutions; batch norms have two numbers per channel.
STEM = 3 * 3 * 3 * 16 + 2 * 16
PARAMETERS = [  # of the four stages: a unit's relu starts the next stage
    STEM + 2 * (9 * 16 * 16 + 2 * 16),
    9 * 16 * 32 + 9 * 32 * 32 + 4 * 32,
    9 * 32 * 64 + 9 * 64 * 64 + 4 * 64,
    64 * 10 + 10,
]
IMAGES, LABELS = 3072 + 4, 4


def plan_of(**options) -> Plan:
    config = config_from(options)
    info = describe_dataset(config.data)
    return make_plan(config, info, build_network(config.model, info.num_classes, info.image_hwc))


def pipeline_of(plan: Plan) -> PipelinePlan:
    assert plan.pipeline is not None
    return plan.pipeline


def test_one_stage_has_no_pipeline():
    plan = plan_of(num_replicas=2)
    assert plan.pipeline is None
    assert (plan.num_devices, plan.devices_per_replica, len(plan.memory_by_device)) == (2, 1, 1)
    assert plan.memory is plan.memory_by_device[0]
    assert plan.to_dict()["pipeline"] is None


def test_devices_and_validation_replicas_multiply():
    plan = plan_of(**RUN, num_replicas=3)
    assert (plan.devices_per_replica, plan.num_devices, plan.validation.num_replicas) == (4, 12, 12)
    plan = plan_of(**RUN, num_replicas=3, device_mapping=[0, 1, 1, 0])
    assert (plan.devices_per_replica, plan.num_devices, plan.validation.num_replicas) == (2, 6, 6)
    plan = plan_of(**RUN, validation_num_replicas=1)
    assert (plan.num_devices, plan.validation.num_replicas) == (4, 1)
    assert plan_of(**RUN, validation_num_replicas=7).num_devices == 7


def test_filters_say_where_a_cut_may_be():
    rest = {name: value for name, value in RUN.items() if name != "pipeline_splits"} | {"num_pipeline_stages": 3}
    wanted = {"split_include_filter": ["conv3", "conv4"], "split_exclude_filter": ["relu"]}
    assert pipeline_of(plan_of(**rest, **wanted)).splits == ("conv3_block1", "conv4_block1")
    assert pipeline_of(plan_of(**rest, split_exclude_filter=["conv4", "relu"])).splits == (
        "conv2_block1",
        "conv3_block1",
    )


def test_a_cut_that_was_searched_for_comes_with_its_names_and_all_that_are_possible():
    """Each listed name is accepted, and no other block is missing."""
    rest = {name: value for name, value in RUN.items() if name != "pipeline_splits"}
    plan = plan_of(**rest, num_pipeline_stages=3)
    text = str(plan)
    assert f"this cut by name: --pipeline-splits {' '.join(pipeline_of(plan).splits)}\n" in text
    listed = text.split("possible splits: ")[1].split("\ndevices of a replica")[0].replace(",", " ").split()
    for name in listed:
        assert pipeline_of(plan_of(**rest, pipeline_splits=[name])).splits == (name,)
    config = config_from(rest)
    info = describe_dataset(config.data)
    assert listed == list(build_network(config.model, info.num_classes, info.image_hwc).block_names[1:])
    assert "possible splits" not in str(plan_of(**RUN))


def test_names_numbers_and_stages_give_a_cut():
    assert pipeline_of(plan_of(**RUN)).splits == tuple(SPLITS)
    rest = {name: value for name, value in RUN.items() if name != "pipeline_splits"}
    by_number = pipeline_of(plan_of(**rest, pipeline_splits=2))
    assert by_number.num_stages == 3
    assert pipeline_of(plan_of(**rest, num_pipeline_stages=3)).splits == by_number.splits
    assert pipeline_of(plan_of(**RUN, pipeline_schedule="grouped")).schedule == "Grouped"
    with pytest.raises(ConfigError, match="Possible splits of cifar_resnet8: conv2_block1, "):
        plan_of(**rest, pipeline_splits=["conv2_blok1"])
    with pytest.raises(ConfigError, match="3 entries, but there are 4 stages"):
        plan_of(**RUN, device_mapping=[0, 1, 2])


def test_each_device_holds_its_stages():
    plan = plan_of(**RUN, optimizer_params={"momentum": 0.9})
    for device, memory in enumerate(plan.memory_by_device):
        rows = {row.name: row.num_bytes for row in memory.rows}
        for row in ("weights", "gradients", "accumulators", "optimizer state"):
            assert rows[row] == 4 * PARAMETERS[device]
    # kept by stage 0 per image: the input and the outputs of the stem's and the unit's three convolutions
    kept = 32 * 32 * 3 + 3 * 32 * 32 * 16
    activations = [memory.bytes_of("activations") for memory in plan.memory_by_device]
    assert activations[0] == 4 * 4 * 32 * kept  # 4 micro batches of 32-bit numbers
    last = 8 * 8 * 64 + 10  # input; logits
    assert activations[3] == 4 * 32 * last
    data = [memory.bytes_of("data") for memory in plan.memory_by_device]
    assert data == [60_000 * IMAGES, 10_000 * IMAGES, 10_000 * IMAGES, 10_000 * IMAGES + 50_000 * LABELS]
    assert plan.memory == plan.memory_by_device[0]


def test_recomputation_keeps_the_inputs_and_one_stage():
    memory = plan_of(**RUN, recomputation=True).memory_by_device[0]
    image, stored = 32 * 32 * 3, 3 * 32 * 32 * 16
    assert memory.bytes_of("activations") == 4 * 32 * (4 * image + stored)


def test_blocks_are_sent_to_the_first_and_labels_to_the_last_stage():
    plan = plan_of(**RUN, dataset_cache="host", weight_updates_per_epoch=4)
    data = [memory.bytes_of("data") for memory in plan.memory_by_device]
    images = 3 * plan.steps.steps_per_call * 8 * 32  # in three blocks
    assert data == [images * (3072 + 8), 0, 0, images * 8]


def test_validation_through_stages_has_its_images_at_the_first_stage():
    backwards = {**RUN, "device_mapping": [3, 2, 1, 0]}
    plan = plan_of(**backwards, pipeline_validation_model=True)
    data = [memory.bytes_of("data") for memory in plan.memory_by_device]
    assert data == [60_000 * LABELS, 0, 0, 60_000 * IMAGES]
    plan = plan_of(**backwards, pipeline_validation_model=True, dataset_cache="host")
    names = [[row.name for row in memory.rows] for memory in plan.memory_by_device]
    assert ["validation data" in rows for rows in names] == [False, False, False, True]
    plan = plan_of(**backwards, dataset_cache="host")
    assert all("validation data" in [row.name for row in memory.rows] for memory in plan.memory_by_device)


def test_strict_is_strict_only_when_asked():
    options = RUN | {"gradient_accumulation_count": 6}
    assert pipeline_of(plan_of(**options)).num_micros == 6
    with pytest.raises(ConfigError, match="6 micro batches per step are not a multiple of 4") as caught:
        plan_of(**options, strict_pipeline=True)
    assert "any count works" in caught.value.remedy
    assert plan_of(**RUN, strict_pipeline=True, pipeline_schedule="Grouped").pipeline


def test_advice_is_among_the_warnings():
    poor = plan_of(**RUN | {"pipeline_splits": ["fc_layer"]})
    assert "longer than with --pipeline-splits" in poor.warnings[0]
    short = plan_of(**RUN | {"gradient_accumulation_count": 1})
    idle = [warning for warning in short.warnings if "idle for 75%" in warning]  # (S - 1) / S
    assert len(idle) == 1


def test_the_record_holds_the_pipeline():
    record = json.loads(json.dumps(plan_of(**RUN, recomputation=True).to_dict()))
    assert record["pipeline"]["splits"] == SPLITS
    assert record["pipeline"]["recomputation"] is True
    assert [stage["num_parameters"] for stage in record["pipeline"]["stages"]] == PARAMETERS
    assert max(record["memory_by_device"]) == record["memory"]["total_bytes"]


def test_the_command_shows_stages_devices_and_the_schedule(capsys):
    options = "--config none --dataset cifar10 --micro-batch-size 32 --gradient-accumulation 8 --pipeline-splits"
    assert main([*options.split(), *SPLITS, "--device-mapping", "0", "1", "1", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index(next(line for line in lines if line.startswith("stages ")))
    assert lines[first + 2].split() == [
        *("0", "conv1", "..", "conv2_block1", "0", f"{PARAMETERS[0]:,}"),
        # 2 FLOPs per weight and place: the stem and two convolutions on 32x32
        *(f"{2 * 1024 * (432 + 2 * 2304) / 1e6:.1f}", "M"),
        *(f"{4 * 32 * (3072 + 3 * 16384) / 2**20:.1f}", "MiB", f"{4 * 32 * 16384 / 2**20:.1f}", "MiB"),
        lines[first + 2].split()[-1],
    ]
    assert lines[first + 5].split()[:6] == ["3", f"{SPLITS[2]}", "..", "fc_layer", "0", "650"]
    assert any(line.split()[:3] == ["0", "0", "3"] for line in lines[first + 6 :])
    assert any(line.startswith("  dev 1 |.  |1F0|2F0") for line in lines)
    assert any(line.startswith("memory of device 0, the fullest") for line in lines)
    assert any("would save up to" in line for line in lines)


def test_stages_on_one_device_are_one_program_cut_for_recomputation():
    plan = plan_of(**RUN | {"device_mapping": [0, 0, 0, 0]}, recomputation=True)
    assert plan.one_program
    names = [name for stage in pipeline_of(plan).stages for name in stage.block_names]
    assert [names[point] for point in plan.recompute_points] == SPLITS
    # kept per image: the input, what reaches the stages, and the largest segment's convolutions, relus and pool
    inputs = 32 * 32 * 3 + 32 * 32 * 16 + 16 * 16 * 32 + 8 * 8 * 64
    segments = [5 * 32 * 32 * 16, 32 * 32 * 16 + 3 * 16 * 16 * 32, 16 * 16 * 32 + 3 * 8 * 8 * 64, 8 * 8 * 64 + 64 + 10]
    assert plan.memory.bytes_of("activations") == 4 * 32 * (inputs + max(segments))
    assert not plan_of(**RUN).one_program
    offloaded = plan_of(**RUN | {"device_mapping": [0, 0, 0, 0]}, optimizer_state_offloading=True)
    assert not offloaded.one_program
