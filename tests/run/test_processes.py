"""Several real processes as one run: the same weights, numbers and files as one process with as many replicas."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint.store import list_checkpoints, load
from headrace.telemetry.files import read_records
from headrace.telemetry.record import TrainRecord, ValidationRecord
from tests.run.process import run, run_job

# 70 training samples in batches of 8: the epoch drops six, the 14 of the validation need two samples of padding.
TINY: dict[str, Any] = {
    "config": "none",
    "dataset": "generated",
    "image_size": 8,
    "num_classes": 4,
    "num_samples": 70,
    "model_name": "cifar_resnet8",
    "micro_batch_size": 2,
    "num_replicas": 4,
    "num_epochs": 2,
    "platform": "cpu",
    "progress": "plain",
}


def words(folder: Path, **options: Any) -> list[str]:
    """Return the command line of a small run below a folder."""
    line = ["train"]
    for name, value in (TINY | {"log_dir": folder, "run_name": "run"} | options).items():
        option = f"--{name.replace('_', '-')}"
        line += [option] if value is True else [option, *(map(str, value) if isinstance(value, list) else [str(value)])]
    return line


def train(folder: Path, num_processes: int, **options: Any) -> Path:
    """Train a small run in so many processes; return its directory."""
    folder.mkdir(parents=True)
    line = words(folder, **options)
    codes = run_job(num_processes, line, folder / "out") if num_processes > 1 else [run(line, folder / "out.txt")]
    assert codes == [0] * num_processes, [path.read_text() for path in folder.glob("out*/*")]
    return folder / "run"


def weights(directory: Path, step: int = -1) -> dict[str, np.ndarray]:
    """Return the tensors of a run's newest checkpoint."""
    return load(list_checkpoints(directory / "checkpoints")[step])[0]


def assert_same_run(one: Path, many: Path) -> None:
    """Assert that two runs came to the same weights and the same numbers, to float32 rounding."""
    expected, found = weights(one), weights(many)
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        scale = np.abs(array.astype(np.float64)).max(initial=1e-3)
        np.testing.assert_allclose(found[name].astype(np.float64) / scale, array / scale, atol=2e-5, err_msg=name)
    before, after = (
        [record for record in read_records(run_dir) if isinstance(record, TrainRecord | ValidationRecord)]
        for run_dir in (one, many)
    )
    assert [(type(record), record.step) for record in before] == [(type(record), record.step) for record in after]
    for left, right in zip(before, after, strict=True):
        assert right.loss == pytest.approx(left.loss, rel=1e-5)
        assert right.top5 == left.top5
        if isinstance(left, ValidationRecord) and isinstance(right, ValidationRecord):
            assert (right.top1, right.num_samples, right.weights) == (left.top1, left.num_samples, left.weights)


def test_two_processes_give_the_weights_numbers_and_files_of_one(tmp_path: Path) -> None:
    one, two = train(tmp_path / "one", 1), train(tmp_path / "two", 2)
    assert_same_run(one, two)
    names = {path.relative_to(one).as_posix() for path in one.rglob("*")}
    assert {path.relative_to(two).as_posix() for path in two.rglob("*")} == names
    records = [record for record in read_records(two) if isinstance(record, ValidationRecord)]
    assert [record.num_samples for record in records] == [14, 14]
    plan = json.loads((two / "plan.json").read_text())
    assert (plan["num_processes"], plan["replicas_per_process"], plan["devices_per_process"]) == (2, 2, 2)
    said = (tmp_path / "two/out/1.txt").read_text()
    assert [line for line in said.splitlines() if not line.startswith("[Gloo]")] == []
