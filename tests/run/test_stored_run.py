"""Runs in a store: whole or nothing after a kill, resumed on a machine that has nothing, and told what went wrong."""

import json
import random
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("s3fs")

from headrace.checkpoint import upload
from headrace.checkpoint.upload import Uploader, whole_checkpoints
from headrace.cli.main import main
from headrace.config.load import Resolved
from headrace.core import store as stores
from headrace.core import stored_copy
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.store import open_store
from headrace.core.stored_copy import walk
from headrace.data.sets import mirror
from headrace.run import stored_run
from headrace.run.fit import resume, train
from headrace.run.stored_run import bring_run, working_place
from headrace.telemetry.records import CheckpointRecord, TrainRecord, read_records
from tests.core.s3_server import S3Server, running
from tests.data.image_files import write_classes
from tests.job.processes import finish, start, wait_until

from .conftest import assert_same_bits, final_state

RUN = "s3://data/runs/one"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    # Only that of stores: compiled programs stay where they are.
    for module in (stored_run, stored_copy):
        monkeypatch.setattr(module, "cache_directory", lambda: tmp_path / "cache")
    monkeypatch.setattr(stores, "_FIRST_WAIT_SECONDS", 0.01)
    with running(monkeypatch) as server:
        yield server


def another_machine(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "cache")


def stored(quick: Callable[..., Resolved], **options: object) -> Resolved:
    return quick(log_dir="s3://data/runs", run_name="one", **options)


