"""The command line, built from the schema: which words of an argv are options, their raw values, and the help text.

The options are taken out of the argv here, because argparse knows neither `--no-x` beside `--x off`, nor equal dashes
and underscores, nor aliases under prefixes. What is left, a command's own arguments, goes to argparse.
"""

import argparse
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from headrace.config.field import Option, find, options_of, spellings
from headrace.config.schema import SECTIONS, all_options
from headrace.config.values import BOOL, FALSE_WORDS, TRUE_WORDS, shown
from headrace.core.errors import ConfigError

HELP_COLUMN = 34

Extra = Callable[[argparse.ArgumentParser], object]


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError instead of printing usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[0].upper()}{message[1:]}.", remedy=f"See `{self.prog} --help`.")


def build_parser(
    prog: str, description: str, extra: Extra | None = None, sections: Mapping[str, type] = SECTIONS
) -> Parser:
    """Return a parser for a command's own arguments, whose help also lists all options of the sections."""
    columns = shutil.get_terminal_size((120, 40)).columns
    width = max(60, min(columns, 140))

    def formatter(prog: str) -> argparse.HelpFormatter:
        return argparse.RawDescriptionHelpFormatter(prog, max_help_position=HELP_COLUMN, width=width)

    parser = Parser(
        prog=prog,
        description=textwrap.fill(description, width),
        epilog=options_help(width, sections),
        allow_abbrev=False,
        formatter_class=formatter,
    )
    if extra:
        extra(parser)
    words = [(action.metavar or action.dest, action.nargs) for action in parser._actions if not action.option_strings]
    parser.usage = " ".join(
        ["%(prog)s", *(f"[{word}]" if nargs == "?" else f"{word}" for word, nargs in words), "[options]"]
    )
    return parser


def options_help(width: int, sections: Mapping[str, type] = SECTIONS) -> str:
    """Return the help on all options, section by section, each with its default in brackets."""
    opening = (
        "Names may be abbreviated where that is unambiguous, and written with dashes or underscores. The value in "
        "[brackets] is used where neither the configuration nor the command line gives one."
    )
    lines = textwrap.wrap(opening, width)
    for section, cls in sections.items():
        lines += ["", f"{section}: {cls.__doc__}"]
        for option in options_of(section, cls).values():
            lines += _help_lines(option, width)
    return "\n".join(lines).replace("%", "%%")


def take_options(
    argv: Iterable[str], parser: argparse.ArgumentParser, options: Mapping[str, Option] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return the options found in an argv as {name: raw value}, and the arguments that are left for `parser`."""
    options = all_options() if options is None else options
    own = [flag.lstrip("-") for flag in parser._option_string_actions if flag.startswith("--")]
    known = spellings(options, own)
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
        spelled = find(name, known, dashes="--")
        if spelled.name not in options:
            left.append("--" + spelled.name.replace("_", "-") + equals + value)
        else:
            option = options[spelled.name]
            taken.pop(f"no_{spelled.name}" if not spelled.negated else spelled.name, None)
            taken[str(spelled)] = value if equals else _take_value(option, spelled.negated, words)
    return taken, left


def _take_value(option: Option, negated: bool, words: list[str]) -> Any:
    """Take an option's value off the words that follow it."""
    if negated or option.kind is BOOL:
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
        raise ConfigError(f"{option.flag} has no value.", rule=f"It takes {option.kind.words}: {option.help}")
    return words.pop(0)


def _help_lines(option: Option, width: int) -> list[str]:
    also = f" Also: {', '.join('--' + alias.replace('_', '-') for alias in option.aliases)}." if option.aliases else ""
    indent = " " * HELP_COLUMN
    name, choices = "  " + usage_of(option), ""
    if len(name) > width:  # too many choices for a line: they are named in the text
        name, choices = f"  {option.flag} NAME", f" One of {', '.join(option.choices)}."
    text = textwrap.wrap(
        f"{option.help}{choices}{also} [{shown(option.default)}]",
        width,
        initial_indent=indent,
        subsequent_indent=indent,
    )
    if len(name) + 2 <= HELP_COLUMN:
        return [name.ljust(HELP_COLUMN) + text[0].lstrip(), *text[1:]]
    return [name, *text]


def usage_of(option: Option) -> str:
    """Return an option as it is written, such as `--[no-]shuffle` or `--seed N`."""
    if option.kind is BOOL:
        return f"--[no-]{option.flag[2:]}"
    if option.bare_value is not None:
        return f"{option.flag} [{option.placeholder}]"
    return f"{option.flag} {option.placeholder}{' ...' if option.kind.many else ''}"
