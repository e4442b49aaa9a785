"""The `headrace` program: import the command's module, run it, and turn errors into messages and exit codes."""

import errno
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from headrace.cli.ctrl_c import INTERRUPTED, catch_ctrl_c, leave_on_ctrl_c
from headrace.cli.help_screens import HELP, HELP_ALL, SCREENS
from headrace.cli.launch import launch
from headrace.core import __version__
from headrace.core.errors import ConfigError, HeadraceError, RunStopped, did_you_mean
from headrace.core.process import leave_threads, start_command, tuned_interpreter


class Command(NamedTuple):
    """A command: its name, the file of cli/ and the function there that runs it with an argv, and a line of help."""

    name: str
    file: str
    function: str
    help: str

    def imported(self) -> Callable[[list[str]], int]:
        """Import the file, and return the function."""
        return getattr(importlib.import_module(f"headrace.cli.{self.file}"), self.function)


COMMANDS = (
    Command("train", "train", "main", "train a network; alone, the demo"),
    Command("resume", "train", "resume", "resume a run from its last checkpoint"),
    Command("sweep", "sweep", "main", "train for several values of options, or several folds"),
    Command("validate", "validate", "main", "measure the accuracy of a run's checkpoints"),
    Command("predict", "predict", "main", "predict the classes of images"),
    Command("explain", "explain", "explain", "show where in an image a network found its class"),
    Command("demo", "demo", "demo", "serve a page to drop photographs into"),
    Command("export", "export", "main", "export weights or a network (ONNX, safetensors, .pth)"),
    Command("push", "push", "main", "publish a network on the Hugging Face hub, with a model card"),
    Command("convert", "convert", "convert", "make a checkpoint of weights from elsewhere"),
    Command("average", "average", "average", "average checkpoints of a run, and validate the result"),
    Command("runs", "runs", "main", "list runs with their results"),
    Command("compare", "compare", "compare", "print what differs between runs"),
    Command("report", "report", "report", "write a run's report, or a comparison, as an HTML file"),
    Command("board", "board", "board", "serve a live page of the runs in a directory"),
    Command("plan", "plan", "main", "print batches, steps and memory of a run, without a device"),
    Command("bench", "bench", "main", "measure the throughput of training or inference"),
    Command("profile", "profile", "profile", "print where the time of the devices goes"),
    Command("lr-find", "lr_find", "lr_find", "find a learning rate by a short run, with a plot"),
    Command("models", "models", "models", "list the networks"),
    Command("configs", "configs", "configs", "list and show recipes, with measured results"),
    Command("devices", "devices", "devices", "list devices, their memory, and versions"),
    Command("data", "data", "main", "check, build, pack and measure datasets"),
    Command("completion", "completion", "main", "print the completion script of a shell"),
    Command("launch", "launch", "launch", "start the processes of a job, here or on other hosts"),
)
# What others call a command, or what it is looked for as.
_OTHER_COMMANDS = {
    "train": "fit finetune fine-tune fine_tune learn run start",
    "sweep": "tune search grid gridsearch hpo optuna kfold k-fold cv",
    "resume": "continue restart",
    "validate": "eval evaluate val test score",
    "predict": "infer inference classify detect label",
    "explain": "gradcam grad-cam cam saliency interpret",
    "push": "upload publish share hub",
    "convert": "import load",
    "average": "swa ema ensemble",
    "runs": "ls list history experiments results",
    "compare": "diff",
    "demo": "serve gradio app try",
    "board": "ui dashboard tensorboard server web",
    "bench": "benchmark speed perf",
    "lr-find": "lr_find lrfind find-lr find_lr lr-finder",
    "models": "model networks zoo architectures archs",
    "configs": "config recipes recipe options settings",
    "devices": "device info env gpus checks",
    "data": "dataset datasets download verify",
    "launch": "torchrun mpirun distributed",
}
_TOPICS = {
    "train": ("train", "resume", "sweep", "lr-find"),
    "use": ("validate", "predict", "explain", "demo", "export", "push", "convert", "average"),
    "results": ("runs", "compare", "report", "board"),
    "look up": ("models", "configs", "devices", "data", "completion"),
    "plan and measure": ("plan", "bench", "profile", "launch"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    if argv is not None:
        return report(lambda: list(argv))
    return _run_process(lambda: sys.argv[1:])


def run_script(script: str, argv: Sequence[str] | None = None) -> int:
    """Run a script of another application by its name; return the exit code."""
    from headrace.config.translations import translation

    def words() -> list[str]:
        # Their options are not among those of the first screen of help.
        given = list(sys.argv[1:] if argv is None else argv)
        return [HELP_ALL if word in HELP else word for word in translation().script_words(script, given)]

    return report(words) if argv is not None else _run_process(words)


def poprun(argv: list[str] | None = None) -> int:
    """Run a line of poprun, as the reference's documents have them."""
    if argv is not None:
        return report(lambda: argv, _poprun)
    return _run_process(lambda: sys.argv[1:], _poprun)


def _poprun(words: list[str]) -> int:
    return launch(words, "poprun")


def _run_process(words_of: Callable[[], list[str]], run: Callable[[list[str]], int] | None = None) -> int:
    """Run the one command of this process; return the exit code, unless threads are left that have to be left."""
    start_command()
    catch_ctrl_c()
    code = report(words_of, run)
    leave_on_ctrl_c()
    leave_threads(code, surely=code == INTERRUPTED)
    return code


def report(words_of: Callable[[], list[str]], run: Callable[[list[str]], int] | None = None) -> int:
    """Run the command line that the function returns; errors, also those of the function, become an exit code."""
    words: list[str] = []
    try:
        with tuned_interpreter():
            words = words_of()
            return (run or _run)(words)
    except HeadraceError as error:
        print_error(error, words)
        return error.exit_code
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "can't start new thread" not in str(error):
            raise
        rule = "A limit of the shell or the container (ulimit -v, ulimit -u), or the machine's memory, is reached."
        stopped = RunStopped(
            f"The system gives this process no more memory or threads: {error or 'no memory is left'}.",
            rule=rule,
            remedy="Raise the limit, end other programs, or give fewer threads (--pipeline-num-parallel).",
        )
        print_error(stopped, words)
        return stopped.exit_code
    except BrokenPipeError:
        # The reader has seen enough (`headrace configs | head`); Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # any value that may be a path can be too long for one
            raise
        name = str(error.filename)
        print_error(ConfigError(f"{name[:40]}... is too long for the name of a file: {len(name):,} letters."), words)
        return ConfigError.exit_code


def _run(words: list[str]) -> int:
    name = words[0] if words else ""
    if name == "help" and words[1:]:  # help train
        name, words = words[1], [*words[1:2], "--help", *words[2:]]
    if name in ("", "help", HELP_ALL, *HELP):
        print(_help())
        return 0 if name else HeadraceError.exit_code
    if name in ("-V", "--version"):
        from headrace.native.library import describe_kernels

        print(f"headrace {__version__}")
        print(f"kernels for CPUs: {describe_kernels()}")
        return 0
    commands = {command.name: command for command in COMMANDS}
    commands |= {"weight_avg": commands["average"], "poprun": commands["launch"]}  # the reference's names
    if name not in commands:
        raise HeadraceError(f"There is no command {name}.", remedy=_command_meant(name))
    command = commands[name]
    rest = words[1:]
    if rest[:1] == [HELP_ALL] and name not in SCREENS:  # there is one screen only
        rest = ["--help"]
    code = command.imported()(rest)
    sys.stdout.flush()  # here, where a closed pipe is caught
    return code


def _command_meant(name: str) -> str:
    """Return what to type instead of a command that is not one: by meaning first, then by letters."""
    for command, others in _OTHER_COMMANDS.items():
        if name.lower() in others.split():
            return f"Did you mean {command}?"
    if name.startswith("-") and name not in ("-", "--"):
        return f"The command comes first: headrace train {name} ..."
    if Path(name).is_dir():
        return f"Train on its images with: headrace train {name}"
    return did_you_mean(name, [command.name for command in COMMANDS])


def _help() -> str:
    texts = {command.name: command.help for command in COMMANDS}
    lines = ["usage: headrace COMMAND ...", "", "Train convolutional networks so that the accelerator never waits."]
    for topic, names in _TOPICS.items():
        lines += ["", f"{topic}:", *(f"  {name:12}{texts[name]}" for name in names)]
    last = "`headrace COMMAND --help` describes a command; `headrace --version` prints the version."
    return "\n".join([*lines, "", last])


def print_error(error: HeadraceError, words: Iterable[str] = ()) -> None:
    """Print an error with its rule and remedy, on stderr, with the options under the names that `words` have."""
    from headrace.cli.tables import print_fitted

    sys.stdout.flush()
    print_fitted(f"headrace: {_which_process()}{_as_typed(error.problem, words)}", sys.stderr)
    for name, text in (("rule", error.rule), ("remedy", _as_typed(error.remedy, words))):
        if text:
            print_fitted(f"  {name}: {text}", sys.stderr)


def _as_typed(text: str, words: Iterable[str]) -> str:
    """Return a message that calls an option as the command line does: --epochs, not --num-epochs."""
    typed = {word.partition("=")[0] for word in words if word.startswith("--")}
    if not typed or "--" not in text:
        return text
    from headrace.config.field import normalise_name
    from headrace.config.translations import known_options

    for option in known_options().values():
        for flag in typed - {option.flag}:
            if normalise_name(flag.removeprefix("--")) in option.aliases:
                text = re.sub(rf"(?<![\w-]){option.flag}(?![\w-])", flag, text)
    return text


def _which_process() -> str:
    """Name this process where it is one of several and not the first, whose messages stand for all."""
    from headrace.job import detect_process_info

    with suppress(HeadraceError):  # this process's place cannot be determined: that is the error being printed
        place = detect_process_info(os.environ)
        return f"process {place.process}: " if place and place.process else ""
    return ""
