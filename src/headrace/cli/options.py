"""What the commands share: reading an argv with `--config`, `--config-path` and all options into a configuration."""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cli.help import find_request, has_effect, help_text, screen_of, without_help
from headrace.cli.slips import is_data, meant_by
from headrace.cli.tables import print_fitted
from headrace.config.command_line import Extra, build_parser, take_options, take_value
from headrace.config.field import normalise_name, option_names
from headrace.config.load import Resolved, choose_block, resolve
from headrace.config.section_run import PLATFORMS
from headrace.config.translations import ApplicationHelp, known_options, translation
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.local_path import WEB, local_text


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A parsed argv: the schema's options as written, and the arguments that only this command has."""

    options: Mapping[str, Any]
    args: argparse.Namespace


def parse(
    argv: list[str], prog: str, extra: Extra | None = None, description: str = ""
) -> tuple[Resolved, argparse.Namespace]:
    """Return the configuration that an argv describes, and the namespace of the command's other arguments.

    `extra` adds those arguments to the parser; `prog` is the command as typed, such as `headrace train`.
    """
    parsed = read_config_arguments(argv, prog, extra, description)
    return resolve_arguments(parsed), parsed.args


def resolve_arguments(parsed: Parsed, environ: Mapping[str, str] | None = None) -> Resolved:
    """Return the configuration that the arguments describe; without `environ`, in that of the process."""
    return resolve(parsed.options, parsed.args.config, parsed.args.config_path, environ)


def read_config_arguments(argv: list[str], prog: str, extra: Extra | None = None, description: str = "") -> Parsed:
    """Parse an argv with `--config` and `--config-path`, without resolving the configuration yet."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("recipe")
        group.add_argument(
            "--config", metavar="NAME", help="recipe to start from (`headrace configs` lists them); none uses no recipe"
        )
        group.add_argument("--config-path", type=local_text, metavar="FILE", help="YAML file of your own recipes")
        if extra:
            extra(parser)

    return read_arguments(argv, prog, add, description, takes_data=True)


def read_arguments(
    argv: list[str], prog: str, extra: Extra | None = None, description: str = "", *, takes_data: bool = False
) -> Parsed:
    """Parse an argv without a configuration, for commands that start from a saved one.

    With `takes_data` a folder that is no other argument's is the dataset's: `headrace train photos/`.
    """
    parser = build_parser(prog, extra, description)
    if request := find_request(argv):
        print(help_text(prog, parser, request, _application_of(argv, parser)))
        raise SystemExit(0)
    options, left = take_options(argv, parser, known_options())
    args, unknown = parser.parse_known_intermixed_args(left)
    if takes_data and len(unknown) == 1 and "dataset_path" not in options and is_data(unknown[0]):
        options["dataset_path"] = unknown.pop()
    if unknown:
        problem = f"Unrecognized arguments: {' '.join(unknown)}."
        raise ConfigError(problem, remedy=meant_by(unknown, prog) or f"See `{prog} --help`.")
    parsed = Parsed(options=options, args=args)
    _note_without_effect(prog, options)
    return parsed


def _application_of(argv: list[str], parser: argparse.ArgumentParser) -> ApplicationHelp | None:
    """Return what the application that a call for help names says otherwise."""
    words = without_help(argv)
    if not any(word.startswith("--") for word in words):  # it would have to be found among what is installed
        return None
    return translation().help(words, take_options(words, parser, known_options())[0])


def _note_without_effect(prog: str, options: Mapping[str, object]) -> None:
    """Say which options a command accepts but makes no use of."""
    screen, known = screen_of(prog), option_names(known_options())
    if not screen.strict:
        return
    idle = [name for name in options if not has_effect(screen, known_options()[known[normalise_name(name)].name])]
    if idle:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        print_fitted(f"note: no effect on {prog}: {flags}", sys.stderr)


def without_recipe(argv: list[str]) -> list[str]:
    """Drop a named configuration, once it is known to be one: a saved run brings its own options."""
    name, words = take_value(argv, "--config")
    file, words = take_value(words, "--config-path")
    if name is not None:
        choose_block(name, file)
        print(f"note: --config {name} is ignored: the options of the run apply", file=sys.stderr)
    return words


WHICH = ("auto", "raw", "ema")


def add_path_argument(parser: argparse.ArgumentParser) -> None:
    """Add the run or checkpoint that a trained network comes from, unless its weights are named."""
    parser.add_argument("path", nargs="?", metavar="RUN_DIR|CHECKPOINT", help="a run (its best weights) or checkpoint")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that uses a trained network: whose weights it has, and where it runs."""
    parser.add_argument(
        "--weights",
        default="",
        metavar="NAME",
        help="instead of a run: a name of `headrace models --weights`, hf:OWNER/NAME, an address or a file",
    )
    parser.add_argument("--use", choices=WHICH, default="auto", help="raw or averaged weights of a run [the better]")
    add_platform_argument(parser, "kind of device to run on [auto]", default="auto")


def add_platform_argument(parser: argparse.ArgumentParser, says: str, default: str | None = None) -> None:
    """Add `--platform`, with the spellings that `train` accepts."""
    parser.add_argument(
        "--platform",
        "--device",
        type=lambda text: "cuda" if text == "gpu" else text,
        choices=PLATFORMS,
        default=default,
        help=says,
    )


def model_and_weights(path: str | None, weights: str, use: str) -> tuple[str, str]:
    """Return (run, checkpoint or name of weights; which weights of a run).

    `--weights raw` is an older spelling of `--use raw`.
    """
    if weights in WHICH:
        weights, use = "", weights if use == "auto" else use
    if bool(path) == bool(weights):
        problem = f"Both {path} and --weights {weights} are given." if path else "No run and no weights are named."
        raise ConfigError(problem, remedy="Name a run or a checkpoint, or give --weights NAME.")
    return local_text(path or weights, "--weights" if weights else "The run", WEB), use


def check_output(file: Path | None, flag: str) -> None:
    """Refuse a file that cannot be written, before anything is computed for it."""
    if file is None:
        return
    folder = file.absolute().parent
    if file.is_dir():
        why = "it is a directory"
    elif not folder.is_dir():
        why = f"there is no directory {file.parent}"
    elif not os.access(folder, os.W_OK):
        why = f"nothing may be written into {folder}"
    else:
        return
    raise ConfigError(f"Cannot write {file}: {why}.", remedy=f"Name another file with {flag}.")


@contextmanager
def writing(file: Path, flag: str) -> Iterator[None]:
    """Say which file it is that cannot be written, and the option that names another."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"Cannot write {file}: {error.strerror or error}.", remedy=f"Name another file with {flag}."
        ) from error


def print_remarks(resolved: Resolved) -> None:
    """Print the warnings and notes of a configuration to stderr."""
    for kind, remarks in (("warning", resolved.warnings), ("note", resolved.notes)):
        for remark in remarks:
            print_fitted(f"{kind}: {remark}", sys.stderr)
