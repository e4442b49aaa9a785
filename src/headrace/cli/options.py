"""What the commands share: a configuration from an argv, with `--config`, `--config-path` and all options."""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.arguments import Extra, build_parser, take_options
from headrace.config.load import Resolved
from headrace.reference.entrance import ALL_SECTIONS, known_options, resolve


@dataclass(frozen=True, kw_only=True)
class Words:
    """An argv taken apart: the schema's options as written, and the command's own arguments."""

    options: Mapping[str, Any]
    own: argparse.Namespace


def parse(
    argv: list[str], prog: str, extra: Extra | None = None, description: str = ""
) -> tuple[Resolved, argparse.Namespace]:
    """Return the configuration that an argv asks for, and the namespace of the command's own arguments.

    `extra` adds a command's own arguments to the parser; `prog` is the command as typed, such as `headrace train`.
    """
    words = read_config_words(argv, prog, extra, description)
    return resolve_words(words), words.own


def resolve_words(words: Words) -> Resolved:
    """Return the configuration that the words of a command ask for."""
    return resolve(words.options, words.own.config, words.own.config_path)


def read_config_words(argv: list[str], prog: str, extra: Extra | None = None, description: str = "") -> Words:
    """Take an argv with `--config` and `--config-path` apart without making a configuration of it."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("configuration")
        group.add_argument(
            "--config", metavar="NAME", help="named configuration to start from, or none (default: default)"
        )
        group.add_argument("--config-path", metavar="FILE", help="YAML file that has it (default: the shipped recipes)")
        if extra:
            extra(parser)

    return read_words(argv, prog, add, description)


def read_words(argv: list[str], prog: str, extra: Extra | None = None, description: str = "") -> Words:
    """Take an argv apart without making a configuration of it, for commands that start from a saved one."""
    parser = build_parser(prog, description, extra, ALL_SECTIONS)
    options, left = take_options(argv, parser, known_options())
    return Words(options=options, own=parser.parse_args(left))


def print_remarks(resolved: Resolved) -> None:
    """Print what the user should hear of a configuration, to stderr."""
    for kind, remarks in (("warning", resolved.warnings), ("note", resolved.notes)):
        for remark in remarks:
            print(f"{kind}: {remark}", file=sys.stderr)
