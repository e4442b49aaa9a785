"""`headrace completion bash|zsh|fish`: the script for a shell; it asks `headrace completion words` what may follow.

One implementation in Python answers all shells, without JAX and without reading a recipe as YAML, so that it is quick.
"""

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from itertools import pairwise
from pathlib import Path

from headrace.cli.commands import COMMANDS
from headrace.cli.help_screens import HELP_ALL, SCREENS
from headrace.core.errors import ConfigError, did_you_mean

# A candidate per line, with a tab before its description. Without a candidate the shell completes file names.
_BASH = """_headrace() {
    local IFS=$'\\n'
    COMPREPLY=($(headrace completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f1))
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == */ ]] && compopt -o nospace
}
complete -o default -F _headrace headrace
"""
_ZSH = """#compdef headrace
_headrace() {
    local -a found
    found=(${(f)"$(headrace completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( ! ${#found} )); then _files; return; fi
    local -a values texts
    local line
    for line in $found; do
        values+=("${line%%$'\\t'*}")
        texts+=("${line//$'\\t'/  }")
    done
    compadd -Q -l -d texts -- $values
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _headrace "$@"; else compdef _headrace headrace; fi
"""
_FISH = """function __headrace_complete
    set -l typed (commandline -opc) (commandline -ct)
    set -l found (headrace completion words -- $typed[2..-1] 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c headrace -f -a '(__headrace_complete)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_USAGE = """usage: headrace completion bash|zsh|fish

Print the script that completes commands, options, their choices, recipes, networks and runs.

  bash  eval "$(headrace completion bash)"                        in ~/.bashrc
  zsh   eval "$(headrace completion zsh)"                         in ~/.zshrc, after compinit
  fish  headrace completion fish > ~/.config/fish/completions/headrace.fish"""

Candidates = Iterator[tuple[str, str]]


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    if argv[0] == "words":
        # What was typed is behind a `--`.
        for word, text in complete(argv[2:]):
            print(f"{word}\t{text}" if text else word)
        return 0
    if argv[0] not in _SCRIPTS or len(argv) > 1:
        raise ConfigError(f"There is no completion for {' '.join(argv)}.", remedy=did_you_mean(argv[0], _SCRIPTS))
    print(_SCRIPTS[argv[0]], end="")
    return 0


def complete(typed: list[str]) -> list[tuple[str, str]]:
    """Return what may stand in place of the last word, each with a description; nothing where a file is meant."""
    words = _joined(typed)
    *before, current = words or [""]
    found: dict[str, str] = {}
    for word, text in _candidates(before, current):
        if word.startswith(current):
            found[word] = text or found.get(word, "")
    if typed and typed[-1] != current:  # bash has divided --option=value, and replaces the value alone
        found = {word.rpartition("=")[2]: text for word, text in found.items()}
    return sorted(found.items())


def _joined(typed: list[str]) -> list[str]:
    """Return the words with those joined that bash has divided at an equals sign."""
    words: list[str] = []
    for number, word in enumerate(typed):
        after_equals = number > 0 and typed[number - 1] == "=" and words[-1].startswith("--")
        if (word == "=" and words and words[-1].startswith("--")) or after_equals:
            words[-1] += word
        else:
            words.append(word)
    return words


def _candidates(before: list[str], current: str) -> Candidates:
    if not before:
        yield from ((command.name, command.help) for command in COMMANDS.values())
        return
    command = before[0]
    row = COMMANDS.get(command)
    if current.startswith("--") and "=" in current:
        flag = current.partition("=")[0]
        yield from ((f"{flag}={value}", text) for value, text in _values(flag, before))
    elif current.startswith("-"):
        yield from _flags(command, before)
    elif before[-1].startswith("--") and "=" not in before[-1]:
        yield from _values(before[-1], before)
    elif len(before) == 1 and row and row.parts:
        yield from ((part, "") for part in row.parts)
    elif before[:2] == ["models", "show"]:
        yield from _models()
    elif before[:2] == ["configs", "show"]:
        yield from _recipes(before)
    elif row and row.takes_runs:
        yield from _runs(current)


def _flags(command: str, before: list[str]) -> Candidates:
    """Yield the options of a command: its own, and those of the schema that have an effect on it."""
    yield from (("--help", "the options that matter most"), (HELP_ALL, "all options"))
    prog = " ".join(before[:2]) if command in ("data", "configs") else command
    yield from ((flag, "") for flag in _own_flags(before))
    if prog in SCREENS or command == "data":
        from headrace.cli.help import groups_of, has_effect, screen_of
        from headrace.config.translations import known_options
        from headrace.rows.values import BOOL

        screen = screen_of(prog)
        groups = groups_of(screen)
        for option in known_options().values():
            if has_effect(screen, option) and option.section in groups:
                names = (option.flag, *(f"--{alias.replace('_', '-')}" for alias in option.aliases))
                text = option.help.partition(". ")[0].partition(";")[0]
                yield from ((name, text) for name in names)
                if option.kind is BOOL:
                    yield f"--no-{option.flag[2:]}", f"not: {text}"


def _own_flags(before: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the arguments that a command adds to the schema's, with their choices, as its help has them."""
    command = COMMANDS.get(before[0])
    if command is None:
        return {}
    parts = before[:2] if before[1:2] and before[1] in command.parts else before[:1]
    run = command.imported()
    with redirect_stdout(io.StringIO()) as text, suppress(SystemExit):
        run([*parts[1:], "--help"])
    rows = re.findall(r"^ +(?:-\w(?: \w+)?, )?(--[a-z][\w-]*)(?: \{([^}\n]*)\})?", text.getvalue(), re.MULTILINE)
    return {flag: tuple(choices.split(",")) if choices else () for flag, choices in rows}


