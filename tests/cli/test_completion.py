"""Shell completion: what is offered, how quickly, and that real shells complete with it."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headrace
from headrace.cli.completion import complete, main
from headrace.core.errors import ConfigError

SRC = str(Path(headrace.__file__).parent.parent)


def offered(line: str) -> list[str]:
    return [word for word, _ in complete(line.split(" "))]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/first", "runs/second", "deep/inside"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/first", "runs/second"):
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "mine.yml").write_text("small: {seed: 1}\n_base: {}\nlarge:\n  seed: 2\n")
    return tmp_path


def test_commands_options_and_choices():
    assert offered("tra") == ["train"]
    assert {"train", "resume", "runs", "compare", "completion"} <= set(offered(""))
    assert {"--lr-schedule", "--lr-staircase"} <= set(offered("train --lr-s"))
    assert "--no-shuffle" in offered("train --no-sh")
    assert offered("train --device c") == ["cpu", "cuda"]
    assert offered("train --device=c") == ["--device=cpu", "--device=cuda"]
    assert offered("train --device = c") == ["cpu", "cuda"], "bash divides at the equals sign"
    assert offered("train --help lea") == ["learning"]
    assert "--model-name" not in offered("resume runs/x --m")
    assert offered("export x --format o") == ["onnx"]
    assert offered("predict x --form") == ["--format"]
    assert offered("data ver") == ["verify"]
    assert offered("data g") == ["get"]
    assert "--dataset-path" in offered("data verify --data")


def test_recipes_networks_and_runs(place):
    assert "cifar10_resnet20" in offered("train --config cifar10_")
    assert offered("train --config-path mine.yml --config ") == ["large", "small"]
    assert offered("train --model efficientnet_b7") == ["efficientnet_b7"]
    assert offered("models show squeeze") == ["squeezenet"]
    assert offered("resume ") == ["runs/first", "runs/second"]
    assert offered("profile ") == ["runs/first", "runs/second"]
    assert offered("compare runs/first runs/s") == ["runs/second"]
    assert offered("predict d") == ["deep/"]
    assert offered("validate runs/none/") == []


def test_files_are_left_to_the_shell():
    assert offered("train --dataset-path /tm") == []
    assert offered("train --seed 1") == []
    assert offered("nothing --x") in ([], ["--x"])


def test_wrong_words(capsys):
    assert main(["--help"]) == 0
    assert "usage: headrace completion" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="completion for tcsh"):
        main(["tcsh"])


def test_it_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys, resource; from headrace.cli.main import main; main(['completion', 'words', '--', 'train', '--l']);"
        "assert not {'jax', 'numpy'} & set(sys.modules);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_utime, file=sys.stderr)"
    )
    environ = {**os.environ, "PYTHONPATH": SRC}
    command, seconds = [sys.executable, "-c", code], []
    for _ in range(3):  # a busy machine takes longer, also in processor time
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
        assert "--lr\t" in done.stdout
        seconds.append(float(done.stderr))
    assert min(seconds) < 0.3


@pytest.fixture
def environ(place) -> dict[str, str]:
    """Return an environment in which `headrace` is this source tree."""
    program = place / "bin" / "headrace"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{SRC}" exec "{sys.executable}" -m headrace "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "TERM": "dumb", "HOME": str(place)}


def typed(command: list[str], environ: dict[str, str], setup: str, keys: str, expected: str) -> str:
    """Type into an interactive shell on a terminal; return what it shows once `expected` is there."""
    terminal, its_end = pty.openpty()
    shell = subprocess.Popen(
        command, env=environ, stdin=its_end, stdout=its_end, stderr=its_end, start_new_session=True
    )
    try:
        shown = ""
        os.write(terminal, f"{setup}; echo RE''ADY\n".encode())
        for stop, then in (("READY\r", keys), (expected, "")):
            until = time.monotonic() + 30
            while stop not in shown and time.monotonic() < until:
                if select.select([terminal], [], [], 0.2)[0]:
                    shown += os.read(terminal, 4096).decode(errors="replace")
            os.write(terminal, then.encode())
            shown = "" if then else shown
        return shown
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)
        os.close(its_end)


def test_bash_completes(environ):
    shown = typed(
        ["bash", "--norc", "--noprofile", "-i"],
        environ,
        'eval "$(headrace completion bash)"',
        "headrace tra\t--config cifar10_resnet2\t--device=cud\t",
        "--device=cuda",
    )
    assert "headrace train --config cifar10_resnet20 --device=cuda" in shown


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_completes(environ):
    setup = 'autoload -U compinit; compinit -u -D; eval "$(headrace completion zsh)"'
    shown = typed(["zsh", "-f", "-i"], environ, setup, "headrace res\truns/f\t", "runs/first")
    assert "runs/first" in shown


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes(environ):
    script = 'headrace completion fish | source; complete -C "headrace train --config cifar10_resnet2"'
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\t")[0] == "cifar10_resnet20"
