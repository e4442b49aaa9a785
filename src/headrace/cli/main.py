"""The `headrace` command: find the command's file, run it, and turn errors for people into words and an exit code."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from headrace.core.errors import HeadraceError, did_you_mean
from headrace.core.version import __version__

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: its name, the module whose `main(argv)` runs it, and a line of help."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command(name="train", module="headrace.cli.train", help="train a network; alone, the embedded default"),
    Command(name="validate", module="headrace.cli.validate", help="validate a run, or one of its checkpoints"),
    Command(name="resume", module="headrace.cli.resume", help="go on with a run from its newest good checkpoint"),
    Command(name="launch", module="headrace.cli.launch", help="start the processes of a job, here or on other hosts"),
    Command(name="plan", module="headrace.cli.plan", help="print the arithmetic of a run without a device"),
    Command(name="bench", module="headrace.cli.bench", help="measure the throughput of training or inference"),
    Command(name="models", module="headrace.cli.models", help="list the networks with their parameters and FLOPs"),
    Command(name="configs", module="headrace.cli.configs", help="list and show named configurations and the options"),
    Command(name="predict", module="headrace.cli.predict", help="predict the classes of images"),
    Command(name="average", module="headrace.cli.average", help="average the checkpoints of a run, and validate it"),
    Command(name="export", module="headrace.cli.export", help="hand weights or a whole network to other programs"),
    Command(name="data", module="headrace.cli.data", help="check, build, pack and measure data sets"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return report(lambda: words)


def run_script(script: str, argv: Sequence[str] | None = None) -> int:
    """Run a script of the reference by its name; return the exit code."""
    from headrace.reference.scripts import SCRIPTS

    arguments = list(sys.argv[1:] if argv is None else argv)
    return report(lambda: SCRIPTS[script](arguments))


def report(words_of: Callable[[], list[str]]) -> int:
    """Run the command of these words; what goes wrong, also while they are found, becomes words and an exit code."""
    try:
        return _run(words_of())
    except HeadraceError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has left (`headrace configs | head`); Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    name = words[0] if words else ""
    if name in ("", "-h", "--help", "help"):
        print(_help())
        return 0 if name else HeadraceError.exit_code
    if name in ("-V", "--version"):
        print(f"headrace {__version__}")
        return 0
    modules = {command.name: command.module for command in COMMANDS}
    modules |= {"weight_avg": modules["average"], "poprun": modules["launch"]}  # as the reference calls them
    if name not in modules:
        raise HeadraceError(f"There is no command {name}.", remedy=did_you_mean(name, modules))
    code = importlib.import_module(modules[name]).main(words[1:])
    sys.stdout.flush()  # here, where a reader that has left is caught
    return code


def _help() -> str:
    lines = ["usage: headrace COMMAND ...", "", "Train convolutional networks so that the accelerator never waits.", ""]
    lines += [f"  {command.name:10}{command.help}" for command in COMMANDS]
    return "\n".join([*lines, "", "`headrace COMMAND --help` says more; `headrace --version` prints the version."])


def print_error(error: HeadraceError) -> None:
    """Print an error for people, on stderr."""
    sys.stdout.flush()
    print(f"headrace: {_which_process()}{error.problem}", file=sys.stderr)
    for name, text in (("rule", error.rule), ("remedy", error.remedy)):
        if text:
            print(f"  {name}: {text}", file=sys.stderr)


def _which_process() -> str:
    """Name this process where it is one of several and not the first, which speaks for all."""
    from headrace.job import detect_process_info

    with suppress(HeadraceError):  # a place that cannot be read is the error that is being told
        place = detect_process_info(os.environ)
        return f"process {place.process}: " if place and place.process else ""
    return ""
