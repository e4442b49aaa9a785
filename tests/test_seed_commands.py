"""Every command that the seeds print: read by the real parser, planned as the text around it says, and executed.

The commands are in tests/seeds/commands.yml, with what each must come to. They are executed with the least that makes
them short and changes nothing else: one weight update (`--dry-run-steps 1`), synthetic data, small images. Longer ones
are marked slow. docs/documents has the same list.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from headrace.cli.main import main, run_script
from headrace.cli.options import read_arguments, without_recipe
from headrace.core.errors import ConfigError
from headrace.job.detect_launcher import detect_process_info
from headrace.job.launch_request import LaunchRequest
from tests.seeds.reading import (
    NOT_OURS,
    SeedCommand,
    benched,
    facts_of,
    planned,
    read_commands,
    script_words,
    split_launch,
    variables,
)
from tests.seeds.running import at, check_output, reduced, tf_config

COMMANDS = read_commands()


def named(*kinds: str) -> list[object]:
    """Return the commands that have one of these fields, as parameters of a test."""
    return [pytest.param(command, id=command.name) for command in COMMANDS if any(getattr(command, k) for k in kinds)]


@pytest.fixture(autouse=True)
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Begin in an empty directory, without variables that say where data lie."""
    monkeypatch.chdir(tmp_path)
    for name in ("DATASETS_DIR", "DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    return monkeypatch


def launch_facts(request: LaunchRequest, command: SeedCommand) -> dict[str, int | None]:
    """Return what a poprun line asks for, as far as the seed says it."""
    given = {
        "processes": request.num_processes,
        "replicas": request.num_replicas,
        "hosts": len(request.hosts),
        "devices_per_replica": request.devices_per_replica,
    }
    return {key: given[key] for key in command.launch}


@pytest.mark.parametrize("command", named("plan"))
def test_plan(command: SeedCommand, tmp_path: Path, shell: pytest.MonkeyPatch) -> None:
    request, script, argv = split_launch(command.words(tmp_path))
    words = script_words(script, argv)
    for name, value in variables(request).items():
        shell.setenv(name, value)
    if command.tf_config:
        shell.setenv("TF_CONFIG", tf_config(301))
    resolved, design = planned(words)
    wanted = {key: value for key, value in command.plan.items() if key != "warns"}
    found = facts_of(resolved, design)
    assert {key: found[key] for key in wanted} == wanted
    logs = [text for text in design.plan.warnings if "--logs-per-epoch" in text]
    if command.seed == "000":
        warns = command.plan.get("warns", "")
        assert [text.startswith(warns) for text in logs] == ([True] if warns else [])
    if command.launch:
        assert request is not None
        assert launch_facts(request, command) == command.launch
        assert design.plan.devices_per_replica == command.launch.get("devices_per_replica", 4)


@pytest.mark.parametrize("command", [pytest.param(c, id=c.name) for c in COMMANDS if c.launch and c.plan])
def test_replicas_of_the_program_give_way_to_the_launcher_s(command: SeedCommand, tmp_path: Path, shell) -> None:
    request, script, argv = split_launch(command.words(tmp_path))
    words = script_words(script, [*argv, "--replicas", "3"])
    for name, value in variables(request).items():
        shell.setenv(name, value)
    resolved, design = planned(words)
    assert design.plan.batch.num_replicas == command.launch["replicas"]
    (told,) = [text for text in resolved.warnings if "num_replicas" in text]
    each = command.launch["replicas"] // command.launch["processes"]
    assert told.startswith("num_replicas 3 (command line) is ignored: the launcher says")
    assert told.endswith(f"{each} in each of {command.launch['processes']} processes")


@pytest.mark.parametrize("command", [pytest.param(c, id=c.name) for c in COMMANDS if c.kind == "validate"])
def test_validation(command: SeedCommand, tmp_path: Path) -> None:
    request, script, argv = split_launch(command.words(tmp_path))
    assert request is not None
    assert launch_facts(request, command) == command.launch
    words = script_words(script, argv)
    # train.py goes on with a run that is not finished (here there is none), and validates one that is
    assert words[:2] == ["resume" if script == "train" else "validate", "generated_checkpoints_dir_path"]
    taken = dict(read_arguments(without_recipe(words[2:]), "headrace validate").options)
    assert taken.pop("dataset_path").startswith("your_dataset")
    assert taken == ({} if command.line == 224 else {"shards": "1"})


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
        planned(script_words(script, argv))
    assert command.refused in str(caught.value)


def test_every_command_is_looked_at_in_some_way() -> None:
    kinds = {command.kind for command in COMMANDS}
    assert kinds == {"train", NOT_OURS, "restore", "variable", "validate", "mpirun", "help", "profile"}
    for command in COMMANDS:
        assert command.does.endswith((".", "`")), command.name
        if command.kind == "train":
            assert bool(command.plan) + bool(command.bench) + bool(command.refused) == 1, command.name
            assert command.run or command.refused, command.name


def test_data_dir(tmp_path: Path, shell) -> None:
    name, _ = shlex.split(at("001", 71).text)[1].split("=")
    shell.setenv(name, str(tmp_path))
    resolved, _ = planned(script_words("train", ["--dataset", "cifar-10", "--batch-size", "8"]))
    assert resolved.config.data.dataset_path == str(tmp_path)


def test_workers_named_by_tf_config() -> None:
    for line, process in ((301, 0), (308, 1)):
        place = detect_process_info({"TF_CONFIG": tf_config(line)}, distributed=True)
        assert place is not None
        assert (place.process, place.num_processes) == (process, 2)


def test_a_worker_started_by_mpirun_takes_its_number_from_there() -> None:
    words = shlex.split(at("001", 313).text)
    config = next(word for word in words if word.startswith("TF_CONFIG=")).removeprefix("TF_CONFIG=")
    environ = {"TF_CONFIG": config, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    place = detect_process_info(environ, distributed=True)
    assert place is not None
    assert (place.process, place.num_processes) == (1, 2)


def test_help_of_a_model_has_its_options(capsys) -> None:
    _, script, argv = split_launch(at("001", 365).words(Path()))
    with pytest.raises(SystemExit) as left:
        run_script(script, argv)
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"--{name}" in printed for name in ("group-dim", "expand-ratio", "width-coefficient"))


def test_restore(tmp_path: Path, capsys) -> None:
    command = at("001", 52)
    place = Path(split_launch(command.words(tmp_path))[2][1])
    tiny = "--model-name toy_model --num-epochs 2 --weight-updates-per-epoch 2 --platform cpu --progress plain"
    saved = ["--log-dir", str(place.parent), "--run-name", place.name, "--compilation-cache-dir", "none"]
    assert main(["train", *tiny.split(), *saved]) == 0
    newest = sorted((place / "checkpoints").glob("step_*"))[-1]
    shutil.rmtree(newest)
    capsys.readouterr()
    _, script, argv = split_launch(command.words(tmp_path))
    assert run_script(script, argv) == 0
    assert re.search(r"step 4/4  loss \d", capsys.readouterr().out)
    assert newest.is_dir()
    # A run that has come to its end: train.py --restore-path validates it, as the seed's line for 64 IPUs does.
    assert run_script("train", ["--restore-path", str(place), "--platform", "cpu"]) == 0
    assert re.search(r"^ +4 +2\.00 +raw ", capsys.readouterr().out, re.MULTILINE)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where compiled programs are kept: many commands differ in words only."""
    return tmp_path_factory.mktemp("compiled")


QUICK = [command for command in COMMANDS if command.run == "quick" and (command.plan or command.bench)]


@pytest.mark.parametrize("command", [pytest.param(command, id=command.name) for command in QUICK])
def test_execution(command: SeedCommand, tmp_path: Path, cache: Path, capsys) -> None:
    if command.wandb:
        pytest.importorskip("wandb")
    _, script, argv = split_launch(command.words(tmp_path))
    assert run_script(script.removesuffix("_ipu"), reduced(script, argv, tmp_path, cache)) == 0
    check_output(command, capsys.readouterr().out)
