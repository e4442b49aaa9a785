"""The `headrace` command: help, version, errors in words, exit codes, and no JAX before it is needed."""

import contextlib
import importlib
import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from PIL import Image

import headrace
from headrace.cli import commands as commands_module
from headrace.cli.commands import COMMANDS
from headrace.cli.completion import _SCRIPTS
from headrace.cli.data import ACTIONS
from headrace.cli.main import main
from headrace.cli.tables import break_line
from headrace.core.errors import ConfigError, RunStopped

SRC = Path(headrace.__file__).parent.parent
HEAVY = ("jax", "numpy", "optax", "rich", "PIL")


def python(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": "100"}
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, env=environ, check=False)


def processor_seconds() -> float:
    """Return the time that ended subprocesses have computed; unlike the clock, it does not count others' work."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def use(monkeypatch: pytest.MonkeyPatch, action) -> None:
    """Make every command run `action(argv)`."""
    module = type("module", (), {"main": staticmethod(action)})
    real = importlib.import_module
    replaced = lambda name: module if name.startswith("headrace.cli.") else real(name)  # noqa: E731
    monkeypatch.setattr(commands_module.importlib, "import_module", replaced)


def test_help_lists_all_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in ("train", "validate", "resume", "plan", "bench", "models", "configs", "data"):
        assert f"\n  {name} " in out
    assert main([]) == 2


def test_version(capsys):
    assert main(["--version"]) == 0
    version, kernels = capsys.readouterr().out.splitlines()
    assert version == f"headrace {headrace.__version__}"
    assert kernels.startswith("kernels for CPUs: ")


def test_the_version_is_the_packages():
    pyproject = SRC.parent / "pyproject.toml"
    if not pyproject.is_file():
        pytest.skip("not run from the repository")
    assert tomllib.loads(pyproject.read_text())["project"]["version"] == headrace.__version__


def test_an_unknown_command(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "headrace: There is no command trian.\n  remedy: Did you mean train?\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--epochs abc", "--epochs is 'abc': not a whole number."),
        ("--num-epochs abc", "--num-epochs is 'abc'"),
        ("--lr=-1", "--lr is '-1': must be 0 or more."),
        ("--lr-schedule cos", "Did you mean cosine? Possible: const, cosine, flat_cosine,"),
        ("--freeze", "--freeze has no value."),
        ("--freeze --epochs 1", "--freeze has no value."),
        ("nowhere", "Unrecognized arguments: nowhere.\n  remedy: See `headrace train --help`."),
        ("photos/cats", "remedy: There is no file or folder photos/cats here."),
        ("resnet50", "remedy: A network is named with --model resnet50."),
        ("digits", "remedy: A dataset is named with --dataset digits."),
        ("cifar10_resnet20", "remedy: A recipe is named with --config cifar10_resnet20."),
        ("data=x imgsz=64 lr=0.1", "remedy: Options begin with two dashes: --dataset-path x --image-size 64 --lr 0.1."),
        ("-b 32", "remedy: Options begin with two dashes: --batch-size."),
        ("{path}/photos {path}", "remedy: A folder of images is given as --dataset-path {path}/photos."),
        ("{path}/a.pth", "remedy: A file of weights is given as --weights {path}/a.pth."),
        ("{path}/a.csv", "remedy: A list of images is given as --labels {path}/a.csv."),
        ("{path}/a.yml", "remedy: A file of recipes is given as --config-path {path}/a.yml --config NAME."),
        ("{path}/run", "{path}/run is a run: headrace resume {path}/run continues it"),
        ("--weights imagenet", "remedy: Weights of ImageNet have a name, such as timm/resnet50.a1_in1k."),
        ("--weights resnet50", "remedy: Of resnet50 there are: "),
        ("--dataset-path {path}/phtos", "remedy: Did you mean {path}/photos?"),
    ],
)
def test_slips_on_the_line_of_train(tmp_path: Path, capsys, line: str, words: str):
    (tmp_path / "photos").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    for suffix in ("pth", "csv", "yml"):
        (tmp_path / f"a.{suffix}").write_text("")
    assert main(["train", *line.format(path=tmp_path).split()]) == 2
    assert words.format(path=tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("fit", "train"), ("eval", "validate"), ("gradcam", "explain"), ("dashboard", "board"), ("ls", "runs")],
)
def test_other_names_of_commands(capsys, typed: str, meant: str):
    assert main([typed]) == 2
    assert capsys.readouterr().err == f"headrace: There is no command {typed}.\n  remedy: Did you mean {meant}?\n"


def test_no_other_name_is_a_command():
    names = [name for command in COMMANDS.values() for name in command.also.split()]
    assert len(set(names)) == len(names)
    assert not set(names) & set(COMMANDS)


def test_a_command_that_is_missing(tmp_path: Path, capsys):
    assert main(["--epochs", "3"]) == 2
    assert "remedy: The command comes first: headrace train --epochs ..." in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "headrace train " in capsys.readouterr().err


def test_help_on_a_command_in_either_order(capsys):
    texts = []
    for line in (["help", "train"], ["train", "--help"]):
        with contextlib.suppress(SystemExit):
            main(line)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "usage: headrace train" in texts[0]


def test_a_folder_needs_no_option(tmp_path: Path, capsys):
    for label in ("ants", "bees"):
        (tmp_path / label).mkdir()
        for i in range(10):
            Image.new("RGB", (16, 16), (i, i, i)).save(tmp_path / label / f"{i}.png")
    assert main(["plan", str(tmp_path), "--model", "cifar_resnet8", "--image-size", "16"]) == 0
    assert "2 classes (ants, bees)" in capsys.readouterr().out


def test_errors_for_people_are_words_and_a_code(monkeypatch, capsys):
    def wrong(argv):
        raise ConfigError("A is 3.", rule="A must be 4.", remedy="Set it to 4.")

    use(monkeypatch, wrong)
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "headrace: A is 3.\n  rule: A must be 4.\n  remedy: Set it to 4.\n"

    def stopped(argv):
        raise RunStopped("The loss is not finite.")

    use(monkeypatch, stopped)
    assert main(["train"]) == 3
    assert capsys.readouterr().err == "headrace: The loss is not finite.\n"


def test_a_path_that_is_too_long_is_no_traceback(capsys):
    assert main(["plan", "--weights", "a_" * 200]) == 2
    assert "too long for the name of a file: 400 letters" in capsys.readouterr().err


def test_an_interrupt_is_130_and_a_bug_keeps_its_traceback(monkeypatch):
    def interrupted(argv):
        raise KeyboardInterrupt

    use(monkeypatch, interrupted)
    assert main(["train"]) == 130

    def bug(argv):
        raise ZeroDivisionError

    use(monkeypatch, bug)
    with pytest.raises(ZeroDivisionError):
        main(["train"])


@pytest.mark.parametrize(
    "error", [MemoryError(), MemoryError("Unable to allocate"), RuntimeError("can't start new thread")]
)
def test_a_limit_of_the_system_is_said_in_words(monkeypatch, capsys, error):
    def fail(argv):
        raise error

    use(monkeypatch, fail)
    assert main(["train"]) == RunStopped.exit_code
    told = capsys.readouterr().err
    assert told.startswith("headrace: The system gives this process no more memory or threads:")
    assert "ulimit" in told


def test_a_command_gets_its_words_and_gives_its_code(monkeypatch):
    seen = []
    use(monkeypatch, lambda argv: seen.append(argv) or 75)
    assert main(["train", "--seed", "3"]) == 75
    assert seen == [["--seed", "3"]]


def test_a_reader_that_leaves_is_no_error():
    code = "import sys; from headrace.cli.main import main; sys.exit(main(['configs', 'options']))"
    environ = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        err = process.stderr.read()
    assert err == b""
    assert process.returncode == 0


LIGHT = ("--help", "--version", "configs", "configs show", "train --help", "train --help-all", "train --help lr")


@pytest.mark.parametrize("line", LIGHT)
def test_help_and_configurations_load_nothing_heavy(line):
    code = f"""
