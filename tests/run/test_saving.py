"""Checkpoints of runs that nobody told how often to save: by time, the best and the last for certain."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from headrace.checkpoint.store import list_checkpoints, step_of, verify
from headrace.run.fit import resume, train
from headrace.telemetry.records import CheckpointRecord, RunEnd, read_records
from tests.job.test_control_join import finish

from .conftest import assert_same_bits, final_state
from .test_faults import start, train_words


def best_of(run: Path) -> list[dict]:
    return json.loads((run / "checkpoints" / "best.json").read_text())["best"]


def saved_steps(run: Path) -> list[int]:
    return [record.step for record in read_records(run) if isinstance(record, CheckpointRecord)]


def end_of(run: Path) -> RunEnd:
    return [record for record in read_records(run) if isinstance(record, RunEnd)][-1]


@pytest.fixture
def no_time_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writing use up its share of the time with the first checkpoint."""
    monkeypatch.setattr("headrace.checkpoint.saver._FREE_SECONDS", 0.0)
    monkeypatch.setattr("headrace.checkpoint.saver._SHARE", 0.0)


def test_the_best_and_the_last_are_the_same_whatever_is_passed_over(quick, no_time_to_write) -> None:
    whole = train(quick(num_epochs=6, ckpts_per_epoch=1, run_name="whole")).directory
    assert saved_steps(whole) == [20, 40, 60, 80, 100, 120]
    assert end_of(whole).saving["passed_over"] == 0
    few = train(quick(num_epochs=6, run_name="few")).directory
    assert_same_bits(final_state(few), final_state(whole))
    assert best_of(few) == best_of(whole)
    assert all(verify(few / "checkpoints" / entry["name"]) == [] for entry in best_of(few))
    best = int(best_of(few)[0]["name"].removeprefix("step_"))
    assert saved_steps(few) == sorted({20, best, 120})
    saving = end_of(few).saving
    assert (saving["written"], saving["passed_over"]) == (len({20, best, 120}), 6 - len({20, best, 120}))
    assert f"{6 - len({20, best, 120})} passed over; training waited" in (few / "log.txt").read_text()


def test_short_runs_save_as_often_as_they_log(quick) -> None:
    run = train(quick(num_epochs=3, logs_per_epoch="1/2", validation=False)).directory
    assert saved_steps(run) == [40, 60]


def test_minutes_after_the_last_one_a_call_ends_with_a_checkpoint(quick, no_time_to_write, monkeypatch) -> None:
    """Any call of the run is then one to resume from, with the same bits."""
    options = {"num_epochs": 2, "call_seconds": 1e-6, "max_ckpts_to_keep": 99}
    whole = train(quick(run_name="whole", **options)).directory
    monkeypatch.setattr("headrace.plan.plan.CHECKPOINT_SECONDS", 1e-3)
    often = train(quick(run_name="often", **options)).directory
    between = [step for step in saved_steps(often) if step % 20]
    assert len(between) > 1
    for path in list_checkpoints(often / "checkpoints"):
        if (step_of(path) or 0) > between[1]:
            shutil.rmtree(path)
    again = resume(often)
    assert (again.outcome, again.step) == ("finished", 40)
    assert f"resume from step {between[1]} " in (often / "log.txt").read_text()
    assert_same_bits(final_state(often), final_state(whole))
    assert best_of(often) == best_of(whole)


def test_what_is_averaged_was_saved_at_every_epoch(quick, no_time_to_write) -> None:
    run = train(quick(num_epochs=4, validation=False, average_last_epochs="2")).directory
    assert saved_steps(run) == [20, 40, 60, 80]


def test_never_by_time_where_somebody_says_how_often(quick, monkeypatch) -> None:
    monkeypatch.setattr("headrace.plan.plan.CHECKPOINT_SECONDS", 1e-3)
    run = train(quick(num_epochs=2, call_seconds=1e-6, ckpts_per_epoch=0)).directory
    assert saved_steps(run) == [40]
    none = train(quick(num_epochs=1, call_seconds=1e-6, checkpoints=False)).directory
    assert saved_steps(none) == []
    assert end_of(none).saving == {}


BY_TIME = """
import sys
import headrace.checkpoint.saver as saver, headrace.plan.plan as plan
saver._FREE_SECONDS = saver._SHARE = 0.0
plan.CHECKPOINT_SECONDS = 1e-3
from headrace.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_processes_of_a_job_copy_the_state_together(tmp_path: Path) -> None:
    """Process 0 decides by its clock, and a cut state is gathered from all: they would hang or fail otherwise."""
    given = train_words("timed", "--num-epochs", "3", "--call-seconds", "0.000001")
    place = given.index("--ckpts-per-epoch")
    words = given[:place] + given[place + 2 :]
    script = tmp_path / "timed.sh"
    script.write_text(f"exec {shlex.quote(sys.executable)} -c {shlex.quote(BY_TIME)} {shlex.join(words)}\n")
    code, printed = finish(start(["bash", str(script)], tmp_path, ["--num-instances", "2"]))
    assert code == 0, printed
    run = tmp_path / "runs" / "timed"
    assert any(step % 6 for step in saved_steps(run)), printed
    code, printed = finish(start(train_words("whole", "--num-epochs", "3"), tmp_path, ["--num-instances", "2"]))
    assert code == 0, printed
    assert_same_bits(final_state(run), final_state(tmp_path / "runs" / "whole"))
