"""`--help`, `--help-all` and `--help GROUP` of the commands that take options of the schema."""

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from headrace.cli.help_screens import ELSEWHERE, HELP, HELP_ALL, OTHER, SCREENS, Screen
from headrace.config.command_line import usage_of
from headrace.config.field import Option, option_names
from headrace.config.schema import SECTIONS, all_options, options_in
from headrace.config.translations import ApplicationHelp, known_options, known_sections, translation
from headrace.core.errors import ConfigError, nearest
from headrace.rows.values import BOOL, format_value

_NAME_COLUMN, _TEXT_COLUMN = 2, 34
_SHORT_COLUMN = 24  # of the first screen, so that a phrase fits beside its option in 80 columns


@dataclass(frozen=True, kw_only=True)
class HelpRequest:
    """What help is asked for: everything, one group or option, or (neither) the first screen."""

    everything: bool = False
    about: str = ""


def find_request(argv: Iterable[str]) -> HelpRequest | None:
    """Return the help that an argv asks for, None where it asks for none. What follows `--` is not looked at."""
    words = list(argv)
    words = words[: words.index("--")] if "--" in words else words
    if HELP_ALL in words or "--help_all" in words:
        return HelpRequest(everything=True)
    place = next((place for place, word in enumerate(words) if word.partition("=")[0] in HELP), None)
    if place is None:
        return None
    _, _, about = words[place].partition("=")
    follows = words[place + 1] if place + 1 < len(words) and not words[place + 1].startswith("-") else ""
    return HelpRequest(about=about or follows)


def without_help(argv: Iterable[str]) -> list[str]:
    """Return an argv without the words that ask for help."""
    return [word for word in argv if word.partition("=")[0].replace("_", "-") not in (*HELP, HELP_ALL)]


def screen_of(prog: str) -> Screen:
    """Return the help of a command, such as `headrace train`."""
    return SCREENS.get(prog.removeprefix("headrace "), OTHER)


def has_effect(screen: Screen, option: Option) -> bool:
    """Say whether a command makes use of an option; those of another application stand for others."""
    if option.name in screen.without:
        return False
    return option.section in screen.groups or option.section not in SECTIONS


def groups_of(screen: Screen) -> tuple[str, ...]:
    """Return the groups of options that have an effect on a command, with those of another application."""
    elsewhere = tuple(translation().sections)
    return tuple(each for group in screen.groups for each in (elsewhere if group == ELSEWHERE else (group,)))


def help_text(
    prog: str, parser: argparse.ArgumentParser, request: HelpRequest, application: ApplicationHelp | None = None
) -> str:
    """Return the help that is asked for; `parser` has the arguments that only this command has.

    Of another application it says that one's defaults, and what names mean there.
    """
    width = max(60, min(shutil.get_terminal_size((100, 40)).columns, 120))
    screen = screen_of(prog)
    if application:
        screen = replace(screen, examples=(), without=screen.without | application.hidden, application=application)
    if request.about:
        return "\n".join(_about(prog, screen, request.about, width))
    words = [(action.metavar or action.dest, action.nargs) for action in parser._actions if not action.option_strings]
    usage = [f"usage: {prog}", *(f"[{word}]" if nargs == "?" else f"{word}" for word, nargs in words), "[options]"]
    if application:
        usage.insert(1, f"--application {application.name}")
    lines = [" ".join(usage), ""]
    about = application.about if application and prog == "headrace train" else screen.about
    lines += textwrap.wrap(about or parser.description or "", width)
    if screen.examples:
        lines += ["", "examples:", *_examples(screen.examples)]
    lines += _own_arguments(parser, width)
    if request.everything:
        return "\n".join([*lines, *_every_option(screen, width)])
    for topic, rows in screen.rows.items():
        named = {_short_usage(flag): phrase for flag, phrase in rows.items()}
        lines += ["", f"{topic}:", *_columns(named, width, _SHORT_COLUMN)]
    groups = ", ".join(group for group in screen.groups if group != ELSEWHERE)
    lines += ["", *textwrap.wrap(f"--help-all lists all options, --help GROUP one group: {groups}.", width)]
    return "\n".join(lines)


def _examples(examples: Iterable[tuple[str, str]]) -> list[str]:
    wide = max((len(command) for command, what in examples if what), default=0)
    return [f"  {command:{wide}}  {what}".rstrip() for command, what in examples]


