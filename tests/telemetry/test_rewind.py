"""Rewinding after a crash: records beyond the restored step go, the tables are those of a run that never went there."""

from pathlib import Path

import pytest

from headrace.core.errors import CheckpointError
from headrace.telemetry.records import Note, Record, RunEnd, TrainRecord, ValidationRecord, read_records
from headrace.telemetry.sinks import open_sinks, rewind


def history(last_step: int) -> list[Record]:
    records: list[Record] = []
    for step in range(5, last_step + 1, 5):
        records.append(
            TrainRecord(
                step=step, epoch=step / 10, loss=1 / step, accuracy=0.5, learning_rate=0.1, elapsed_seconds=float(step)
            )
        )
        if step % 10 == 0:
            records.append(
                ValidationRecord(step=step, epoch=step / 10, loss=0.1, top1=step / 100, num_samples=9, seconds=1.0)
            )
    return records


def write(directory: Path, records: list[Record]) -> None:
    sinks = open_sinks(directory)
    for record in records:
        sinks.write(record)
    sinks.close()


def assert_same_files(one: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "training.csv", "validation.csv"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("tail", [b"", b'{"kind": "train", "step": 50, "epo', b"\x00" * 40])
def test_what_lies_beyond_the_step_is_as_if_it_had_never_been(tmp_path: Path, tail: bytes) -> None:
    write(tmp_path / "long", history(50))
    write(tmp_path / "short", history(30))
    with (tmp_path / "long" / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    assert rewind(tmp_path / "long", 30) == tuple(history(30))
    assert_same_files(tmp_path / "long", tmp_path / "short")


def test_going_on_after_a_rewind_gives_the_files_of_a_run_without_a_crash(tmp_path: Path) -> None:
    write(tmp_path / "crashed", history(45))
    rewind(tmp_path / "crashed", 20)
    write(tmp_path / "crashed", history(60)[len(history(20)) :])
    write(tmp_path / "smooth", history(60))
    assert_same_files(tmp_path / "crashed", tmp_path / "smooth")


def test_rewinding_twice_changes_nothing_and_damaged_tables_are_mended(tmp_path: Path) -> None:
    write(tmp_path / "a", history(30))
    write(tmp_path / "b", history(30))
    (tmp_path / "a" / "training.csv").write_text("rubbish")
    (tmp_path / "a" / "validation.csv").unlink()
    assert rewind(tmp_path / "a", 30) == tuple(history(30))
    assert rewind(tmp_path / "a", 10**9) == tuple(history(30))
    assert_same_files(tmp_path / "a", tmp_path / "b")


def test_an_end_and_notes_up_to_the_step_stay(tmp_path: Path) -> None:
    end = RunEnd(step=30, time="t", outcome="interrupted", epoch=3.0, time_to_train=9.0)
    write(tmp_path, [*history(30), Note(step=30, text="stopping"), end])
    assert rewind(tmp_path, 30)[-1] == end
    assert rewind(tmp_path, 29)[-1].step == 25


def test_a_run_without_records_gets_empty_files(tmp_path: Path) -> None:
    assert rewind(tmp_path, 0) == ()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert (tmp_path / "training.csv").read_text().count("\n") == 1


def test_damage_in_the_middle_stops_the_rewind_and_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, history(30))
    path = tmp_path / "metrics.jsonl"
    broken = path.read_bytes().replace(b'"step": 10', b'"step": 1x', 1)
    path.write_bytes(broken)
    with pytest.raises(CheckpointError, match="line 2 is damaged"):
        rewind(tmp_path, 20)
    assert path.read_bytes() == broken
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.txt", "metrics.jsonl", "training.csv", "validation.csv"]


def test_nothing_hidden_is_left_behind(tmp_path: Path) -> None:
    write(tmp_path, history(30))
    rewind(tmp_path, 10)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert [record.step for record in read_records(tmp_path)] == [5, 10, 10]
