"""The `headrace` program: import the command's module, run it, and turn errors into messages and exit codes."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from headrace.cli.screens import HELP, HELP_ALL, SCREENS
from headrace.core import __version__
from headrace.core.errors import HeadraceError, did_you_mean

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: its name, a line of help, and the function of a module that runs it with an argv."""

    name: str
    module: str
    help: str
    function: str = "main"


COMMANDS = (
    Command(name="train", module="headrace.cli.train", help="train a network; alone, the demo"),
    Command(
        name="resume", module="headrace.cli.train", function="resume", help="resume a run from its last checkpoint"
    ),
    Command(name="validate", module="headrace.cli.validate", help="measure the accuracy of a run's checkpoints"),
    Command(name="predict", module="headrace.cli.predict", help="predict the classes of images"),
    Command(name="explain", module="headrace.cli.explain", help="show where in an image a network found its class"),
    Command(name="export", module="headrace.cli.export", help="export weights or a network (ONNX, safetensors, .pth)"),
    Command(name="convert", module="headrace.cli.convert_weights", help="make a checkpoint of weights from elsewhere"),
    Command(
        name="average", module="headrace.cli.average", help="average checkpoints of a run, and validate the result"
    ),
    Command(name="runs", module="headrace.cli.runs", help="list runs with their results"),
    Command(name="compare", module="headrace.cli.compare", help="print what differs between runs"),
    Command(name="report", module="headrace.cli.report", help="write a run's report, or a comparison, as an HTML file"),
    Command(name="board", module="headrace.cli.board", help="serve a live page of the runs in a directory"),
    Command(name="plan", module="headrace.cli.plan", help="print batches, steps and memory of a run, without a device"),
    Command(name="bench", module="headrace.cli.bench", help="measure the throughput of training or inference"),
    Command(name="profile", module="headrace.cli.profile", help="print where the time of the devices goes"),
    Command(name="lr-find", module="headrace.cli.lr_find", help="find a learning rate by a short run, with a plot"),
    Command(name="models", module="headrace.cli.models", help="list the networks"),
    Command(name="configs", module="headrace.cli.configs", help="list and show recipes, with measured results"),
    Command(name="devices", module="headrace.cli.show_devices", help="list devices, their memory, and versions"),
    Command(name="data", module="headrace.cli.data", help="check, build, pack and measure datasets"),
    Command(name="completion", module="headrace.cli.completion", help="print the completion script of a shell"),
    Command(name="launch", module="headrace.cli.launch", help="start the processes of a job, here or on other hosts"),
)
_TOPICS = {
    "train": ("train", "resume", "lr-find"),
    "use": ("validate", "predict", "explain", "export", "convert", "average"),
    "results": ("runs", "compare", "report", "board"),
    "look up": ("models", "configs", "devices", "data", "completion"),
    "plan and measure": ("plan", "bench", "profile", "launch"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return report(lambda: words)


def run_script(script: str, argv: Sequence[str] | None = None) -> int:
    """Run a script of the reference by its name; return the exit code."""
    from headrace.reference.scripts import SCRIPTS

    arguments = list(sys.argv[1:] if argv is None else argv)
    # Their options are not among those of the first screen of help.
    return report(lambda: [HELP_ALL if word in HELP else word for word in SCRIPTS[script](arguments)])


def report(words_of: Callable[[], list[str]]) -> int:
    """Run the command line that the function returns; errors, also those of the function, become an exit code."""
    try:
        return _run(words_of())
    except HeadraceError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough (`headrace configs | head`); Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(words: list[str]) -> int:
    name = words[0] if words else ""
    if name in ("", "help", HELP_ALL, *HELP):
        print(_help())
        return 0 if name else HeadraceError.exit_code
    if name in ("-V", "--version"):
        print(f"headrace {__version__}")
        return 0
    commands = {command.name: command for command in COMMANDS}
    commands |= {"weight_avg": commands["average"], "poprun": commands["launch"]}  # the reference's names
    if name not in commands:
        raise HeadraceError(f"There is no command {name}.", remedy=did_you_mean(name, commands))
    command = commands[name]
    rest = words[1:]
    if rest[:1] == [HELP_ALL] and name not in SCREENS:  # there is one screen only
        rest = ["--help"]
    code = getattr(importlib.import_module(command.module), command.function)(rest)
    sys.stdout.flush()  # here, where a closed pipe is caught
    return code


def _help() -> str:
    texts = {command.name: command.help for command in COMMANDS}
    lines = ["usage: headrace COMMAND ...", "", "Train convolutional networks so that the accelerator never waits."]
    for topic, names in _TOPICS.items():
        lines += ["", f"{topic}:", *(f"  {name:12}{texts[name]}" for name in names)]
    return "\n".join([*lines, "", "`headrace COMMAND --help` describes it; `headrace --version` prints the version."])


def print_error(error: HeadraceError) -> None:
    """Print an error with its rule and remedy, on stderr."""
    sys.stdout.flush()
    print(f"headrace: {_which_process()}{error.problem}", file=sys.stderr)
    for name, text in (("rule", error.rule), ("remedy", error.remedy)):
        if text:
            print(f"  {name}: {text}", file=sys.stderr)


def _which_process() -> str:
    """Name this process where it is one of several and not the first, whose messages stand for all."""
    from headrace.job import detect_process_info

    with suppress(HeadraceError):  # this process's place cannot be determined: that is the error being printed
        place = detect_process_info(os.environ)
        return f"process {place.process}: " if place and place.process else ""
    return ""
