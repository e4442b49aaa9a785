"""Plans for machines that are not here: names, what is missing, and the programs' facts by a stand-in."""

import json
from importlib.metadata import PackageNotFoundError, version

import jax
import pytest

from headrace.cli.main import main
from headrace.config.load import config_from
from headrace.core.errors import ConfigError
from headrace.core.target import Target
from headrace.engine import ahead as engine_ahead
from headrace.engine.ahead import devices_of, read_target
from headrace.engine.hlo_text import Collective, collectives, share_beside_work
from headrace.ops.tracing import made_for
from headrace.run import ahead
from headrace.run.ahead import compile_ahead, lower_ahead, planned_ahead
from headrace.run.design import design_run

TINY = ["--config", "none", "--dataset", "generated", "--num-samples", "64", "--image-size", "8", "--num-classes", "4"]
TINY += ["--model", "cifar_resnet8", "--micro-batch-size", "4"]


def has(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def test_names_say_platform_count_and_memory():
    found = read_target("H200x8")
    assert (found.platform, found.capability, found.count) == ("gpu", "9.0", 8)
    assert found.memory_bytes == 141 << 30
    assert (read_target("h100").count, read_target("v5e-4").count, read_target("v5p-8").count) == (1, 4, 4)
    assert (read_target("v4-8").count, read_target("mi300x8").capability) == (4, "gfx942")


@pytest.mark.parametrize(
    ("text", "count", "machines"),
    [
        ("h200x8", 8, 1),
        ("2xh200x8", 16, 2),
        ("v5e-8", 8, 1),
        ("v5e-16", 16, 4),
        ("v6e-256", 256, 64),
        ("2xv5e-16", 32, 8),
        ("v4-32", 16, 4),
        ("v5p-1024", 512, 128),
    ],
)
def test_several_machines_are_as_many_processes(text, count, machines):
    found = read_target(text)
    assert (found.count, found.machines) == (count, machines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h300x8", "GPUs are a100, h100, h200"),
        ("h200x9", "1 to 8"),
        ("h200x16", "2xh200x8"),
        ("0xh200x8", "1 to 8"),
        ("h200x0", "1 to 8"),
        ("h200-8", "h200x8"),
        ("v5ex8", "v5e-8"),
        ("v5e-3", "v5e-1, v5e-4, v5e-8"),
        ("", "TPUs"),
    ],
)
def test_other_names_are_refused_with_those_that_are_known(text, said):
    with pytest.raises(ConfigError) as refused:
        read_target(text)
    assert said in str(refused.value)


def test_a_missing_compiler_is_named_before_anything_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(engine_ahead, "_PACKAGES", {"cuda": ("no-such-compiler", "aot-cuda")})
    assert main(["plan", *TINY, "--target", "h200x2"]) != 0
    out, errors = capsys.readouterr()
    assert not out
    assert "headrace[aot-cuda]" in errors


def test_the_number_of_devices_is_the_targets(capsys):
    assert main(["plan", *TINY, "--target", "h200x2", "--num-devices", "4"]) != 0
    assert "The target's name says how many" in capsys.readouterr().err


def test_exchanges_are_counted_with_their_bytes():
    text = """HloModule m
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %one = (f32[8]{0}, f32[4]{0}) all-reduce-start(%a, %a), to_apply=%add
  %two = (f32[8]{0}, f32[4]{0}) all-reduce-done(%one)
  %three = bf16[2,8]{1,0} all-gather(%a), dimensions={0}
  ROOT %four = f32[8]{0} all-reduce(%a), to_apply=%add
}
"""
    assert collectives(text) == [
        Collective(kind="all-reduce", count=2, num_bytes=48 + 32),
        Collective(kind="all-gather", count=1, num_bytes=32),
    ]


SCHEDULED = """HloModule m, is_scheduled=true
%body (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %first = f32[8]{0} all-reduce-start(%a), to_apply=%add
  %conv = (f32[8]{0}, u8[0]{0}) custom-call(%a), custom_call_target="__cudnn$convForward"
  %ended = f32[8]{0} all-reduce-done(%first)
  %second = f32[24]{0} all-reduce-start(%ended), to_apply=%add
  ROOT %done = f32[24]{0} all-reduce-done(%second)
}
"""


def test_the_share_of_sums_beside_convolutions_is_counted():
    assert share_beside_work(SCHEDULED) == 8 / 32
    assert share_beside_work(SCHEDULED.replace("__cudnn$convForward", "other")) == 0
    assert share_beside_work("HloModule m\n") is None


