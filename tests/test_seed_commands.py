"""Every command that the seeds print: read by the real parser, planned as the text around it says, and executed.

The commands are in tests/seeds/commands.yml, with what each must come to. They are executed with the least that makes
them short and changes nothing else: one weight update (`--dry-run-steps 1`), made-up data, small images. Longer ones
are marked slow. docs/seeds.md is made from the same list.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.scripts import run
from headrace.config.seed_words import seed_dialect
from headrace.core.errors import ConfigError
from tests.seeds.reading import (
    NOT_OURS,
    SeedCommand,
    benched,
    facts_of,
    planned,
    read_commands,
    script_words,
    split_launch,
)

ROOT = Path(__file__).parents[1]
COMMANDS = read_commands()
SHORT = ["--dry-run-steps", "1", "--dataset-device-budget", "1MiB", "--progress", "plain", "--platform", "cpu"]


def named(*kinds: str) -> list[object]:
    """Return the commands that have one of these fields, as parameters of a test."""
    return [pytest.param(command, id=command.name) for command in COMMANDS if any(getattr(command, k) for k in kinds)]


@pytest.mark.parametrize("command", named("plan"))
def test_plan(command: SeedCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATASETS_DIR", raising=False)
    request, script, argv = split_launch(command.words(tmp_path))
    replicas = request.num_replicas if request else None
    if command.tf_config:  # two workers, each with the replicas that the command says
        replicas = 2 * int(argv[argv.index("--replicas") + 1])
    resolved, design = planned(script_words(script, argv), replicas)
    wanted = {key: value for key, value in command.plan.items() if key != "warns"}
    found = facts_of(resolved, design)
    assert {key: found[key] for key in wanted} == wanted
    logs = [text for text in design.plan.warnings if "--logs-per-epoch" in text]
    if command.seed == "000":
        warns = command.plan.get("warns")
        assert [text.startswith(warns) for text in logs] == ([True] if warns else [])
    if command.launch:
        assert request is not None
        given = {"processes": request.num_processes, "replicas": request.num_replicas, "hosts": len(request.hosts)}
        given["devices_per_replica"] = request.devices_per_replica
        assert {key: given[key] for key in command.launch} == command.launch
        assert design.plan.devices_per_replica == command.launch.get("devices_per_replica", 4)


@pytest.mark.parametrize("command", named("bench"))
def test_measurement(command: SeedCommand, tmp_path: Path) -> None:
    request, script, argv = split_launch(command.words(tmp_path))
    assert (request.num_processes if request else 1) == command.launch.get("processes", 1)
    wanted = {key: value for key, value in command.bench.items() if key != "sweep"}
    found = benched(script_words(script, argv))
    assert {key: found[key] for key in wanted} == wanted
    for size in command.bench.get("sweep", ()):
        swept = benched(script_words(script, [*argv, "--batch-size", str(size)]))
        assert swept == {**found, "batch": size}


@pytest.mark.parametrize("command", named("refused"))
def test_refusal(command: SeedCommand, tmp_path: Path) -> None:
    _, script, argv = split_launch(command.words(tmp_path))
    with pytest.raises(ConfigError) as caught:
        planned(script_words(script, argv), None)
    assert command.refused in str(caught.value)


def test_every_command_is_looked_at_in_some_way() -> None:
    kinds = {command.kind for command in COMMANDS}
    assert kinds == {"train", NOT_OURS, "restore", "variable", "validate", "mpirun", "help", "profile"}
    for command in COMMANDS:
        assert command.does.endswith((".", "`")), command.name
        if command.kind == "train":
            assert bool(command.plan) + bool(command.bench) + bool(command.refused) == 1, command.name
            assert command.run or command.refused, command.name


def test_data_dir_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATASETS_DIR", raising=False)
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    resolved, _ = planned(script_words("train", ["--dataset", "cifar-10", "--batch-size", "8"]), None)
    assert resolved.config.data.dataset_path == str(tmp_path)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where compiled programs are kept: many commands differ in words only."""
    return tmp_path_factory.mktemp("compiled")


def reduced(script: str, argv: list[str], place: Path, cache: Path) -> list[str]:
    """Return an argv with what makes it short: one update, made-up data, small images; nothing else changes."""
    words = script_words(script, argv)
    more = ["--compilation-cache-dir", str(cache)]
    if not any(word.partition("=")[0] == "--config" for word in argv):
        more += ["--dialect", "tf1" if script == "validation" else seed_dialect(argv)]  # not to be told by these words
    if words[0] == "bench":
        return [*argv, *more, "--image-size", "8", "--steps-per-call", "1", "--repeat", "1", "--num-requests", "1"]
    resolved, _ = planned(words, None)
    pictures = ["--image-size", "8"] if resolved.config.data.dataset == "imagenet" else []
    made_up = [] if resolved.config.data.made_up else ["--generated-data"]
    return [*argv, *SHORT, *made_up, *pictures, *more, "--log-dir", str(place / "runs"), "--run-name", "seed"]


def execute(command: SeedCommand, place: Path, cache: Path) -> str:
    """Run the script of a command in a process of its own, reduced; return what it printed."""
    _, script, argv = split_launch(command.words(place))
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "DATASETS_DIR", "DATA_DIR")}
    words = [sys.executable, str(ROOT / f"{script}.py"), *reduced(script, argv, place, cache)]
    environ |= {"WANDB_MODE": "offline", "XLA_FLAGS": ""}
    done = subprocess.run(words, cwd=place, env=environ, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


QUICK = [command for command in COMMANDS if command.run == "quick" and (command.plan or command.bench)]


@pytest.mark.parametrize("command", [pytest.param(command, id=command.name) for command in QUICK])
def test_execution(command: SeedCommand, tmp_path: Path, cache: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    _, script, argv = split_launch(command.words(tmp_path))
    assert run(script.removesuffix("_ipu"), reduced(script, argv, tmp_path, cache)) == 0
    check_output(command, capsys.readouterr().out)


SLOW = [command for command in COMMANDS if command.run == "slow" and (command.plan or command.bench)]
ALONE = [command for command in SLOW if not command.launch and not command.tf_config]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", [pytest.param(command, id=command.name) for command in ALONE])
def test_slow_execution(command: SeedCommand, tmp_path: Path, cache: Path) -> None:
    check_output(command, execute(command, tmp_path, cache))


def check_output(command: SeedCommand, printed: str) -> None:
    """See to it that a weight update was made, or something measured."""
    if command.bench:
        assert re.search(r"img/s", printed), printed
    else:
        assert re.search(r"step 1/1  loss \d", printed), printed
