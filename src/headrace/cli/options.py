"""What the commands share: a configuration from an argv, with `--config`, `--config-path` and all options."""

import argparse
import sys
from typing import Any

from headrace.config.arguments import Extra, build_parser, take_options
from headrace.config.load import Resolved, resolve


def parse(
    argv: list[str], prog: str, extra: Extra | None = None, description: str = ""
) -> tuple[Resolved, argparse.Namespace]:
    """Return the configuration that an argv asks for, and the namespace of the command's own arguments.

    `extra` adds a command's own arguments to the parser; `prog` is the command as typed, such as `headrace train`.
    """

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("configuration")
        group.add_argument(
            "--config", metavar="NAME", help="named configuration to start from, or none (default: default)"
        )
        group.add_argument("--config-path", metavar="FILE", help="YAML file that has it (default: the shipped recipes)")
        if extra:
            extra(parser)

    options, own = read_words(argv, prog, add, description)
    return resolve(options, own.config, own.config_path), own


def parse_overrides(argv: list[str], prog: str, metavar: str, help: str) -> tuple[str, dict[str, Any]]:
    """Return the one positional argument and the options given, for commands that start from a saved configuration."""
    options, own = read_words(argv, prog, lambda parser: parser.add_argument("path", metavar=metavar, help=help))
    return own.path, options


def read_words(
    argv: list[str], prog: str, extra: Extra | None = None, description: str = ""
) -> tuple[dict[str, Any], argparse.Namespace]:
    """Take an argv apart: the schema's options as written, and the command's own arguments."""
    parser = build_parser(prog, description, extra)
    options, left = take_options(argv, parser)
    return options, parser.parse_args(left)


def print_remarks(resolved: Resolved) -> None:
    """Print what the user should hear of a configuration, to stderr."""
    for kind, remarks in (("warning", resolved.warnings), ("note", resolved.notes)):
        for remark in remarks:
            print(f"{kind}: {remark}", file=sys.stderr)
