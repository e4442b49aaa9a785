"""Every program of a run becomes XLA's input for accelerators that are not here, which needs no compiler of theirs.

Slow tests compile the same for those targets whose compilers are installed (extras aot-cuda, aot-rocm, aot-tpu), as the
nightly workflow does.
"""

import re
from importlib.metadata import PackageNotFoundError, version

import jax
import pytest

from headrace.config.load import config_from
from headrace.engine.ahead import devices_of, read_target
from headrace.engine.pipeline.step_plan import LoweredSteps
from headrace.ops.tracing import made_for
from headrace.run.ahead import compile_ahead, lower_ahead
from headrace.run.design import design_run

BASE = {"dataset": "generated", "num_samples": 256, "image_size": 8, "num_classes": 4, "micro_batch_size": 4}
BASE |= {"model_name": "cifar_resnet8", "num_replicas": 4, "precision": "16.32"}
STAGES = {"num_pipeline_stages": 2, "gradient_accumulation_count": 4, "num_replicas": 2}
CASES = {
    "whole": {},
    "sent": {"dataset_cache": "host", "recomputation": True, "gradient_accumulation_count": 2},
    "stages": STAGES | {"pipeline_validation_model": True},
    "stages, recomputed": STAGES | {"recomputation": True},
    "sharded": {"replicated_optimizer_state_sharding": True, "optimizer": "adam"},
    "offloaded": {"optimizer_state_offloading": True, "optimizer": "adam", "ema_decay": 0.99},
    "16.16": {"precision": "16.16", "loss_scaling": 128.0},
    "float16": {"half_type": "float16", "loss_scaling": "dynamic"},
    "shared norms": {"dbn_replica_group_size": 2},
    "checked": {"fp_exceptions": True, "tensorboard": True, "histograms": True},
    "depthwise": {"model_name": "efficientnet_cifar", "image_size": 32, "ema_decay": 0.99},
    "augmented": {"train_augmentation": "flip-crop", "mixup_alpha": 0.2, "cutmix_alpha": 1.0, "random_erasing": 0.2},
    "muon": {"optimizer": "muon", "lookahead": 5},
}
TARGETS = ("v5e-4", "v6e-4", "h100x4", "mi300x4")
# Each case for one target always, and for all of them at night.
SAMPLE = [(case, TARGETS[number % len(TARGETS)]) for number, case in enumerate(CASES)]
REST = [(case, name) for case in CASES for name in TARGETS if (case, name) not in SAMPLE]
PACKAGES = {"cuda": "jax-cuda13-pjrt", "rocm": "jax-rocm7-pjrt", "tpu": "libtpu"}
COMPILED = [("whole", name) for name in ("v5e-4", "v6e-8", "v4-8", "h100x4", "2xh200x4", "mi300x4")]
COMPILED += [(case, name) for case in CASES if case != "whole" for name in ("v5e-4", "h100x4", "mi300x4")]


def designed(case, count):
    options = BASE | CASES[case]
    return design_run(config_from(options | ({"num_replicas": count} if case == "whole" else {})))


def lowered_texts(case, name):
    target = read_target(name)
    with made_for(target):
        for each in lower_ahead(designed(case, 4), jax.devices()[:4]):
            steps = each.lowered
            programs = steps.programs.values() if isinstance(steps, LoweredSteps) else [steps]
            yield from (program.as_text() for program in programs)


def check_lowered(case, name):
    texts = list(lowered_texts(case, name))
    assert len(texts) >= 2, "training and validation"
    calls = {call for text in texts for call in re.findall(r"custom_call @([\w.$]+)", text)}
    # What a device has no code for: our kernels for CPUs, and kernels for NVIDIA's GPUs elsewhere.
    assert not {call for call in calls if call.startswith(("headrace", "xla_ffi_python", "xla_python"))}
    triton = {call for call in calls if "triton" in call.lower()}
    assert not triton or name.startswith("h100")


@pytest.mark.parametrize(("case", "name"), SAMPLE)
def test_a_case_is_lowered_for_a_target(case, name):
    check_lowered(case, name)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), REST)
def test_a_case_is_lowered_for_all_targets(case, name):
    check_lowered(case, name)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("case", "name"), COMPILED)
def test_a_case_is_compiled_for_a_target(case, name):
    target = read_target(name)
    package = PACKAGES[target.lowering]
    try:
        version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    with made_for(target):
        programs, stages = compile_ahead(designed(case, target.count), devices_of(target))
    assert {each.purpose.split()[0] for each in programs} == {"training", "validation"}
    exchanged = {one.kind for each in programs if each.purpose.startswith("training") for one in each.collectives}
    assert exchanged & {"all-reduce", "reduce-scatter"}, "gradients are added up"
    assert all(each.total_bytes < 1 << 30 for each in programs)
    assert all(held < 1 << 30 for each in stages for held in each.device_bytes)
