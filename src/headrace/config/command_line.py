"""The command line, built from the schema: which words of an argv are options, and their raw values.

The options are taken out of the argv here, because argparse knows neither `--no-x` beside `--x off`, nor equal dashes
and underscores, nor aliases under prefixes. What is left, a command's own arguments, goes to argparse.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from headrace.config.field import Option, find_option, option_names
from headrace.config.schema import all_options
from headrace.core.errors import ConfigError
from headrace.rows.values import BOOL, FALSE_WORDS, TRUE_WORDS

Extra = Callable[[argparse.ArgumentParser], object]


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError instead of printing usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[0].upper()}{message[1:]}.", remedy=f"See `{self.prog} --help`.")


def build_parser(prog: str, extra: Extra | None = None, description: str = "") -> Parser:
    """Return a parser for the arguments that only this command has; help is the command's own matter."""
    parser = Parser(prog=prog, description=description, allow_abbrev=False, add_help=False)
    if extra:
        extra(parser)
    return parser


def take_options(
    argv: Iterable[str], parser: argparse.ArgumentParser, options: Mapping[str, Option] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return the options found in an argv as {name: raw value}, and the arguments that are left for `parser`."""
    options = all_options() if options is None else options
    own = [flag.lstrip("-") for flag in parser._option_string_actions if flag.startswith("--")]
    commands = option_names({}, own)
    # An argument of the command hides an option of that name: bench's --output.
    known = option_names(options) | commands
    taken: dict[str, Any] = {}
    left: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            return taken, [*left, word, *words]
        if not word.startswith("--"):
            left.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        if name.replace("_", "-") in own:  # the command's, also where an option has the same name
            left.append("--" + name.replace("_", "-") + equals + value)
            continue
        spelled = find_option(name, known, dashes="--")
        if spelled.name in commands:
            left.append("--" + spelled.name.replace("_", "-") + equals + value)
        else:
            option = options[spelled.name]
            # The last one wins: after --no-shuffle --shuffle it is on.
            taken.pop(f"no_{spelled.name}" if not spelled.negated else spelled.name, None)
            taken[str(spelled)] = value if equals else _take_value(option, spelled.negated, words)
    return taken, left


def _take_value(option: Option, negated: bool, words: list[str]) -> Any:
    """Take an option's value off the words that follow it."""
    if negated or option.kind is BOOL:
        # Only a word that can be its value: what follows a flag may be an argument of the command, such as a path.
        follows = bool(words) and (words[0].lower() in TRUE_WORDS + FALSE_WORDS or option.knows(words[0]))
        return words.pop(0) if follows else True
    if option.kind.many:
        taken = []
        while words and not words[0].startswith("--"):
            taken.append(words.pop(0))
        return taken
    if option.bare_value is not None and (not words or words[0].startswith("--") or not option.knows(words[0])):
        return option.bare_value
    if not words or words[0].startswith("--"):
        raise ConfigError(f"{option.flag} has no value.", rule=f"It takes {option.kind.description}: {option.help}")
    return words.pop(0)


def take_value(argv: Sequence[str], option: str) -> tuple[str | None, list[str]]:
    """Take an option with its value out of an argv; the last one counts."""
    value, left, words = None, [], list(argv)
    while words:
        word = words.pop(0)
        if word.partition("=")[0].replace("_", "-") != option:
            left.append(word)
            continue
        _, equals, value = word.partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"{option} has no value.", remedy="Give the directory of a run, such as runs/NAME.")
            value = words.pop(0)
    return value, left


def usage_of(option: Option) -> str:
    """Return an option as it is written, such as `--[no-]shuffle` or `--seed N`."""
    if option.kind is BOOL:
        return f"--[no-]{option.flag[2:]}"
    if option.bare_value is not None:
        return f"{option.flag} [{option.placeholder}]"
    return f"{option.flag} {option.placeholder}{' ...' if option.kind.many else ''}"
