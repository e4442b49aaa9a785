"""What a run resumes from: where its checkpoints are, what is refused, and which counters are restored."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint.store import list_checkpoints
from headrace.config.load import resolve
from headrace.core.errors import CheckpointError, ConfigError
from headrace.run.directory import layout, make_directory, refuse_taken, sweep
from headrace.run.fit import resume, train, train_or_resume
from headrace.run.validation import validate
from headrace.telemetry.metric_totals import Unlogged
from headrace.telemetry.records import RunEnd, TrainRecord, ValidationRecord, read_records

from .conftest import QUICK


def records(run_dir: Path, kind: type) -> list:
    return [record for record in read_records(run_dir) if isinstance(record, kind)]


def names_in(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def test_checkpoints_elsewhere_are_found_from_anywhere(quick, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = train(quick(num_epochs=1, checkpoint_dir="apart", log_dir="runs", run_name="a"))
    run_dir, apart = tmp_path / result.directory, tmp_path / "apart"
    assert names_in(apart) == ["step_00000020"]
    assert not (run_dir / "checkpoints").exists()
    with pytest.raises(ConfigError, match="already holds checkpoints"):
        train(quick(checkpoint_dir="apart", log_dir="runs", run_name="b"))
    assert not (tmp_path / "runs" / "b").exists()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert resume(run_dir, {"num_epochs": 2}).step == 40
    assert [found.step for found in validate(run_dir)] == [20, 40]
    by_folder = list(validate(apart, which="best", report_dir=tmp_path / "reports"))
    assert [found.checkpoint.name for found in by_folder] == [
        json.loads((apart / "best.json").read_text())["best"][0]["name"]
    ]
    assert by_folder[0].report_file == tmp_path / "reports" / f"{by_folder[0].checkpoint.name}.json"
    assert next(iter(validate(apart))).report_file is None, "no run is near it, and nobody said where"
    # another place from now on (a full disk): it goes on from the old one
    assert resume(run_dir, {"num_epochs": 3, "checkpoint_dir": str(tmp_path / "third")}).step == 60
    assert names_in(tmp_path / "third") == ["step_00000060"]


def test_cleaning_up_takes_nothing_else_along(quick, tmp_path):
    (tmp_path / "apart").mkdir()
    (tmp_path / "apart" / "mine.txt").write_text("keep me")
    result = train(quick(num_epochs=1, checkpoint_dir=str(tmp_path / "apart"), clean_dir=True, validation=False))
    assert [path.name for path in (tmp_path / "apart").iterdir()] == ["mine.txt"]
    before = (result.directory / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="has finished, and none of its checkpoints can be used"):
        resume(result.directory)
    assert (result.directory / "metrics.jsonl").read_bytes() == before


def test_records_are_not_given_up_for_lost_checkpoints(quick):
    result = train(quick(num_epochs=1, validation=False))
    lines = (result.directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (result.directory / "metrics.jsonl").write_text("".join(line for line in lines if '"run_end"' not in line))
    shutil.rmtree(result.directory / "checkpoints")
    with pytest.raises(CheckpointError, match=r"has saved checkpoints, but .* holds no good one"):
        resume(result.directory)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        list(validate(result.directory))


def test_a_run_that_never_saved_begins_anew(quick):
    compiled = train(quick(num_epochs=1, compile_only=True, validation=False))
    again = resume(compiled.directory, {"compile_only": False})
    assert (again.outcome, again.step) == ("finished", 20)
    assert "the run starts from the beginning" in (again.directory / "log.txt").read_text()


def test_only_saved_steps_are_named_and_ranked(quick, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/lib/python3/headrace/__main__.py", "train", "--seed", "1"])
    result = train(quick(num_epochs=2, validations_per_epoch=2, ckpts_per_epoch=1, keep_best=5))
    named = {record.step: record.checkpoint for record in records(result.directory, ValidationRecord)}
    assert named == {10: None, 20: "step_00000020", 30: None, 40: "step_00000040"}
    best = json.loads((result.directory / "checkpoints" / "best.json").read_text())["best"]
    assert {entry["name"] for entry in best} == {"step_00000020", "step_00000040"}
    (end,) = records(result.directory, RunEnd)
    assert end.best_top1 == max(record.top1 for record in records(result.directory, ValidationRecord))
    monkeypatch.setattr("sys.argv", ["/bin/headrace", "resume", "RUN"])
    again = resume(result.directory, {"num_epochs": 3})
    assert again.step == 60
    command = json.loads((result.directory / "config.json").read_text())["command"]
    assert command == ["headrace", "train", "--seed", "1"], "the command that started the run"


def test_steps_left_out_do_not_spoil_the_mean(quick):
    hot = {
        "lr_schedule_params": {"initial_learning_rate": 1e30},
        "nan_policy": "skip",
        "ema_decay": 0,
        "validation": False,
    }
    result = train(quick(num_epochs=2, **hot))
    assert all(np.isnan(record.loss) or record.loss >= 0 for record in records(result.directory, TrainRecord))
    assert np.isfinite(records(result.directory, TrainRecord)[0].loss), "the first step was good"


def test_sums_may_be_taken_up_again_at_any_call():
    rng = np.random.default_rng(1)
    calls = [
        {key: rng.random(7).astype(np.float32) for key in ("loss", "top1", "top5", "count")}
        | {"skipped": np.zeros(7, np.float32)}
        for _ in range(5)
    ]
    calls[3]["loss"][2], calls[3]["skipped"][2] = np.nan, 1
    whole = Unlogged()
    for call in calls:
        whole = whole.add(call, 0.5)
    cut = Unlogged()
    for call in calls:
        cut = Unlogged.from_dict(json.loads(json.dumps(cut.to_dict()))).add(call, 0.5)
    assert cut == whole
    good = [np.concatenate([call[key] for call in calls])[np.arange(35) != 23] for key in ("loss", "count")]
    np.testing.assert_allclose(whole.mean(whole.loss), good[0].sum() / good[1].sum(), rtol=1e-6)
    assert (whole.skipped, whole.wait_seconds) == (1, 2.5)
    assert np.isnan(Unlogged().mean(0.0))


def test_directories_of_new_runs(quick, tmp_path):
    config = quick().config
    assert make_directory(config, "toy").path != make_directory(config, "toy").path, (
        "two runs that begin in the same second"
    )
    named = quick(run_name="mine").config
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / ".lock").touch()
    refuse_taken(named)  # a process was killed right at its start there
    (tmp_path / "runs" / "mine" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="already holds files"):
        refuse_taken(named)
    (tmp_path / "file").touch()
    for option in ("log_dir", "checkpoint_dir"):
        with pytest.raises(ConfigError, match=rf"file is not a directory.*--{option.replace('_', '-')}"):
            make_directory(quick(**{option: str(tmp_path / "file")}).config, "toy")


def test_paths_that_are_no_runs(quick, tmp_path):
    with pytest.raises(CheckpointError, match=r"There is no .*nowhere"):
        resume(tmp_path / "nowhere")
    result = train(quick(num_epochs=1, run_name="mine", validation=False))
    with pytest.raises(CheckpointError, match=r"is a checkpoint, not a run directory.*runs/mine"):
        resume(result.directory / "checkpoints" / "step_00000020")
    with pytest.raises(CheckpointError, match=r"There is no .*mime\. Runs in .*: mine"):
        list(validate(result.directory.with_name("mime")))


def test_validate_names_what_it_passes_over(quick):
    result = train(quick(num_epochs=2))
    first, second = list_checkpoints(result.directory / "checkpoints")
    (second / "manifest.json").unlink()
    found = list(validate(result.directory, which="last"))
    assert [(item.step, bool(item.reports)) for item in found] == [(40, False), (20, True)]
    assert "manifest.json is missing" in found[0].problem
    (first / "state.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="None of the 2 checkpoints"):
        list(validate(result.directory))
    with pytest.raises(CheckpointError, match="truncated"):
        list(validate(first))


def test_a_finished_run_stays_as_it_is(quick):
    directory = train(quick(num_epochs=2)).directory
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != ".lock"}
    again = resume(directory)
    assert (again.outcome, again.step, set(again.validation)) == ("finished", 40, {"raw", "ema"})
    assert "changed nothing" in again.reason
    with pytest.raises(
        CheckpointError, match=r"trained for 2 epochs \(40 steps\), more than the 1 asked for"
    ) as caught:
        resume(directory, {"num_epochs": 1})
    assert "--num-epochs 3" in caught.value.remedy
    assert before == {
        path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != ".lock"
    }


def test_a_run_named_by_output_is_resumed_by_the_same_command(tmp_path):
    """It was refused: the saved log_dir counted as given beside it."""
    given = {"output": str(tmp_path / "here"), "resume": "auto", "progress": "none"}
    asked = resolve(QUICK | given | {"num_epochs": 2, "validation": False}, "none", environ={})
    assert train_or_resume(asked, given).step == 40
    metrics = tmp_path / "here" / "metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.read_text().splitlines(True) if '"run_end"' not in line))
    shutil.rmtree(tmp_path / "here" / "checkpoints" / "step_00000040")
    again = train_or_resume(asked, given)
    assert (again.outcome, again.step, again.directory) == ("finished", 40, tmp_path / "here")


def test_a_resume_removes_what_a_killed_process_was_deleting(quick):
    resolved = quick(num_epochs=1, weight_updates_per_epoch=4)
    directory = layout(train(resolved).directory, resolved.config)
    kept = sorted(path.name for path in directory.checkpoints.iterdir())
    (directory.checkpoints / ".tmp-deleted-step_00000002").mkdir()
    sweep(directory)
    assert sorted(path.name for path in directory.checkpoints.iterdir()) == kept
