"""`kill -9` and polite signals at any moment, in real processes: a resumed run ends with the same bits and records."""

import csv
import json
import random
import re
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import INTERRUPTED_EXIT_CODE
from headrace.run.interruption import Interrupt
from headrace.telemetry.records import RunEnd, TrainRecord, ValidationRecord, read_records
from tests.job.processes import finish, run, size_of, start, wait_until

from .conftest import assert_same_bits, final_state

# Logs every 6 steps, checkpoints every 4, validation every 12: calls of 2 steps, and checkpoints between two logs.
OPTIONS = shlex.split("""
    --config none --dataset digits --model-name toy_model_bn --micro-batch-size 16 --weight-updates-per-epoch 12
    --logs-per-epoch 2 --ckpts-per-epoch 3 --validations-per-epoch 1 --train-augmentation crop --ema-decay 0.9
    --optimizer-params '{"momentum": 0.9}' --lr-schedule-params '{"initial_learning_rate": 0.002}' --bn-momentum 0.9
    --max-ckpts-to-keep 2 --keep-best 2 --progress plain
""")

# Stochastic rounding, a loss scale that moves, accumulation: takes three times as long to compile.
HALF = shlex.split("""
    --precision 16.16 --half-type float16 --loss-scaling dynamic
    --loss-scaling-params '{"initial": 1024, "growth_interval": 5}' --micro-batch-size 8 --gradient-accumulation-count 2
""")

# AdamW counts its steps in every stage.
STAGES = shlex.split("""
    --num-pipeline-stages 2 --micro-batch-size 8 --gradient-accumulation-count 2 --optimizer adamw --optimizer-params {}
""")

EPOCHS = 15  # of a run that is cut six times and must not end before: with 5 it once had, on a busy machine

# What a kill may change: how long things took.
TIMES = ("images_per_second", "step_seconds", "infeed_wait_seconds", "elapsed_seconds", "seconds")
TIME_COLUMNS = ("it_time", "img_per_sec", "total_time", "infeed_wait", "val_time")


class Clock:
    """A clock that a test sets."""

    now = 1000.0


# A moment is a row of waits. Each looks at the run directory once when its turn comes, and returns what to wait for.
Wait = Callable[[Path], Callable[[], bool]]


def describe(word: str) -> Wait:
    """Wait until this process has written the word into log.txt (which only grows)."""

    def wait(run_dir: Path) -> Callable[[], bool]:
        log = run_dir / "log.txt"
        begin = max(0, size_of(log))
        return lambda: size_of(log) > begin and word.encode() in log.read_bytes()[begin:]

    return wait


def changed(look: Callable[[Path], Any]) -> Wait:
    """Wait until something looks another than when the wait began."""

    def wait(run_dir: Path) -> Callable[[], bool]:
        before = look(run_dir)
        return lambda: look(run_dir) != before

    return wait


def passed(seconds: float) -> Wait:
    """Wait so long."""

    def wait(_run_dir: Path) -> Callable[[], bool]:
        end = time.monotonic() + seconds
        return lambda: time.monotonic() >= end

    return wait


def is_saving(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob(".tmp-step_*"))


def newest_name(run_dir: Path) -> str:
    return max((path.name for path in (run_dir / "checkpoints").glob("step_*")), default="")


def best_list(run_dir: Path) -> int:
    file = run_dir / "checkpoints" / "best.json"
    return file.stat().st_mtime_ns if file.exists() else 0


