"""The longer commands of the seeds, executed (see test_seed_commands.py); in processes where poprun has them."""

import re
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.seeds.reading import SeedCommand, read_commands, split_launch
from tests.seeds.running import (
    CROWDED,
    ROOT,
    SHORT,
    at,
    check_output,
    execute,
    free_ports,
    launched_words,
    needs_memory,
    reduced,
    reduced_worker,
    tf_config,
)

COMMANDS = read_commands()


@pytest.fixture(autouse=True)
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin in an empty directory, without variables that say where data lie."""
    monkeypatch.chdir(tmp_path)
    for name in ("DATASETS_DIR", "DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where compiled programs are kept: many commands differ in words only."""
    return tmp_path_factory.mktemp("compiled")


def once(commands: list[SeedCommand]) -> list[Any]:
    """Return the commands as parameters; one that the seeds print twice is executed once, under both names."""
    names: dict[str, list[str]] = {}
    for command in commands:
        names.setdefault(command.text, []).append(command.name)
    first = {command.text: command for command in reversed(commands)}
    return [pytest.param(first[text], id="=".join(same)) for text, same in names.items()]


SLOW = [command for command in COMMANDS if command.run == "slow" and (command.plan or command.bench)]
ALONE = [command for command in SLOW if not command.launch and not command.tf_config]
LAUNCHED = [command for command in SLOW if command.launch]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("command", once(ALONE))
def test_slow_execution(command: SeedCommand, tmp_path: Path, cache: Path) -> None:
    if command.wandb:
        pytest.importorskip("wandb")
    _, script, argv = split_launch(command.words(tmp_path))
    script_file = str(ROOT / f"{script}.py")
    check_output(command, execute([sys.executable, script_file, *reduced(script, argv, tmp_path, cache)], tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("command", once(LAUNCHED))
def test_slow_execution_in_processes(command: SeedCommand, tmp_path: Path, cache: Path) -> None:
    needs_memory(command.launch["processes"])
    check_output(command, execute(launched_words(command, tmp_path, cache), tmp_path, **CROWDED))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("command", once([command for command in COMMANDS if command.kind == "validate"]))
def test_slow_validation_in_processes(command: SeedCommand, tmp_path: Path, cache: Path) -> None:
    needs_memory(command.launch["processes"])
    words = command.words(tmp_path)
    name = words[words.index("--config") + 1]
    few = ["--replicas", "1", "--shards", "1", "--gradient-accumulation-count", "1"]  # whose checkpoint it is, is open
    trained = reduced("train", ["--config", name, *few], tmp_path, cache)
    execute([sys.executable, str(ROOT / "train.py"), *trained], tmp_path)
    run_dir = str(tmp_path / "runs" / "seed")
    words = ["localhost" if "," in word and word[0].isdecimal() else word for word in words]
    words = [run_dir if word == "generated_checkpoints_dir_path" else word for word in words]
    printed = execute([sys.executable, "-m", "headrace", *words, "--dry-run-steps", "1"], tmp_path, **CROWDED)
    assert re.search(r"^\[0\] +1 +0\.\d\d +raw ", printed, re.MULTILINE), printed


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_slow_workers_of_tf_config(tmp_path: Path, cache: Path) -> None:
    command = at("001", 302)
    _, script, argv = split_launch(command.words(tmp_path))
    (port,) = free_ports(1)
    words = [sys.executable, str(ROOT / f"{script}.py")]
    with ThreadPoolExecutor() as pool:
        started = []
        for line in (301, 308):
            environ = {"TF_CONFIG": tf_config(line).replace("worker0:3636", f"127.0.0.1:{port}")}
            more = words + reduced_worker(argv, tmp_path, cache)
            started.append(pool.submit(execute, more, tmp_path, **environ))
        printed = [job.result() for job in started]
    check_output(command, printed[0])


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun (Debian: openmpi-bin) is not installed")
def test_slow_workers_of_mpirun(tmp_path: Path, cache: Path) -> None:
    _, _, argv = split_launch(at("001", 302).words(tmp_path))
    (port,) = free_ports(1)
    text = at("001", 313).text.replace("worker0,worker1", "localhost:2").replace("worker0:3636", f"127.0.0.1:{port}")
    mpirun, _, _ = text.partition(" python train.py")
    root = ["--allow-run-as-root", "--oversubscribe"]
    words = [
        *shlex.split(mpirun),
        *root,
        sys.executable,
        str(ROOT / "train.py"),
        *reduced_worker(argv, tmp_path, cache),
    ]
    check_output(at("001", 302), execute(words, tmp_path))


@pytest.mark.slow
def test_slow_profile(tmp_path: Path, cache: Path) -> None:
    words = shlex.split(at("001", 463).text)
    _, script, argv = split_launch(words[words.index("--") + 1 :])
    more = ["--dataset", "cifar-10", "--model-size", "8", "--generated-data", *SHORT]
    more += ["--dialect", "tf1", "--log-dir", str(tmp_path / "runs"), "--run-name", "seed"]
    execute([sys.executable, str(ROOT / f"{script}.py"), *argv, *more], tmp_path)
    assert list((tmp_path / "runs" / "seed").rglob("*.xplane.pb"))
