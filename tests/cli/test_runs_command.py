"""`headrace runs`, `headrace compare`, and the table at the end of a run, on directories whole, damaged and foreign."""

import fcntl
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.compare import compare
from headrace.cli.run_end import end_lines
from headrace.cli.runs import main as runs
from headrace.core.errors import CheckpointError, ConfigError
from headrace.report.comparison import compare_options
from headrace.report.curves import Curves
from headrace.report.run_report import comparison_page
from headrace.report.run_summary import RunSummary, data_groups, different_options, find_runs, read_summary
from headrace.run.run_result import RunResult
from headrace.telemetry.records import Record, RunEnd, RunStart, TrainRecord, ValidationRecord


def start() -> RunStart:
    return RunStart(
        step=0, time="", model="net", dataset="digits", num_epochs=4, total_steps=40, updates_per_epoch=10,
        global_batch_size=8, num_parameters=1234,
    )  # fmt: skip


def validation(epoch: float, top1: float, weights: str = "raw") -> ValidationRecord:
    return ValidationRecord(
        step=int(10 * epoch), epoch=epoch, weights=weights, loss=1, top1=top1, num_samples=100, seconds=1
    )


def trained(epoch: float, seconds: float) -> TrainRecord:
    return TrainRecord(
        step=int(10 * epoch), epoch=epoch, loss=0.5, accuracy=0.5, learning_rate=0.1, elapsed_seconds=seconds
    )


def end(outcome: str = "finished", time_to_train: float = 12.0) -> RunEnd:
    return RunEnd(
        step=40, time="", outcome=outcome, epoch=4, time_to_train=time_to_train, images_per_second=5000,
        wall_seconds=12, seconds={"train": 9, "compile": 3, "wait": 0}, verdict="compute-bound",
    )  # fmt: skip


def make(place: Path, name: str, records: list[Record], when: float = 0, **options) -> Path:
    run = place / name
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"name": "", "values": options, "origins": {}}))
    file = run / "metrics.jsonl"
    file.write_text("".join(record.to_json() + "\n" for record in records))
    os.utime(file, (1.7e9 + when, 1.7e9 + when))
    return run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    whole = [start(), trained(1, 3), validation(1, 0.9), trained(4, 11), validation(4, 0.8), end()]
    make(tmp_path, "good", whole, when=3, seed=1, optimizer_params={"momentum": 0.9})
    make(tmp_path, "quick", [start(), validation(4, 0.7), end(time_to_train=2.0)], when=2, seed=2, optimizer_params={})
    make(tmp_path, "deep/er/trial", [start(), validation(0.1, 1.0), end()], when=1, dry_run_steps=1)
    return tmp_path