def num_validations(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().count(b'"kind": "validation"') if file.exists() else 0


COMPILED = describe("training compiled")
AT_START = (describe("run directory"),)  # there is something to resume; programs are about to be compiled
WHILE_SAVING = (COMPILED, changed(is_saving))
WHEN_NAMED = (COMPILED, changed(newest_name))
WHEN_BEST_CHANGES = (COMPILED, changed(best_list))
WHEN_METRICS_GROW = (COMPILED, changed(lambda run_dir: size_of(run_dir / "metrics.jsonl")))
WHEN_VALIDATED = (COMPILED, changed(num_validations))  # raw weights, averaged ones not yet
KILLS = (WHILE_SAVING, WHEN_METRICS_GROW, WHEN_VALIDATED, WHEN_NAMED, WHEN_BEST_CHANGES)


def words_for(run_dir: Path, num_epochs: int, options: Sequence[str] = ()) -> list[str]:
    log_dir, programs = run_dir.parent, run_dir.parent.with_name("programs")
    places = ["--log-dir", str(log_dir), "--run-name", run_dir.name, "--compilation-cache-dir", str(programs)]
    return ["train", *OPTIONS, *options, *places, "--num-epochs", str(num_epochs)]


def cut_run(words: Sequence[str], run_dir: Path, cuts: Sequence[tuple[signal.Signals, Sequence[Wait]]]) -> list[int]:
    """Start a run, send it a signal at each of the moments, resume it each time; return the processes' exit codes."""
    output = run_dir.parent.with_name("cut.txt")
    codes = []
    for number, moment in cuts:
        happened = moment[0](run_dir)  # looks before the process starts, so that it sees what the process adds
        started = (run_dir / "config.json").exists()
        process = start(["resume", run_dir] if started else words, output)
        for wait in moment[1:]:
            wait_until(process, happened)
            happened = wait(run_dir)
        wait_until(process, happened)
        process.send_signal(number)
        codes.append(finish(process))
        expected = -signal.SIGKILL if number == signal.SIGKILL else INTERRUPTED_EXIT_CODE
        assert codes[-1] in (expected, 0), output.read_text()  # 0: it had finished before
    assert run(["resume", run_dir], output) == 0, output.read_text()
    assert "Traceback" not in output.read_text()
    return codes


def rows(file: Path) -> list[dict[str, str]]:
    table = csv.DictReader(file.read_text().splitlines())
    return [{column: cell for column, cell in row.items() if column not in TIME_COLUMNS} for row in table]


def facts(run_dir: Path, kind: type) -> list[dict[str, Any]]:
    # by way of JSON, where a NaN (the gradient norm of a skipped step) is a word and equals itself
    records = [json.loads(record.to_json()) for record in read_records(run_dir) if isinstance(record, kind)]
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def assert_same_run(whole: Path, cut: Path, num_epochs: int) -> None:
    assert_same_bits(final_state(whole), final_state(cut))
    train, validation = facts(cut, TrainRecord), facts(cut, ValidationRecord)
    assert [record["step"] for record in train] == list(range(6, 12 * num_epochs + 1, 6))
    assert [(record["step"], record["weights"]) for record in validation] == [
        (12 * epoch, weights) for epoch in range(1, num_epochs + 1) for weights in ("raw", "ema")
    ]
    assert train == facts(whole, TrainRecord)
    assert validation == facts(whole, ValidationRecord)
    for name in ("training.csv", "validation.csv"):
        assert rows(cut / name) == rows(whole / name)
    for name in (
        "checkpoints/best.json",
        *(f"reports/step_{12 * epoch:08d}.json" for epoch in range(1, num_epochs + 1)),
    ):
        assert json.loads((cut / name).read_text()) == json.loads((whole / name).read_text()), name
    kept = [sorted(path.name for path in (run_dir / "checkpoints").iterdir()) for run_dir in (whole, cut)]
    assert kept[0] == kept[1]
    ends = [[record for record in read_records(run_dir) if isinstance(record, RunEnd)][-1] for run_dir in (whole, cut)]
    for name in ("step", "outcome", "epoch_at_target", "best_top1", "best_checkpoint", "skipped_steps"):
        assert getattr(ends[0], name) == getattr(ends[1], name), name
    assert ends[1].outcome == "finished"


def test_cut_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    whole, cut, output = tmp_path / "runs" / "whole", tmp_path / "runs" / "cut", tmp_path / "whole.txt"
    delay = (COMPILED, passed(random.Random(5).uniform(0, 1)))
    kills = [(signal.SIGKILL, moment) for moment in (*KILLS, delay)]
    # First of all before the first process has compiled its programs; later on between two logs.
    cuts = [(signal.SIGTERM, AT_START), *kills[:3], (signal.SIGINT, WHEN_NAMED), *kills[3:]]
    codes = cut_run(words_for(cut, EPOCHS), cut, cuts)
    assert codes[:6] == [
        INTERRUPTED_EXIT_CODE,
        -9,
        -9,
        -9,
        INTERRUPTED_EXIT_CODE,
        -9,
    ]  # the best may never change again
    told = (tmp_path / "cut.txt").read_text()
    assert "SIGTERM: stopped at step 0, nothing is lost" in told
    assert told.count(f"\nnext        headrace resume {cut}\n") == 2
    assert run(words_for(whole, EPOCHS), output) == 0, output.read_text()
    assert_same_run(whole, cut, EPOCHS)


@pytest.mark.slow
def test_stages_cut_and_resumed_equal_uninterrupted_ones_bit_for_bit(tmp_path: Path) -> None:
    whole, cut, output = tmp_path / "runs" / "whole", tmp_path / "runs" / "cut", tmp_path / "whole.txt"
    kills = [(signal.SIGKILL, WHILE_SAVING), (signal.SIGINT, WHEN_NAMED), (signal.SIGKILL, WHEN_VALIDATED)]
    codes = cut_run(words_for(cut, EPOCHS, STAGES), cut, kills)
    assert codes == [-9, INTERRUPTED_EXIT_CODE, -9]
    assert run(words_for(whole, EPOCHS, STAGES), output) == 0, output.read_text()
    assert_same_run(whole, cut, EPOCHS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_many_moments(tmp_path: Path) -> None:
    whole, cut, output = tmp_path / "runs" / "whole", tmp_path / "runs" / "cut", tmp_path / "whole.txt"
    rng = random.Random(6)
    delays = [(describe("run directory"), passed(rng.uniform(0, 3))) for _ in range(25)]
    starts = [(passed(rng.uniform(0.2, 3)),) for _ in range(10)]
    moments = [*(AT_START, *KILLS) * 5, *delays, *starts]
    rng.shuffle(moments)
    assert run(words_for(whole, 24, HALF), output) == 0, output.read_text()
    codes = cut_run(words_for(cut, 24, HALF), cut, [(signal.SIGKILL, moment) for moment in moments])
    print(f"{codes.count(-9)} kills of {len(moments)}")
    assert codes.count(-9) > 50
    assert_same_run(whole, cut, 24)


def test_a_long_call_can_be_left_and_keeps_other_processes_out(tmp_path: Path) -> None:
    """One call is the whole run: a first Ctrl-C waits for it, a second one leaves; meanwhile nobody may resume."""
    run_dir, output, other = tmp_path / "runs" / "long", tmp_path / "long.txt", tmp_path / "other.txt"
    quiet = ["--logs-per-epoch", "0", "--ckpts-per-epoch", "0", "--no-validation"]
    words = words_for(run_dir, 2000, [*quiet, "--call-seconds", "0"])
    compiled = COMPILED(run_dir)
    process = start(words, output)
    assert wait_until(process, compiled), output.read_text()
    before = {path: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    assert run(["resume", run_dir], other) == 2
    assert f"Another process (pid {process.pid}) is writing into {run_dir}" in other.read_text()
    assert {path: path.read_bytes() for path in run_dir.iterdir() if path.is_file()} == before

    def is_called() -> bool:
        """Ask where its threads are: one waits for the end of the call, which takes many seconds."""
        process.send_signal(signal.SIGQUIT)
        time.sleep(0.2)
        return re.search(r"clock.py\", line \d+, in end", output.read_text()) is not None

    assert wait_until(process, is_called), output.read_text()
    process.send_signal(signal.SIGINT)
    assert wait_until(process, lambda: "a second one exits at once" in output.read_text())
    time.sleep(0.3)
    assert process.poll() is None, "the call is not over"
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert finish(process) == 130
    assert time.monotonic() - begin < 10, "it waited for the call"
    shown = output.read_text()
    assert shown.endswith(f"headrace: SIGINT: leaving at once\nnext        headrace resume {run_dir}\n")
    assert "Traceback" not in shown


@pytest.mark.parametrize(("has_begun", "said"), [(False, "stopping"), (True, "finishing the call and saving")])
def test_what_a_signal_is_answered_is_what_the_run_does(
    has_begun: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt = Interrupt()
    interrupt.has_begun = has_begun
    interrupt.receive(signal.SIGTERM)
    assert capsys.readouterr().err == f"headrace: SIGTERM: {said}; SIGINT exits at once\n"


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the codes that the process would have exited with."""
    codes: list[int] = []
    monkeypatch.setattr("headrace.run.fit.os._exit", codes.append)
    return codes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("headrace.run.fit.time.monotonic", lambda: clock.now)
    return clock


def test_only_a_second_ctrl_c_or_a_late_sigterm_exits_at_once(exits: list[int], clock: Clock) -> None:
    """Slurm sends SIGTERM to the processes of a job that it preempts, and to srun, which forwards it."""
    interrupt = Interrupt(quiet=True)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        interrupt.receive(number)
        interrupt.handle(number, None)
        clock.now += 1
    assert interrupt.signal_name == "SIGTERM"
    assert not exits
    clock.now += 2
    interrupt.receive(signal.SIGUSR1)
    assert not exits
    interrupt.receive(signal.SIGTERM)
    interrupt.receive(signal.SIGINT)
    assert exits == [128 + signal.SIGTERM, 128 + signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        interrupt.handle(signal.SIGINT, None)


def test_what_does_not_end_after_a_signal_is_left(
    exits: list[int], clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    interrupt = Interrupt()
    interrupt.directory = Path("runs/my run")

    def pass_seconds(seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            clock.now += 0.5
            interrupt.look(0.5)

    interrupt.begin()
    interrupt.receive(signal.SIGTERM)
    pass_seconds(24)
    interrupt.moved()  # a call has ended: the time counts anew, and the next one may take twice as long
    pass_seconds(47)
    clock.now += 3600
    interrupt.look(3600)  # the machine was suspended
    assert not exits
    pass_seconds(3600)
    assert set(exits) == {INTERRUPTED_EXIT_CODE}
    assert capfd.readouterr().err.splitlines()[1:3] == [
        "headrace: SIGTERM: nothing has ended for 48 s; leaving with what the last checkpoint holds",
        "next        headrace resume 'runs/my run'",
    ]
