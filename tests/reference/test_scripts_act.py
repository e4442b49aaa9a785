"""The documents' scripts, one after the other on one run: train, go on, validate, average; what each leaves behind."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.checkpoint.store import list_checkpoints
from headrace.cli.main import run_script
from headrace.telemetry.records import RunStart, TrainRecord, ValidationRecord, read_records

SMALL = "--dataset generated --num-samples 40 --image-size 32 --num-classes 10"
TRAINED = f"--application tf1 --model toy_model {SMALL} --batch-size 10 --epochs 3 --log-freq 4 --precision 32.32"
HERE = "--progress none --platform cpu"


def typed(script: str, words: str) -> None:
    assert run_script(script, words.split()) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what train.py leaves of four steps in each of three epochs, validated after each."""
    place = tmp_path_factory.mktemp("scripts") / "one"
    typed("train", f"{TRAINED} {HERE} --output {place}")
    return place


def steps_of(run: Path, kind: type) -> list[int]:
    return [record.step for record in read_records(run) if isinstance(record, kind)]


def test_train_trains_logs_saves_and_validates(run):
    assert steps_of(run, TrainRecord)[-1] == 12
    assert sorted(set(steps_of(run, ValidationRecord))) == [4, 8, 12]
    assert [path.name for path in list_checkpoints(run / "checkpoints")][-1] == "step_00000012"


def test_restore_goes_on_to_the_same_weights(run, tmp_path):
    again = shutil.copytree(run, tmp_path / "again")
    last = list_checkpoints(again / "checkpoints")[-1]
    expected = load_file(next(last.glob("*.safetensors")))
    shutil.rmtree(last)
    typed("restore", f"--restore-path {again} {HERE}")
    found = load_file(next(list_checkpoints(again / "checkpoints")[-1].glob("*.safetensors")))
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(values, found[name])
    assert steps_of(again, RunStart) == [0, 8]


def test_more_iterations_go_on_as_if_they_had_been_asked_for_at_first(tmp_path):
    """With a rate that does not depend on the length of the run, beyond one pass over the images."""
    line = f"--application tf1 --model toy_model {SMALL} --batch-size 10 --log-freq 2 --precision 32.32 --no-validation"
    line += f" --lr-schedule const --warmup-epochs 0 --seed 3 {HERE}"
    typed("train", f"{line} --iterations 9 --output {tmp_path}/whole")
    typed("train", f"{line} --iterations 6 --output {tmp_path}/parts")
    typed("restore", f"{line} --iterations 9 --restore-path {tmp_path}/parts")
    whole, parts = (
        load_file(next(list_checkpoints(tmp_path / name / "checkpoints")[-1].glob("*.safetensors")))
        for name in ("whole", "parts")
    )
    for name, values in whole.items():
        np.testing.assert_array_equal(values, parts[name], err_msg=name)


def test_validation_gives_the_checkpoint_the_loss_that_it_had_in_training(run, capsys):
    typed("validation", f"{TRAINED} --restore-path {run} {HERE} --last")
    printed = capsys.readouterr().out
    last = [record for record in read_records(run) if isinstance(record, ValidationRecord)][-1]
    assert f"{last.loss:.4f}" in printed or f"{last.loss:.3f}" in printed, printed


def test_weight_avg_writes_the_mean_of_the_checkpoints(run):
    typed("weight_avg", f"--restore-path {run} -N 3 {HERE}")
    (mean,) = (run / "averages").glob("*/*.safetensors")
    found = load_file(mean)
    weights = [load_file(next(path.glob("*.safetensors"))) for path in list_checkpoints(run / "checkpoints")]
    name = next(name for name in found if name.endswith("kernel"))
    np.testing.assert_allclose(found[name], np.mean([each[name] for each in weights], 0), rtol=1e-6)


@pytest.mark.slow
def test_one_device_stages_and_inference_of_document_004(tmp_path, capsys):
    """A thinner EfficientNet-B0: its blocks, splits and scripts are the document's."""
    thin = f"--generated-data --width-coefficient 0.1 --depth-coefficient 0.3 {HERE} --dry-run-steps 1"
    batch = "--micro-batch-size 4 --gradient-accumulation-count 4 --pipeline-schedule Sequential"
    typed("efficientnet_CIFAR10_train_gpu", f"{thin} --output {tmp_path}/runs/gpu --micro-batch-size 4")
    typed("efficientnet_CIFAR10_train", f"{thin} {batch} --output {tmp_path}/runs/ipu")
    stages = {}
    for name in ("gpu", "ipu"):
        saved = json.loads((tmp_path / "runs" / name / "config.json").read_text())["values"]
        assert (saved["model_name"], saved["dataset"]) == ("efficientnet_b0", "cifar10")
        plan = json.loads((tmp_path / "runs" / name / "plan.json").read_text())
        stages[name] = len(plan["pipeline"]["stages"]) if plan["pipeline"] else 1, plan["num_devices"]
        assert steps_of(tmp_path / "runs" / name, TrainRecord) == [1]
    assert stages == {"gpu": (1, 1), "ipu": (4, 4)}
    capsys.readouterr()
    typed("efficientnet_CIFAR10_inference", f"--log-dir {tmp_path}/runs {HERE}")
    printed = capsys.readouterr().out
    assert re.search(r"^ +1 +\d\.\d+ +raw ", printed, re.MULTILINE), "the newest of the two, which is the pipeline"
