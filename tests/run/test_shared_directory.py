"""Processes that share a run's directory and know nothing of each other: one trains, the others are refused."""

import shlex
from pathlib import Path

import pytest

from headrace.config.schema import Config
from headrace.core.errors import ConfigError
from headrace.run.directory import layout, write_run
from headrace.telemetry.records import RunEnd, RunStart, read_records
from tests.job.processes import finish, run, start

WORDS = shlex.split("""
    train --config none --model-name toy_model --dataset digits --num-epochs 1 --weight-updates-per-epoch 4
    --batch-size 32 --learning-rate 0.01 --no-validation --progress none --output
""")


@pytest.mark.parametrize("exists", [False, True])
def test_of_processes_started_at_once_one_trains(exists: bool, tmp_path: Path) -> None:
    """With nothing in their environment that tells of the others, as by `pdsh` or an array that forgot its number."""
    place = tmp_path / "one"
    if exists:
        place.mkdir()
    files = [tmp_path / f"{number}.txt" for number in range(3)]
    started = [start([*WORDS, place], file) for file in files]
    codes = [finish(process) for process in started]
    assert sorted(codes) == [0, 2, 2], [file.read_text() for file in files]
    for code, file in zip(codes, files, strict=True):
        said = file.read_text()
        assert ("already holds files" in said or "is writing into" in said) == (code == 2), said
    records = read_records(place)
    assert [type(record) for record in records if isinstance(record, RunStart | RunEnd)] == [RunStart, RunEnd]
    assert len(list((place / "checkpoints").glob("step_*"))) >= 1


def test_a_run_that_goes_on_is_not_resumed_beside_itself(tmp_path: Path) -> None:
    """`--resume auto` in several processes at once: the first has the directory until it ends."""
    words = [word if word != "1" else "200" for word in WORDS]
    files = [tmp_path / f"{number}.txt" for number in range(2)]
    started = [start([*words, tmp_path / "one", "--resume", "auto"], file) for file in files]
    codes = [finish(process) for process in started]
    assert sorted(codes) == [0, 2], [file.read_text() for file in files]
    assert run(["train", *words[1:], tmp_path / "one", "--resume", "auto"], tmp_path / "again.txt") == 0
    assert "finished" in (tmp_path / "again.txt").read_text()


@pytest.mark.parametrize("has_links", [True, False])
def test_without_locks_the_second_to_begin_is_refused(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without locks, both come as far as the first file of the run."""
    if not has_links:

        def refuse(*_: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(Path, "hardlink_to", refuse)
    directory = layout(tmp_path, Config())
    write_run(directory, {"values": 1}, {}, ["first"], is_new=True)
    before = directory.config_file.read_text()
    with pytest.raises(ConfigError, match="already holds files"):
        write_run(directory, {"values": 2}, {}, ["second"], is_new=True)
    assert directory.config_file.read_text() == before
    write_run(directory, {"values": 3}, {}, ["third"], is_new=False)
    assert '"first"' in directory.config_file.read_text()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