import sys
from headrace.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
heavy = [name for name in {HEAVY} if name in sys.modules]
assert code == 0 and not heavy, (code, heavy)
"""
    done = python(code, *line.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_is_quick():
    code = "import sys; from headrace.cli.main import main; sys.exit(main(['train', '--help']))"
    seconds = []
    for _ in range(3):  # a busy machine takes longer, also in processor time
        begin = processor_seconds()
        done = python(code)
        assert done.returncode == 0, done.stderr
        seconds.append(processor_seconds() - begin)
    assert min(seconds) < 0.3


@pytest.mark.parametrize("flag", ["-h", "--help", "--help-all"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_has_help(command, flag, capsys):
    try:
        code = main([command.name, flag])
    except SystemExit as stop:
        code = stop.code
    assert code == 0
    assert "usage: headrace" in capsys.readouterr().out


def test_the_parts_of_a_command_are_there():
    assert COMMANDS["data"].parts == tuple(ACTIONS)
    assert COMMANDS["completion"].parts == tuple(_SCRIPTS)


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("short enough", "short enough"),
        ("  rule: one two three four five six", "  rule: one two three\n    four five six"),
        ("  data   4.7 MiB  398 images, one two", "  data   4.7 MiB  398\n         images, one two"),
        ("one-two-three-four-five-six-seven", "one-two-three-four-five-six-seven"),
        ("dev 0 |F0 |F1 |F2 |F3 |F4 |F5 |F6 |", "dev 0 |F0 |F1 |F2 |F3 |F4 |F5 |F6 |"),
    ],
)
def test_lines_are_broken_between_words_below_their_last_column(line: str, broken: str):
    assert break_line(line, 24) == broken