def test_a_run_continues_on_a_machine_that_has_nothing(
    server: S3Server, quick: Callable[..., Resolved], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(stored(quick, num_epochs=2))
    files = server.buckets["data"]
    here = {path.relative_to(result.directory).as_posix(): path for path in result.directory.rglob("*")}
    here = {name: path for name, path in here.items() if path.is_file() and "/." not in f"/{name}"}
    assert {f"runs/one/{name}" for name in here} == files.keys() - {"runs/one/writer.json"}
    assert all(files[f"runs/one/{name}"] == path.read_bytes() for name, path in here.items())
    another_machine(tmp_path)
    resumed = resume(RUN, {"num_epochs": 4})
    assert resumed.outcome == "finished"
    whole = train(quick(num_epochs=4))
    assert_same_bits(final_state(resumed.directory), final_state(whole.directory))
    another_machine(tmp_path)
    assert_same_bits(final_state(bring_run(RUN)), final_state(whole.directory))
    losses = [
        [record.loss for record in read_records(path) if isinstance(record, TrainRecord)]
        for path in (whole.directory, bring_run(RUN))
    ]
    assert losses[0] == losses[1]
    # The commands that read runs take their addresses.
    another_machine(tmp_path)
    assert main(["runs", "s3://data/runs"]) == 0
    assert "one" in capsys.readouterr().out
    assert main(["validate", RUN, "--last", "--platform", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["step"] == 80
    with pytest.raises(ConfigError, match=f"{RUN} already holds files"):
        train(stored(quick))


def test_a_checkpoint_is_there_when_its_manifest_is(server: S3Server, quick: Callable[..., Resolved]) -> None:
    train(stored(quick, num_epochs=3, max_ckpts_to_keep=1, keep_best=0))
    puts = [
        path.removeprefix("runs/one/") for method, path, _ in server.requests if method == "PUT" for path in [path[5:]]
    ]
    for place, name in enumerate(puts):
        if name.endswith("manifest.json"):
            tensors, records = name.replace("manifest.json", "state.safetensors"), "metrics.jsonl"
            before = puts[:place]
            assert tensors in before
            assert records in before[before.index(tensors) :]
    # What was pruned here is gone there: its manifest first.
    gone = [path for method, path, _ in server.requests if method == "DELETE" and "step_" in path]
    assert all(path.endswith(("manifest.json", "state.safetensors")) for path in gone)
    assert [path.rpartition("/")[2] for path in gone[::2]] == ["manifest.json"] * (len(gone) // 2)
    assert len(whole_checkpoints(walk(open_store(RUN)))) == 1


def test_half_a_checkpoint_is_none(server: S3Server, quick: Callable[..., Resolved], tmp_path: Path) -> None:
    train(stored(quick, num_epochs=2))
    files = server.buckets["data"]
    newest = max(name for name in files if name.endswith("manifest.json"))
    del files[newest]
    another_machine(tmp_path)
    path = bring_run(RUN)
    assert [one.name for one in sorted((path / "checkpoints").glob("step_*"))] == ["step_00000020"]
    result = resume(RUN)
    assert result.step == 40
    assert newest in files


@pytest.mark.parametrize("fault", ["503", "cut"])
def test_every_third_request_fails(
    server: S3Server, quick: Callable[..., Resolved], tmp_path: Path, fault: str
) -> None:
    count = iter(range(10**6))
    server.fault = lambda method, path: fault if "step_" in path and next(count) % 3 == 0 else ""
    result = train(stored(quick, num_epochs=2))
    another = final_state(result.directory)
    another_machine(tmp_path)
    assert_same_bits(final_state(bring_run(RUN)), another)
    assert any(one[2] == fault for one in server.requests)


def test_a_bucket_that_vanishes(
    server: S3Server, quick: Callable[..., Resolved], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run trains to its end here, says what is missing there, and brings it when the bucket is back."""
    monkeypatch.setattr(upload, "_TRIES_AT_END", 1)
    kept = server.buckets["data"]

    def vanish(method: str, path: str) -> str:
        if method == "PUT" and path.endswith("step_00000020/manifest.json"):
            server.buckets.pop("data", None)
        return ""

    server.fault = vanish
    with pytest.raises(CheckpointError, match=r"The run is whole in .*, but not in s3://data/runs/one") as caught:
        train(stored(quick, num_epochs=3))
    assert "headrace resume s3://data/runs/one" in str(caught.value)
    server.buckets["data"], server.fault = kept, lambda method, path: ""
    result = resume(RUN)
    assert result.outcome == "finished"
    assert result.step == 60
    assert whole_checkpoints(walk(open_store(RUN)))[-1] == "step_00000060"


def test_what_may_not_be_written_is_refused_before_anything_starts(
    server: S3Server, quick: Callable[..., Resolved], tmp_path: Path
) -> None:
    server.fault = lambda method, path: "403" if method == "PUT" else ""
    with pytest.raises(ConfigError, match=r"Cannot write s3://data/runs: .*may write there"):
        train(stored(quick))
    server.fault = lambda method, path: ""
    with pytest.raises(ConfigError, match="s3://missing"):
        train(quick(log_dir="s3://missing/runs", run_name="one"))
    assert not server.buckets["data"]
    assert not (tmp_path / "cache/runs").exists()


def test_the_process_that_resumed_last_writes(server: S3Server, quick: Callable[..., Resolved], tmp_path: Path) -> None:
    result = train(stored(quick, num_epochs=1))
    notes: list[str] = []
    first = Uploader(result.directory, open_store(RUN, writes=True), notes.append)
    second = Uploader(result.directory, open_store(RUN, writes=True), notes.append)
    first.start()
    second.start()
    with pytest.raises(CheckpointError, match=r"Another process \(pid \d+ on .*\) has taken over s3://data/runs/one"):
        first.close()
    second.close()
    assert len(notes) == 1


def test_no_run_at_an_address(server: S3Server, quick: Callable[..., Resolved]) -> None:
    train(stored(quick, num_epochs=1))
    with pytest.raises(CheckpointError, match=r"s3://data/runs/two is no run.*Runs in s3://data/runs: one"):
        resume("s3://data/runs/two")


KILLS = 6


def num_manifests(server: S3Server) -> int:
    """Return how many checkpoints were made whole so far."""
    return sum(method == "PUT" and path.endswith("manifest.json") for method, path, _ in list(server.requests))


@pytest.mark.slow
def test_kills_lose_nothing(server: S3Server, tmp_path: Path) -> None:
    """`kill -9` again and again, each time continued by a machine that has nothing but the store."""
    words = shlex.split(f"""
        --config none --dataset digits --model-name toy_model_bn --micro-batch-size 16 --weight-updates-per-epoch 12
        --num-epochs 200 --ckpts-per-epoch 3 --ema-decay 0.9 --progress none --max-ckpts-to-keep 2
        --compilation-cache-dir {tmp_path / "programs"}
    """)
    command = ["train", *words, "--output", RUN, "--resume", "auto"]
    log = tmp_path / "log.txt"
    assert finish(start(["train", *words, "--output", tmp_path / "whole"], log)) == 0
    server.bytes_per_second = 2e6  # so that many a kill falls into an upload
    rng, saved = random.Random(0), 0
    for number in range(KILLS):
        process = start(command, log, {"XDG_CACHE_HOME": str(tmp_path / f"machine-{number}")})
        before = num_manifests(server)
        wait_until(process, lambda before=before: num_manifests(server) > before)
        time.sleep(rng.uniform(0, 0.7))
        process.kill()
        process.wait()
        whole = whole_checkpoints(walk(open_store(RUN)))
        newest = int(whole[-1].removeprefix("step_")) if whole else 0
        assert newest >= saved, "a checkpoint was lost"
        saved = newest
    assert saved, "no process came to a checkpoint"
    final = start(
        ["train", *words, "--output", RUN, "--resume", "auto"], log, {"XDG_CACHE_HOME": str(tmp_path / "last")}
    )
    assert finish(final) == 0, log.read_text()
    assert_same_bits(final_state(bring_run(RUN)), final_state(tmp_path / "whole"))
    assert [one for one in read_records(bring_run(RUN)) if isinstance(one, CheckpointRecord)]
    assert working_place(RUN).is_dir()


def test_the_verdict_names_a_slow_link(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mirror, "cache_directory", lambda: tmp_path / "cache")
    write_classes(tmp_path / "images", {"ant": 40, "bee": 40}, (60, 60))
    pack = tmp_path / "set.hrp"
    assert main(f"data pack --dataset folder --dataset-path {tmp_path / 'images'} --output {pack}".split()) == 0
    server.buckets["data"]["set.hrp"] = pack.read_bytes()
    words = f"""train s3://data/set.hrp --config none --model toy_model --image-size 32 --micro-batch-size 8
        --num-epochs 3 --decode-once off --dataset-cache none --dataset-disk-budget 0 --validations-per-epoch 0
        --call-seconds 0 --pipeline-num-parallel 1 --progress none --output {tmp_path / "run"}"""
    server.bytes_per_second = 30e3
    assert main(shlex.split(words)) == 0
    said = capsys.readouterr().out
    assert "verdict     input-bound" in said
    found = re.search(r"the link is the limit: s3://data delivered ([\d.]+) kB/s", " ".join(said.split()))
    assert found
    assert 1 < float(found[1]) < 200  # the server sleeps after each piece, and answers several at once
