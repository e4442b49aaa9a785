"""The `headrace` program: import the command's module, run it, and turn errors into messages and exit codes."""

import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from headrace.cli.commands import COMMANDS, TOPICS
from headrace.cli.ctrl_c import INTERRUPTED, catch_ctrl_c, leave_on_ctrl_c
from headrace.cli.help_screens import HELP, HELP_ALL, SCREENS
from headrace.cli.launch import launch
from headrace.core import __version__
from headrace.core.errors import ConfigError, HeadraceError, RunStopped, did_you_mean
from headrace.core.process import leave_threads, start_command, tuned_interpreter


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
    commands = {**COMMANDS, "weight_avg": COMMANDS["average"], "poprun": COMMANDS["launch"]}  # the reference's names
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
    for command in COMMANDS.values():
        if name.lower() in command.also.split():
            return f"Did you mean {command.name}?"
    if name.startswith("-") and name not in ("-", "--"):
        return f"The command comes first: headrace train {name} ..."
    if Path(name).is_dir():
        return f"Train on its images with: headrace train {name}"
    return did_you_mean(name, COMMANDS)


def _help() -> str:
    lines = ["usage: headrace COMMAND ...", "", "Train convolutional networks so that the accelerator never waits."]
    for topic, commands in TOPICS.items():
        lines += ["", f"{topic}:", *(f"  {command.name:12}{command.help}" for command in commands)]
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