def listed(place: Path, capsys, *argv: str) -> list[dict]:
    assert runs([str(place), "--json", *argv]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_runs_are_listed_and_sorted(place, capsys):
    def names(*argv: str) -> list[str]:
        return [Path(run["run"]).name for run in listed(place, capsys, *argv)]

    assert names() == ["good", "quick", "trial"]
    assert names("--sort", "accuracy") == ["good", "quick", "trial"], "a trial is the last, whatever its accuracy"
    assert names("--sort", "time") == ["quick", "good", "trial"]
    assert runs([str(place)]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == [*("run", "top-1", "images", "epochs", "time", "img/s", "dataset", "written", "state")]
    assert rows[0].split()[:7] == ["good", "90.00", "%", "100", "4/4", "12.0", "s"]
    assert [row.split()[0] for row in rows] == ["good", "quick", "deep/er/trial"]
    assert " trial " in rows[2]
    assert "100.00 %" not in rows[2]


def on(data: str, num_images: int, top1: float, digest: str = "") -> list[Record]:
    """Return the records of a run on so many validation images of a dataset."""
    begun = replace(
        start(), dataset=data, num_train=90, num_validation=num_images, num_classes=2, dataset_digest=digest
    )
    return [begun, replace(validation(4, top1), num_samples=num_images), end()]


def test_two_images_never_rank_above_two_thousand(tmp_path, capsys):
    make(tmp_path, "tiny", on("a", 2, 1.0, "x"), when=3)
    make(tmp_path, "large", on("a", 2000, 0.95, "y"), when=2)
    make(tmp_path, "worse", on("a", 2000, 0.9, "y"), when=1)
    found = listed(tmp_path, capsys, "--sort", "accuracy")
    assert [Path(run["run"]).name for run in found] == ["large", "worse", "tiny"]
    assert [run["best_num_images"] for run in found] == [2000, 2000, 2]
    # Wilson's interval as tables have it: 2 of 2 is at least 34.2 %, 95 % of 2,000 at least 94.0 %.
    assert [round(run["best_top1_at_least"], 3) for run in found] == [0.94, 0.886, 0.342]
    assert runs([str(tmp_path), "--sort", "accuracy"]) == 0
    out = capsys.readouterr().out
    assert "95.00 %   2,000" in out
    assert "100.00 %       2" in out
    assert "different datasets" in out


def test_runs_on_different_datasets_are_said_to_be(tmp_path, capsys):
    first = make(tmp_path, "first", on("folder", 11, 0.9, "x"), dataset_path="/data/ants")
    second = make(tmp_path, "second", on("folder", 153, 0.73, "y"), dataset_path="/data/ants")
    third = make(tmp_path, "third", on("folder", 11, 0.5, "x"), dataset_path="/data/ants")
    assert compare([str(first), str(second)]) == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert (
        "warning: different datasets, whose accuracies cannot be compared: A (ants: 90 + 11 images, 2 classes)" in out
    )
    assert "validation images" in out
    assert compare([str(first), str(third)]) == 0
    assert "different datasets" not in capsys.readouterr().out
    page = comparison_page([read_summary(path) for path in (first, second)], [Curves(first), Curves(second)], {})
    assert "Different datasets, whose accuracies cannot be compared" in page
    # Of an earlier version, whose records have neither digest nor numbers: by name, place and validation images.
    old = make(tmp_path, "old", [start(), replace(validation(4, 0.9), num_samples=11), end()], dataset_path="/data/x")
    other = make(
        tmp_path, "other", [start(), replace(validation(4, 0.9), num_samples=12), end()], dataset_path="/data/x"
    )
    assert data_groups([read_summary(old), read_summary(other), read_summary(old)]) == [0, 1, 0]


def test_damaged_and_foreign_directories(place, capsys):
    before = listed(place, capsys)
    (place / "empty").mkdir()
    (place / "a file").write_text("x")
    (place / "foreign").mkdir()
    (place / "foreign" / "config.json").write_text('{"architectures": ["Bert"]}')
    (place / "cut").mkdir()
    (place / "cut" / "config.json").write_text('{"values": {"seed"')
    (place / "binary").mkdir()
    (place / "binary" / "config.json").write_bytes(b"\xff\xfe\x00")
    assert listed(place, capsys) == before, "none of these is a run"

    (place / "cut" / "plan.json").write_text("{}")
    just_made = make(place, "just made", [])
    (just_made / "metrics.jsonl").unlink()
    killed = make(place, "killed", [start(), trained(2, 5), validation(2, float("nan"))])
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "validation", "step": "many"}\n{"kind": "run_end", "st')
    pipe = make(place, "pipe", [])
    (pipe / "metrics.jsonl").unlink()
    os.mkfifo(pipe / "metrics.jsonl")
    (place / "loop").symlink_to(place)
    found = {Path(run["run"]).name: run for run in listed(place, capsys)}
    states = {name: run["state"] for name, run in found.items()}
    expected = {"cut": "unreadable", "just made": "not started", "killed": "killed", "pipe": "not started"}
    assert {name: states[name] for name in expected} == expected
    assert len(found) == 7
    assert found["killed"]["problem"] == "metrics.jsonl: 1 damaged lines"
    assert (found["killed"]["epoch"], found["killed"]["time_to_train"], found["killed"]["best_top1"]) == (2, 5, None)
    assert runs([str(place)]) == 0
    assert "cut: config.json: " in capsys.readouterr().out
    assert compare([str(place / "killed"), str(place / "just made")]) == 0
    with pytest.raises(CheckpointError, match="cannot be read"):
        compare([str(place / "cut"), str(place / "good")])


def test_a_run_that_is_locked_is_running(place):
    run = make(place, "now", [start(), trained(1, 3)])
    assert read_summary(run).state == "killed"
    with (run / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert read_summary(run).state == "running"
    assert read_summary(run).state == "killed"


def test_a_resumed_run_is_judged_by_its_last_process(place):
    run = make(place, "twice", [start(), end("interrupted"), start(), end("finished")])
    assert read_summary(run).state == "finished"


def test_a_thousand_runs_are_listed_quickly(tmp_path, capsys):
    records = [start(), *(trained(epoch / 10, epoch) for epoch in range(100)), validation(4, 0.5), end()]
    first = make(tmp_path, "run0", records)
    for number in range(1, 1000):
        (tmp_path / f"run{number}").mkdir()
        for file in first.iterdir():
            (tmp_path / f"run{number}" / file.name).write_bytes(file.read_bytes())
    begin = time.process_time()
    assert len(listed(tmp_path, capsys)) == 1000
    assert time.process_time() - begin < 5


def test_wrong_places(tmp_path, capsys):
    assert runs([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"
    with pytest.raises(ConfigError, match="There is no directory"):
        runs([str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError, match="number of runs is 1"):
        compare([str(tmp_path)])


def test_a_comparison_has_what_differs(place, capsys):
    assert list(find_runs(place / "good")) == [place / "good"]
    summaries = [read_summary(place / name) for name in ("good", "quick")]
    momentum = {"optimizer_params.momentum": [0.9, None], "momentum": [0.9, None]}
    assert different_options(summaries) == {"seed": [1, 2]} | momentum
    assert compare_options(summaries) == {"seed": [1, 2], "momentum": [0.9, None]}, "one row says it"
    older = make(place, "older", [], optimizer_params={"momentum": 0.9})  # saved before there was an option seed
    assert different_options([summaries[0], read_summary(older)]) == {"seed": [1, 0]}
    assert compare([str(place / "good"), str(place / "quick")]) == 0
    out = capsys.readouterr().out
    rows = {" ".join(line.split()) for line in out.splitlines()}
    assert {"seed 1 2", "momentum 0.9 unset", "time to train 12.0 s 2.0 s"} <= rows
    assert "best top-1 90.00 % at epoch 1 70.00 % at epoch 4" in rows
    assert compare([str(place / "good")] * 2) == 0
    assert "no option differs" in capsys.readouterr().out


def test_a_list_that_is_newer_than_a_run_is_its_default(tmp_path):
    runs = [read_summary(make(tmp_path, "new", [], freeze=[])), read_summary(make(tmp_path, "old", []))]
    assert different_options(runs) == {}


def test_a_rate_is_one_row_of_a_comparison(tmp_path):
    def run(name: str, rate: float, **params: object) -> RunSummary:
        written = {"absolute_learning_rate": rate, **params}
        return read_summary(make(tmp_path, name, [], learning_rate=rate, lr_schedule_params=written, log_dir=name))

    assert compare_options([run("a", 0.1), run("b", 0.2)]) == {"learning_rate": [0.1, 0.2]}
    found = compare_options([run("c", 0.1, cycles=1), run("d", 0.2, cycles=2)])
    assert found == {"learning_rate": [0.1, 0.2], "lr_schedule_params.cycles": [1, 2]}
    # not given by its short form: it is the same fact
    other = read_summary(make(tmp_path, "e", [], lr_schedule_params={"absolute_learning_rate": 0.3}))
    found = compare_options([run("f", 0.1), other])
    assert found == {"learning_rate": [0.1, 0.3]}


def test_a_comparison_has_one_kind_of_weights(tmp_path, capsys):
    records = [start(), validation(1, 0.5), validation(1, 0.9, "ema"), validation(4, 0.6), validation(4, 0.8, "ema")]
    make(tmp_path, "averaged", [*records, end()])
    make(tmp_path, "raw", [start(), validation(1, 0.7), validation(1, 0.2, "ema"), end()])
    assert compare([str(tmp_path / "averaged"), str(tmp_path / "raw")]) == 0
    rows = capsys.readouterr().out.splitlines()
    best, last = (" ".join(next(row for row in rows if name in row).split()) for name in ("best top-1", "last valid"))
    assert best == "best top-1 90.00 % (ema) at epoch 1 70.00 % at epoch 1"
    assert last == "last validation 80.00 % (ema), loss 1.0000 70.00 %, loss 1.0000"


LONG = "cifar_resnet8-a-name-of-many-words-20261117-135833"


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    for module in ("tables", "runs", "compare"):
        monkeypatch.setattr(f"headrace.cli.{module}.terminal_width", lambda *_: width)


@pytest.mark.parametrize("width", [50, 80])
def test_lists_and_comparisons_do_not_wrap_on_a_terminal(place, capsys, monkeypatch, width):
    options = {"lr_schedule_params": {"initial_learning_rate": 0.123456789}, "dataset_path": "/data/" + "many/" * 20}
    make(place, LONG, [start(), validation(4, 0.5, "ema"), end("interrupted")], when=4, **options)
    (place / "cut").mkdir()
    (place / "cut" / "config.json").write_text('{"values": {"seed"')
    (place / "cut" / "plan.json").write_text("{}")
    on_terminal(monkeypatch, width)
    assert runs([str(place)]) == 0
    listed = capsys.readouterr().out
    assert compare([str(place / name) for name in (LONG, "good", "quick", "deep/er/trial")]) == 0
    compared = capsys.readouterr().out
    for text, said in ((listed, " no room for "), (compared, " were cut to fit the terminal")):
        assert max(map(len, text.splitlines())) <= width
        assert said in f" {text}".replace("\n", " ")
    assert listed.splitlines()[0].split()[:2] == ["run", "top-1"]
    assert "written" in listed.split("no room for ")[1]
    row = next(line for line in listed.splitlines() if "interrupted" in line)
    assert row.startswith("cifar_")
    assert row.split("  ")[0].endswith("135833")
    for word in ("params.initial_", "learning_rate", "0.123456789", "(ema)", "momentum"):  # only the path is cut
        assert word in compared
    assert [letter for letter in "ABCD" if f" {letter}" in compared] == list("ABCD")


def test_nothing_is_cut_where_no_terminal_is(place, capsys):
    path = "/data/" + "many/" * 20
    make(place, LONG, [start(), end()], when=4, dataset_path=path)
    assert runs([str(place)]) == 0
    out = capsys.readouterr().out
    assert LONG in out
    assert "written" in out.splitlines()[0]
    assert compare([str(place / LONG), str(place / "good")]) == 0
    out += capsys.readouterr().out
    assert path in out
    assert "no room" not in out
    assert "were cut" not in out
    assert "..." not in out


def result(run: Path, outcome: str, *, can_resume: bool = False, reason: str = "") -> RunResult:
    return RunResult(
        outcome=outcome, directory=run, step=40, validation={}, images_per_second=None, time_to_train=1.0,
        can_resume=can_resume, reason=reason,
    )  # fmt: skip


def test_the_table_at_the_end_of_a_run(place):
    run = place / "good"
    lines = end_lines(result(run, "finished"), read_summary(run))
    assert lines[0] == "accuracy    best top-1 90.00 % at epoch 1 (100 images)"
    assert lines[1] == "            80.00 % (raw) at the end"
    assert "time        12.0 s: train 9.0 s, compile 3.0 s" in lines
    assert "verdict     compute-bound" in lines
    assert not any(line.startswith(("next", "plot", "checkpoint")) for line in lines), "there are none"
    (run / "checkpoints" / "step_00000010").mkdir(parents=True)
    (run / "curve.svg").write_text("")
    lines = end_lines(result(run, "stopped", reason="no better accuracy"), read_summary(run))
    assert lines[0] == "stopped     no better accuracy"
    assert f"plot        {run}/curve.svg" in lines
    assert lines[-3:] == [
        f"next        headrace predict {run} IMAGES",
        f"            headrace export {run} --format onnx",
        f"            headrace resume {run}",
    ]
    assert (
        end_lines(result(run, "interrupted", can_resume=True), read_summary(run))[-1]
        == f"next        headrace resume {run}"
    )


def test_paths_of_the_table_stay_whole_on_a_narrow_terminal(place, monkeypatch):
    monkeypatch.setattr("headrace.cli.run_end.terminal_width", lambda: 40)
    run = (place / "good").rename(place / "a name of several words that is longer than a line")
    for name in ("report.html", "curve.svg"):
        (run / name).write_text("")
    lines = end_lines(result(run, "finished"), read_summary(run))
    assert {f"report      '{run}/report.html'", f"plot        '{run}/curve.svg'", f"directory   '{run}'"} <= set(lines)


def test_a_trial_shows_no_accuracy(place):
    run = place / "deep" / "er" / "trial"
    text = "\n".join(end_lines(result(run, "finished"), read_summary(run)))
    assert "not shown: a trial (--dry-run-steps), validated on 100 images only" in text
    assert "100.00 %" not in text
