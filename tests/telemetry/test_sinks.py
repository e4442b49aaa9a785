"""Sinks: JSONL is the truth, the CSV tables follow from it, the log reads well."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import headrace.telemetry
from headrace.core.errors import CheckpointError
from headrace.telemetry.console import PlainConsole
from headrace.telemetry.line_file import Sink
from headrace.telemetry.records import (
    CheckpointRecord,
    Note,
    Record,
    RunStart,
    TrainRecord,
    ValidationRecord,
    read_records,
)
from headrace.telemetry.sinks import CsvSink, JsonlSink, LogSink, Sinks, open_sinks

REFERENCE_TRAINING = (
    "step,iteration,epoch,lr,loss_batch,loss_avg,train_acc_batch,train_acc_avg,it_time,img_per_sec,total_time"
)
REFERENCE_VALIDATION = "name,iteration,epoch,val_acc,val_time,val_size,img_per_sec"


def start(step: int = 0) -> RunStart:
    return RunStart(
        step=step, time="t", model="toy_model", dataset="digits", num_epochs=4, total_steps=40, updates_per_epoch=10,
        global_batch_size=32,
    )  # fmt: skip


def train(step: int, loss: float = 0.5, accuracy: float = 0.25) -> TrainRecord:
    return TrainRecord(
        step=step, epoch=step / 10, loss=loss, accuracy=accuracy, learning_rate=0.1, images_per_second=1000.0,
        step_seconds=0.032, elapsed_seconds=step * 0.05,
    )  # fmt: skip


def validation(step: int, top1: float, weights: str = "raw") -> ValidationRecord:
    return ValidationRecord(
        step=step, epoch=step / 10, weights=weights, loss=0.1843, top1=top1, top5=0.9972, num_samples=360, seconds=0.4,
        images_per_second=900.0, checkpoint=f"step_{step:08d}",
    )  # fmt: skip


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_the_jsonl_holds_every_record_in_order(tmp_path: Path) -> None:
    records: list[Record] = [start(), train(5), validation(10, 0.9), Note(step=10, text="so")]
    sink = JsonlSink(tmp_path / "run")
    for record in records:
        sink.write(record)
        assert read_records(tmp_path / "run")[-1] == record  # there at once, not at the end
    sink.close()
    sink.close()
    assert read_records(tmp_path / "run") == records
    assert len([json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]) == 4


def test_the_tables_have_the_reference_columns_first(tmp_path: Path) -> None:
    CsvSink(tmp_path).close()
    assert (tmp_path / "training.csv").read_text().startswith(REFERENCE_TRAINING + ",")
    assert (tmp_path / "validation.csv").read_text().startswith(REFERENCE_VALIDATION + ",weights,loss,top5")


def test_tables_hold_percent_and_means_over_the_last_epoch(tmp_path: Path) -> None:
    """Rows stand for different numbers of steps; the average over an epoch weighs them, computed here with numpy."""
    steps, losses = [2, 7, 10, 12, 20, 21], [4.0, 3.0, 2.0, 1.5, 1.0, 0.25]
    sink = CsvSink(tmp_path)
    for step, loss in zip(steps, losses, strict=True):
        sink.write(train(step, loss, accuracy=loss / 8))
    sink.close()
    found = rows(tmp_path / "training.csv")
    lengths = np.diff([0, *steps])
    for k, row in enumerate(found):
        window = [j for j in range(k + 1) if steps[j] > steps[k] - 10]
        mean = np.average([losses[j] for j in window], weights=lengths[window])
        assert float(row["loss_avg"]) == pytest.approx(mean, rel=1e-6)
        assert float(row["train_acc_avg"]) == pytest.approx(100 * mean / 8, rel=1e-6)
        assert float(row["loss_batch"]) == losses[k]
        assert float(row["train_acc_batch"]) == 100 * losses[k] / 8
        assert row["step"] == row["iteration"] == str(steps[k])
        assert float(row["total_time"]) == pytest.approx(steps[k] * 0.05)
        assert float(row["it_time"]) == 0.032
    assert found[0]["grad_norm"] == ""  # a value that is not there is an empty cell


def test_validation_rows_keep_raw_and_ema_apart(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.write(validation(10, 0.958333))
    sink.write(validation(10, 0.75, "ema"))
    sink.write(CheckpointRecord(step=10, epoch=1, name="step_00000010", num_bytes=1, seconds=1))
    sink.close()
    raw, ema = rows(tmp_path / "validation.csv")
    assert (raw["name"], raw["weights"], raw["val_size"]) == ("step_00000010", "raw", "360")
    assert float(raw["val_acc"]) == 95.8333
    assert (ema["weights"], float(ema["val_acc"]), float(ema["top5"])) == ("ema", 75.0, 99.72)


def test_a_second_process_goes_on_as_if_it_were_the_first(tmp_path: Path) -> None:
    """The tables of a run in two processes are byte for byte those of one, running means included."""
    records: list[Record] = [start(), train(4, 3.0), train(8, 2.0), validation(8, 0.5), train(12, 1.0), train(16, 0.5)]
    for place, cuts in ((tmp_path / "one", [0, 6]), (tmp_path / "two", [0, 3, 6])):
        for a, b in pairwise(cuts):
            sinks = open_sinks(place)
            for record in records[a:b]:
                sinks.write(record)
            sinks.close()
    for name in ("metrics.jsonl", "training.csv", "validation.csv"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_log_has_plain_lines_with_time_stamps(tmp_path: Path) -> None:
    sink = LogSink(tmp_path, now=lambda: 86400.0 * 365)
    for record in (start(), train(10, 0.3121, 0.9125), validation(10, 0.958333), validation(20, 0.9, "ema")):
        sink.write(record)
    sink.write(Note(step=20, level="warning", text="the disk is slow"))
    sink.close()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert all(line.startswith("197") and line[19:21] == "  " for line in lines)
    assert [line[21:] for line in lines] == [
        "train  toy_model on digits: 4 epochs of 10 steps, 32 images each",
        "epoch 1.00/4  step 10/40  loss 0.3121  top-1 91.25 %  lr 0.1  1,000 img/s  ETA 0:01",
        "validation  epoch 1.00  top-1 95.83 %  top-5 99.72 %  loss 0.1843  (360 images, 0.4 s)  best so far",
        "validation (ema)  epoch 2.00  top-1 90.00 %  top-5 99.72 %  loss 0.1843  (360 images, 0.4 s)",
        "warning: the disk is slow",
    ]


def test_best_so_far_is_remembered_across_processes(tmp_path: Path) -> None:
    sinks = open_sinks(tmp_path)
    sinks.write(validation(10, 0.9))
    sinks.close()
    sinks = open_sinks(tmp_path)
    sinks.write(validation(20, 0.8))
    sinks.write(validation(30, 0.95))
    sinks.close()
    ends = [line.endswith("best so far") for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert ends == [True, False, True]


def test_a_run_directory_that_cannot_be_written_is_an_error_for_people(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for make in (JsonlSink, CsvSink, LogSink):
        with pytest.raises(CheckpointError, match="Cannot write"):
            make(tmp_path / "file")


def test_progress_reaches_only_those_who_show_it(tmp_path: Path) -> None:
    told = []

    class Shows(Sink):
        def advance(self, step: int, loss: float | None = None, images_per_second: float | None = None) -> None:
            told.append(step)

    sinks = open_sinks(tmp_path, Shows())
    sinks.advance(7)
    sinks.close()
    assert told == [7]
    assert read_records(tmp_path) == []


def test_threads_do_not_write_into_each_others_lines(tmp_path: Path) -> None:
    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            time.sleep(1e-4)  # between a line and its end, where another thread may run
            return super().write(text)

    stream = Slow()
    with closing(open_sinks(tmp_path, PlainConsole(stream))) as sinks, ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: sinks.write(Note(step=0, level="info", text=f"line {i}")), range(100)))
    assert sorted(stream.getvalue().splitlines()) == sorted(f"line {i}" for i in range(100))


def test_closing_closes_all_even_if_one_fails(tmp_path: Path) -> None:
    closed = []

    class Failing(Sink):
        def close(self) -> None:
            closed.append(self)
            raise CheckpointError("no room")

    first, second = Failing(), Failing()
    with pytest.raises(CheckpointError, match="no room"):
        Sinks([first, second]).close()
    assert closed == [first, second]


def test_a_killed_process_loses_no_whole_line(tmp_path: Path) -> None:
    code = """
import sys
from headrace.telemetry.records import Note
from headrace.telemetry.sinks import JsonlSink
sink, step = JsonlSink(sys.argv[1]), 0
while True:
    step += 1
    sink.write(Note(step=step, text="x" * 500))
    print(step, flush=True)
"""
    source = str(Path(headrace.telemetry.__file__).parents[2])
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": source})
    assert process.stdout is not None
    for _ in range(50):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    announced = 50 + len(process.stdout.read().split("\n")) - 1
    process.stdout.close()
    process.wait()
    steps = [record.step for record in read_records(tmp_path)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= announced