def _values(flag: str, before: list[str]) -> Candidates:
    """Yield the values of an option: its choices, or names of recipes, networks and runs."""
    if own := _own_flags(before).get(flag):
        yield from ((value, "") for value in own)
        return
    from headrace.config.field import normalise_name, option_names
    from headrace.config.translations import known_options

    if flag in ("--help", "-h"):
        from headrace.cli.help import groups_of

        yield from ((group, "group of options") for group in groups_of(SCREENS.get(before[0], SCREENS["train"])))
        return
    if flag == "--config":
        yield from _recipes(before)
        return
    spelled = option_names(known_options()).get(normalise_name(flag.lstrip("-")))
    if spelled is None or spelled.negated:
        return
    option = known_options()[spelled.name]
    if option.name == "model_name":
        yield from _models()
    else:
        yield from ((choice, "") for choice in (*option.choices, *(word for word, _ in option.synonyms)))


def _models() -> Candidates:
    from headrace.rows.networks import NETWORKS

    yield from ((variant.name, f"{variant.image_size} pixels") for variant in NETWORKS.values())


def _recipes(before: list[str]) -> Candidates:
    """Yield the names of recipes, found by their form: reading the YAML takes ten times as long."""
    from headrace.config.translations import translation
    from headrace.config.yaml_blocks import RECIPES

    given = dict(pairwise(before)).get("--config-path")
    files = [Path(given)] if given else [f for d in (RECIPES, *translation().recipes) for f in sorted(d.glob("*.yml"))]
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        yield from ((name, file.name) for name in re.findall(r"^([A-Za-z][\w.-]*):", text, re.MULTILINE))


def _runs(current: str) -> Candidates:
    """Yield the runs in the directory that is being typed, in ./runs where nothing is; other directories to go on."""
    folder = os.path.dirname(current) if current else "runs"  # noqa: PTH120 (the text before the last slash, as typed)
    yield from _entries(folder, is_wanted=lambda path: (path / "config.json").is_file(), end="")
    yield from _entries(folder, is_wanted=lambda path: not (path / "config.json").is_file(), end="/")
    if not folder:
        yield from _entries("runs", is_wanted=lambda path: (path / "config.json").is_file(), end="")


def _entries(folder: str, *, is_wanted: Callable[[Path], bool], end: str) -> Candidates:
    try:
        names = sorted(entry.name for entry in os.scandir(folder or ".") if entry.is_dir())
    except OSError:
        return
    for name in names:
        path = os.path.join(folder, name)  # noqa: PTH118 (Path would drop a leading ./)
        if not name.startswith(".") and is_wanted(Path(path)):
            yield path + end, ""
