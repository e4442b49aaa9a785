"""One run on 16, 64 and 128 devices, as the reference states it; and trials."""

import json

import pytest

from headrace.cli.plan import main
from headrace.config.load import config_from, resolve
from headrace.core.errors import ConfigError
from headrace.data.sets.synthetic import Synthetic, generated_source, synthetic_source
from headrace.run.design import design_run, scale_to_devices


def rows_of(num_devices, **options):
    resolved = resolve(options, "mk2_resnet50_16k_bn_pipeline", environ={})
    changed, rows = scale_to_devices(resolved, num_devices)
    return design_run(changed.config, absent_ok=True).plan, {row.num_devices: row for row in rows}


@pytest.mark.reference
def test_from_16_to_64_to_128_devices():
    # micro batch 16 in 4 stages; 4, 16 and 32 replicas accumulate 256, 64 and 32 times: 16,384 images
    plan, rows = rows_of(128)
    assert {n: (row.num_replicas, row.gradient_accumulation_count) for n, row in rows.items()} == {
        16: (4, 256),
        32: (8, 128),
        64: (16, 64),
        128: (32, 32),
    }
    assert {row.global_batch_size for row in rows.values()} == {16 * 4 * 256}
    assert (plan.num_devices, plan.batch.num_replicas, plan.batch.global_batch_size) == (128, 32, 16384)


@pytest.mark.reference
def test_the_idle_share_is_that_of_a_pipeline_filled_and_emptied_once_per_step():
    _, rows = rows_of(128)
    for row in rows.values():  # S - 1 of M + S - 1 slots
        assert row.idle == pytest.approx(3 / (row.gradient_accumulation_count + 3))


@pytest.mark.reference
def test_fewer_devices_accumulate_more():
    _, rows = rows_of(4)
    assert {n: row.gradient_accumulation_count for n, row in rows.items()} == {4: 1024, 8: 512, 16: 256}


@pytest.mark.reference
@pytest.mark.parametrize(("num_devices", "near"), [(0, "4"), (2, "4"), (30, "28 or 32")])
def test_devices_that_replicas_do_not_fill_are_refused(num_devices, near):
    with pytest.raises(ConfigError, match=f"--num-devices {num_devices} with replicas of 4.*Give {near}, or other"):
        rows_of(num_devices)


@pytest.mark.reference
def test_the_command_prints_the_rows_and_the_options(capsys):
    assert main(["--config", "mk2_resnet50_16k_bn_pipeline", "--num-devices", "64"]) == 0
    printed = capsys.readouterr()
    assert "     64              16 x 4           16            64        16,384" in printed.out
    assert "on 64 devices: --num-replicas 16 --gradient-accumulation-count 64\n" in printed.out
    assert "steps per epoch            78  of 1,281,167 images" in printed.out  # 1,281,167 // 16,384


def test_a_global_batch_that_cannot_be_kept_is_told(capsys):
    assert main(["--micro-batch-size", "64", "--num-devices", "4", "--json"]) == 0
    scaling = json.loads(capsys.readouterr().out)["scaling"]
    assert [row["global_batch_size"] for row in scaling] == [64, 128, 256]
    assert main(["--micro-batch-size", "64", "--num-devices", "4"]) == 0
    assert "the global batch cannot be kept" in capsys.readouterr().out


def test_a_trial_keeps_everything_but_the_length(tmp_path):
    options = {"dataset": "cifar10", "micro_batch_size": 8, "gradient_accumulation_count": 8, "num_epochs": 6}
    whole = design_run(config_from(options))
    trial = design_run(config_from(options | {"dry_run_steps": 3}))
    assert trial.plan.batch == whole.plan.batch
    steps = trial.plan.steps
    assert (steps.total_steps, steps.num_calls, steps.updates_per_epoch, steps.num_epochs) == (3, 1, 781, 6)
    assert (steps.log_every, steps.checkpoint_every, steps.validate_every) == (3, 3, 3)
    assert trial.plan.validation.num_samples == 3 * 8
    assert float(trial.lr_curve(2)) == float(whole.lr_curve(2))
    off = design_run(config_from(options | {"dry_run_steps": 1, "checkpoints": False, "validation": False})).plan.steps
    assert (off.checkpoint_every, off.validate_every) == (0, 0)


@pytest.mark.parametrize("make", [synthetic_source, generated_source])
def test_few_samples_are_the_first(make):
    spec = Synthetic(seed=1, split="train", image_hwc=(4, 4, 3), num_classes=7, num_distinct=20)
    whole = make(spec, 50)
    part = whole.first(6)
    assert (len(part), part.labels.tolist()) == (6, whole.labels[:6].tolist())
    index = part.labels.nonzero()[0]
    assert (part.read(index, 0) == whole.read(index, 0)).all()
    assert whole.first(60) is whole
