"""What the commands share: reading an argv with `--config`, `--config-path` and all options into a configuration."""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.arguments import Extra, build_parser, take_options
from headrace.config.load import Resolved
from headrace.reference.entrance import ALL_SECTIONS, known_options, resolve


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


def resolve_arguments(parsed: Parsed) -> Resolved:
    """Return the configuration that the arguments describe."""
    return resolve(parsed.options, parsed.args.config, parsed.args.config_path)


def read_config_arguments(argv: list[str], prog: str, extra: Extra | None = None, description: str = "") -> Parsed:
    """Parse an argv with `--config` and `--config-path`, without resolving the configuration yet."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("configuration")
        group.add_argument(
            "--config", metavar="NAME", help="named configuration to start from, or none (default: default)"
        )
        group.add_argument("--config-path", metavar="FILE", help="YAML file that has it (default: the shipped recipes)")
        if extra:
            extra(parser)

    return read_arguments(argv, prog, add, description)


def read_arguments(argv: list[str], prog: str, extra: Extra | None = None, description: str = "") -> Parsed:
    """Parse an argv without a configuration, for commands that start from a saved one."""
    parser = build_parser(prog, description, extra, ALL_SECTIONS)
    options, left = take_options(argv, parser, known_options())
    return Parsed(options=options, args=parser.parse_args(left))


def print_remarks(resolved: Resolved) -> None:
    """Print the warnings and notes of a configuration to stderr."""
    for kind, remarks in (("warning", resolved.warnings), ("note", resolved.notes)):
        for remark in remarks:
            print(f"{kind}: {remark}", file=sys.stderr)
