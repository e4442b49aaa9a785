"""A short run by a command line of the reference's first application: profile, averages, what has no effect."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.checkpoint.store import list_checkpoints
from headrace.cli.main import main

LINE = """train --application tf1 --dataset generated --num-samples 64 --image-size 32 --num-classes 10
    --model toy_model
    --batch-size 8 --epochs 4 --warmup-epochs 0 --learning-rate-schedule 0.5 --base-learning-rate -8
    --logs-per-epoch 1 --precision 32.32 --loss-scaling 1 --label-smoothing 0.1 --batches-per-step 4
    --gc-profile --weight-avg-N 1 --weight-avg-exp 0.75 --standard-imagenet --select-ipus AUTO
    --internal-exchange-optimisation-target memory --enable-half-partials --no-validation --progress plain"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("first")
    assert main([*LINE.split(), "--log-dir", str(place), "--run-name", "one"]) == 0
    return place / "one"


def notes(run: Path) -> list[str]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["text"] for record in records if "text" in record]


def test_the_configuration_says_its_application(run):
    saved = json.loads((run / "config.json").read_text())
    assert saved["source"]["application"]["value"] == "tf1"
    assert saved["values"]["lr_schedule_params"] == {"drops": [0.5], "factor": 0.1, "initial_learning_rate": 2.0**-8}
    assert saved["origins"]["lr_schedule_params"]["where"].startswith("from base_learning_rate -8")


def test_the_rate_drops_once_behind_the_middle(run):
    """2^-8 x 8 images; 32 steps in all: steps 0 to 16 have the whole rate, those behind a tenth."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [record["learning_rate"] for record in records if record["kind"] == "train"]
    assert rates == pytest.approx([2.0**-5, 2.0**-5, 2.0**-5 / 10, 2.0**-5 / 10])


def test_calls_are_as_long_as_asked_for(run):
    plan = json.loads((run / "plan.json").read_text())
    assert json.dumps(plan).count('"steps_per_call": 4') == 1


def test_what_has_no_effect_is_recorded_once(run):
    (theirs,) = [text for text in notes(run) if text.startswith("without effect: ")]
    assert "standard_imagenet (" in theirs
    (ours,) = [text for text in notes(run) if text.startswith("without effect on cpu: ")]
    assert "half_partials (" in ours
    assert any("CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED" in text for text in notes(run))


def test_the_first_calls_are_profiled(run):
    assert list((run / "profile").rglob("*.xplane.pb"))
    assert any("where the time went" in text or text.startswith("profile: nothing") for text in notes(run))


def test_the_averages_are_those_of_numpy(run):
    """--weight-avg-N 1: the checkpoints of epochs 3 and 4. --weight-avg-exp d: V = first; V = d V + (1 - d) next."""
    weights = [load_file(next(path.glob("*.safetensors"))) for path in list_checkpoints(run / "checkpoints")]
    assert len(weights) == 4
    mean = load_file(next((run / "averages" / "weight_avg_N_1").glob("*.safetensors")))
    exponential = load_file(next((run / "averages" / "weight_avg_exp_0.75").glob("*.safetensors")))
    name = next(name for name in mean if name.endswith("kernel"))
    values = [np.asarray(arrays[name], np.float64) for arrays in weights]
    np.testing.assert_allclose(mean[name], (values[2] + values[3]) / 2, rtol=1e-6)
    by_hand = values[0]
    for value in values[1:]:
        by_hand = 0.75 * by_hand + 0.25 * value
    np.testing.assert_allclose(exponential[name], by_hand, rtol=1e-6)


@pytest.mark.slow
def test_the_stages_of_shards_are_compiled_as_told_and_traced(tmp_path):
    line = """train --application tf1 --dataset cifar-10 --generated-data --model-size 8 --batch-size 4 --replicas 2
        --gradient-accumulation-count 4 --iterations 4 --shards 2 --pipeline --pipeline-splits b2/0/relu
        --pipeline-schedule Grouped --enable-recomputation --optimiser momentum --precision 32.32 --gc-profile
        --internal-exchange-optimisation-target memory --available-memory-proportion 0.1 0.1 0.2 0.2 --no-validation"""
    assert main([*line.split(), "--log-dir", str(tmp_path), "--run-name", "two", "--progress", "plain"]) == 0
    run = tmp_path / "two"
    assert any("CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED" in text for text in notes(run))
    assert any("available_memory_proportion (" in text for text in notes(run))
    assert (run / "schedule.svg").is_file()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if "learning_rate" in record][-1]
    assert last["step"] == 4
    assert last["learning_rate"] == pytest.approx(2.0**-6 * 32 / 10)  # behind the drop at half of the run