def test_the_programs_of_a_run_are_compiled_and_described(monkeypatch):
    target = Target(platform="cpu", name="Stand-in", memory_bytes=1 << 30, count=2)
    monkeypatch.setattr(ahead, "devices_of", lambda _: jax.devices()[:2])
    monkeypatch.setattr(ahead, "compiler_of", lambda _: "a compiler")
    options = {"dataset": "generated", "num_samples": 64, "image_size": 8, "num_classes": 4, "micro_batch_size": 4}
    config = config_from(options | {"model_name": "cifar_resnet8", "num_replicas": 2, "cpu_kernels": "off"})
    with made_for(target):
        design = design_run(config)
        found = planned_ahead(design, target)
    training, validation = found.programs
    assert (training.purpose, validation.purpose) == ("training", "validation")
    gradients = 4 * sum(leaf.size for leaf in jax.tree.leaves(design.network.init(0)[0]))
    exchanged = sum(each.num_bytes for each in training.collectives if each.kind == "all-reduce")
    assert exchanged >= gradients, "each gradient is summed over the replicas"
    assert training.estimated_bytes == design.plan.memory.total_bytes
    assert training.donated_bytes >= gradients, "the weights are written where they were"
    assert training.flops
    assert json.loads(json.dumps(found.to_dict()))["num_devices"] == 2
    assert "nothing was run" in found.lines[0]
    assert "fits in 1.0 GiB" in found.lines[1]


@pytest.mark.parametrize("more", [{}, {"replicated_optimizer_state_sharding": True, "pipeline_validation_model": True}])
def test_the_programs_of_all_stages_are_compiled_and_added_up(more):
    options = {"dataset": "generated", "num_samples": 64, "image_size": 8, "num_classes": 4, "micro_batch_size": 4}
    options |= {"model_name": "cifar_resnet8", "num_pipeline_stages": 2, "gradient_accumulation_count": 4}
    design = design_run(config_from(options | {"num_replicas": 2, "cpu_kernels": "off"} | more))
    programs, stages = compile_ahead(design, jax.devices()[:4])
    purposes = {each.purpose for each in programs}
    assert {"training stage_0_2_forward", "training stage_2_9_backward", "training stage_2_9_update"} <= purposes
    assert ("validation evaluate_2_9_forward" in purposes) == bool(more)
    reduced = [each.collectives for each in programs if each.purpose.endswith("_reduce")]
    gradients = 4 * sum(leaf.size for leaf in jax.tree.leaves(design.network.init(0)[0]))
    assert sum(one.num_bytes for found in reduced for one in found if one.kind == "all-reduce") >= gradients
    largest = max(each.total_bytes for each in programs if each.purpose.startswith("training"))
    # A device holds what one program needs, and what others of its stage keep meanwhile.
    assert largest <= max(stages[0].device_bytes) <= 3 * largest
    assert len(stages[0].device_bytes) == len(stages[0].estimated_bytes or ()) == 2


def test_nothing_is_read_for_devices_that_are_not_here(monkeypatch):
    def read(*_):
        raise AssertionError("images were read")

    monkeypatch.setattr("headrace.data.feeding.cache.make_resident", read)
    options = {"dataset": "generated", "num_samples": 64, "image_size": 8, "num_classes": 4, "micro_batch_size": 4}
    design = design_run(config_from(options | {"model_name": "cifar_resnet8", "cpu_kernels": "off"}))
    assert [each.purpose for each in lower_ahead(design, jax.devices()[:1])] == ["training", "validation"]


@pytest.mark.slow
@pytest.mark.skipif(not has("jax-cuda13-pjrt"), reason="the extra aot-cuda is not installed")
@pytest.mark.parametrize("name", ["h200x2", "2xh200x1"])
def test_a_network_is_compiled_for_gpus_that_are_not_here(name):
    target = read_target(name)
    assert {device.compute_capability for device in devices_of(target)} == {"9.0"}
    options = {"dataset": "generated", "num_samples": 64, "image_size": 8, "num_classes": 4, "micro_batch_size": 4}
    with made_for(target):
        design = design_run(config_from(options | {"model_name": "cifar_resnet8", "num_replicas": 2}))
        training, _ = planned_ahead(design, target).programs
    assert [each.kind for each in training.collectives] == ["all-reduce"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not has("jax-cuda13-pjrt"), reason="the extra aot-cuda is not installed")
@pytest.mark.parametrize(("name", "batch"), [("resnet18", 256), ("resnet50", 128)])
def test_the_estimate_is_within_five_percent_of_the_compilers(name, batch):
    # A sample of the table of docs/explanation/planning.md.
    target = read_target("h200x1")
    options = {"dataset": "synthetic", "image_size": 224, "num_classes": 1000, "micro_batch_size": batch}
    more = {"num_samples": 8 * batch, "precision": "16.32", "validation": False, "num_replicas": 1}
    with made_for(target):
        (training,) = planned_ahead(design_run(config_from(options | more | {"model_name": name})), target).programs
    assert training.estimated_bytes == pytest.approx(training.total_bytes, rel=0.05)