def _about(prog: str, screen: Screen, about: str, width: int) -> list[str]:
    """Return the help on one group, or on one option."""
    name = about.lower().lstrip("-").replace("-", "_")
    groups = groups_of(screen)
    if name in groups:
        return _group(screen, name, width)
    spelled = option_names(known_options()).get(name)
    option = known_options().get(spelled.name) if spelled else None
    if option is not None and has_effect(screen, option):
        group = f"(group {option.section}: {prog} --help {option.section})"
        return [*_option_lines(option, width, screen.application), group]
    guess = nearest(name, [*groups, *option_names(known_options())])
    raise ConfigError(
        f"{prog} has no group of options, and no option, named {about}.",
        rule=f"Groups are {', '.join(groups)}.",
        remedy=f"Did you mean {guess.replace('_', '-')}?" if guess else "",
    )


def _every_option(screen: Screen, width: int) -> list[str]:
    opening = (
        "Names may be abbreviated where that is unambiguous, and written with dashes or underscores. The value in "
        "[brackets] is used where neither the configuration nor the command line gives one."
    )
    lines = ["", *textwrap.wrap(opening, width)]
    for group in groups_of(screen):
        if group not in SECTIONS:
            lines += _other_names(screen, width)
        lines += ["", *_group(screen, group, width)]
    return lines


def _group(screen: Screen, group: str, width: int) -> list[str]:
    """Return the help on a group of options, each with its default in brackets."""
    lines = textwrap.wrap(f"{group}: {known_sections()[group].__doc__}", width)
    for option in options_in({group: known_sections()[group]}).values():
        if has_effect(screen, option):
            lines += _option_lines(option, width, screen.application)
    return lines


def _other_names(screen: Screen, width: int) -> list[str]:
    """Return the aliases of all options, most of which are names that other applications have for them."""
    named = {
        f"--{alias.replace('_', '-')}": option.flag
        for option in known_options().values()
        for alias in option.aliases
        if has_effect(screen, option) and option.section in SECTIONS
    }
    return ["", "other names of these options:", *_columns(named, width)]


def _option_lines(option: Option, width: int, application: ApplicationHelp | None) -> list[str]:
    told, default = option.help, option.default_text
    if application:
        told = application.meanings.get(option.name, told)
        default = application.defaults.get(option.name, format_value(option.default))  # nothing is chosen there
    name, choices = usage_of(option), ""
    if len(name) + _NAME_COLUMN > width:  # too many choices for a line: they are named in the text
        name, choices = f"{option.flag} NAME", f" One of {', '.join(option.choices)}."
    return _columns({name: f"{told}{choices} [{default}]"}, width)


def _short_usage(row: str) -> str:
    """Return an option with what stands for its value, which the row may name."""
    flag, _, value = row.partition(" ")
    option = all_options()[option_names(all_options())[flag.replace("-", "_")].name]
    if option.kind is BOOL:
        return f"--{flag}"
    value = value or ("NAME" if option.choices else option.kind.metavar)
    return f"--{flag} [{value}]" if option.bare_value is not None else f"--{flag} {value}"


def _own_arguments(parser: argparse.ArgumentParser, width: int) -> list[str]:
    """Return the help on the arguments that only this command has, in the parser's groups."""
    titled: dict[str, dict[str, str]] = {}
    for group in parser._action_groups:
        title = "arguments" if group.title in (None, "options", "positional arguments") else group.title
        rows = {_usage_of_action(action): action.help for action in group._group_actions if action.help}
        titled[title] = titled.get(title, {}) | rows
    filled = [(title, rows) for title, rows in titled.items() if rows]
    return [line for title, rows in filled for line in ("", f"{title}:", *_columns(rows, width, _SHORT_COLUMN))]


def _usage_of_action(action: argparse.Action) -> str:
    metavar = str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return metavar
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    return f"{names} {'{' + ','.join(map(str, action.choices)) + '}' if action.choices else metavar}"


def _columns(rows: Mapping[str, str], width: int, column: int = _TEXT_COLUMN) -> list[str]:
    """Return a name and a text per row; texts begin in one column, on the next line where the name is too long."""
    lines = []
    indent = " " * column
    for name, text in rows.items():
        wrapped = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        head = " " * _NAME_COLUMN + name
        beside = len(head) + 2 <= column and wrapped
        lines += [head.ljust(column) + wrapped[0].lstrip(), *wrapped[1:]] if beside else [head, *wrapped]
    return lines
