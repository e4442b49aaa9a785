"""Options: dataclass fields with help, aliases, choices and limits; how names are spelled; rules across options."""

import copy
import dataclasses
import os
import shlex
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace.config.other_names import OTHER_NAMES
from headrace.core.errors import ConfigError, did_you_mean, nearest
from headrace.core.local_path import STORES, WEB, is_set_name, local_text
from headrace.rows.values import (
    ANYWHERE,
    BOOL,
    BYTES,
    KIND_OF_TYPE,
    MAPPING,
    NONE_WORDS,
    PATH,
    PLACE,
    TEXT,
    Kind,
    Limit,
    format_value,
)

if TYPE_CHECKING:
    from headrace.config.schema import Config

_META = "headrace"
_ACCEPTED = {PLACE.description: WEB, ANYWHERE.description: STORES}  # what paths of these kinds may begin with
_FEW_CHOICES = 12  # are listed beside the nearest one


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a value came from: its kind (default, environment, recipe, file, command line, code) and the place."""

    kind: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".strip()

    @property
    def prefix(self) -> str:
        """Return the file and line that a message about the value begins with; empty for what has none."""
        return f"{self.where}: " if self.kind in ("recipe", "file") else ""

    @property
    def is_given(self) -> bool:
        """Whether somebody gave the value; otherwise it is derived again when options change."""
        return self.kind not in ("default", TRANSLATED)


CHOSEN = "chosen"  # the kind of a value that follows from the data or the devices; a resumed run keeps it
TRANSLATED = "translated"  # the kind of a value that follows from an option of another application
DEFAULT = Origin(kind="default")
COMMAND_LINE = Origin(kind="command line")
CODE = Origin(kind="code")
LOADED = Origin(kind="loaded run")  # of the run that code loaded a model from: nobody asks for it anew


@dataclass(frozen=True, kw_only=True)
class Option:
    """Everything about an option: the single source for parsing, help, documents and checks."""

    name: str
    section: str
    kind: Kind
    optional: bool
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    check: Limit | None = None
    no_value: Any = None
    bare_value: Any = None
    synonyms: tuple[tuple[str, str], ...] = ()  # of choices, or of a boolean's on and off
    rank: int = 0  # a prefix matches options of rank 1 only where none of rank 0 starts with it
    chosen: str = ""  # what a run chooses where nobody gives the option; the default holds where nothing is chosen
    path_option: str = ""  # of an option that takes a name: the one that takes a path
    code_adds: bool = False  # code may name what it gives itself, beside the choices

    @property
    def default_text(self) -> str:
        """Return the default in help texts and documents."""
        return self.chosen or format_value(self.default)

    @property
    def flag(self) -> str:
        """Return the option as written on a command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def placeholder(self) -> str:
        """Return what stands for the value in help texts."""
        return "{" + ",".join(self.choices) + "}" if self.choices else self.kind.metavar

    def read(self, raw: object, origin: Origin = DEFAULT) -> Any:
        """Return the value that `raw` stands for, or refuse it with the option's help text."""
        raw = _plain(raw)
        # For a text, `none` is a value: compilation_cache_dir none is off, and not the same as unset.
        none_words = () if self.kind in (TEXT, PLACE, PATH, ANYWHERE) else NONE_WORDS
        if self.optional and (raw is None or (isinstance(raw, str) and raw.lower() in none_words)):
            return None
        if self.kind is BOOL:
            raw = next(
                (meant for word, meant in self.synonyms if _without_dashes(str(raw)) == _without_dashes(word)), raw
            )
        try:
            value = self.kind.read(raw)
        except (ValueError, TypeError, OverflowError) as error:
            # Of other kinds the message would be Python's own, such as that of int().
            reason = str(error) if self.kind in (MAPPING, BYTES) else ""
            raise self._refusal(raw, reason or f"not {self.kind.description}", origin) from None
        if self.optional and value is None:
            return None
        if self.kind in (PATH, PLACE, ANYWHERE):
            what = f"{origin.prefix}{self.flag if origin.kind == COMMAND_LINE.kind else self.name}"
            if not (self.name == "dataset_path" and is_set_name(value)):
                local_text(value, what, _ACCEPTED.get(self.kind.description, ()))
        broken = self.check(value) if self.check else ""
        if self.choices and not broken:
            chosen, broken = self._choose(value)
            if broken and self.code_adds and origin.kind in (CODE.kind, LOADED.kind) and value.isidentifier():
                return value
            value = chosen
        if broken:
            raise self._refusal(raw, broken, origin)
        return value

    def knows(self, word: str) -> bool:
        """Say whether a word is one of the choices, or a synonym of one."""
        return _without_dashes(word) in {
            _without_dashes(choice) for choice in (*self.choices, *(other for other, _ in self.synonyms))
        }

    def _choose(self, value: str) -> tuple[str, str]:
        """Return the choice spelled `value`, whatever its case and dashes, or the rule it breaks."""
        plain = {_without_dashes(choice): choice for choice in self.choices}
        plain |= {_without_dashes(word): choice for word, choice in self.synonyms}
        found = plain.get(_without_dashes(value))
        return (found, "") if found else (value, "not one of the choices")

    def _refusal(self, raw: object, why: str, origin: Origin) -> ConfigError:
        name = self.flag if origin.kind == "command line" else self.name
        written = "nothing" if raw is None else repr(raw)
        remedy = did_you_mean(str(raw), self.choices) if self.choices else ""
        if remedy and len(self.choices) <= _FEW_CHOICES and not remedy.startswith("Possible"):
            remedy += f" Possible: {', '.join(self.choices)}."
        if self.path_option and isinstance(raw, str) and ("/" in raw or Path(raw).exists()):
            given = f"--{self.path_option.replace('_', '-')} " if name == self.flag else f"{self.path_option}="
            remedy = f"A path is given as {given}{shlex.quote(raw)}."
        return ConfigError(
            f"{origin.prefix}{name} is {written}: {why}.", rule=f"{self.name}: {self.help}", remedy=remedy
        )


def _plain(raw: Any) -> Any:
    """Return a path as its text, and numbers and arrays of NumPy or JAX as Python's."""
    if isinstance(raw, list | tuple):
        return [_plain(each) for each in raw]
    if isinstance(raw, os.PathLike):
        return os.fspath(raw)
    return raw.tolist() if hasattr(raw, "tolist") else raw


def option(
    default: object,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    check: Limit | None = None,
    kind: Kind | None = None,
    no_value: object = None,
    bare_value: object = None,
    synonyms: tuple[tuple[str, str], ...] = (),
    chosen: str = "",
    path_option: str = "",
    code_adds: bool = False,
) -> Any:
    """Make a dataclass field that is an option.

    `no_value` is what `--no-NAME` means where it is not a boolean, `bare_value` what `--NAME` means without a value,
    `synonyms` other words for choices, `chosen` what a run chooses where nobody gives the option,
    `path_option` the option that a path belongs to, `code_adds` that code may name what it gives, beside the choices.
    """
    meta = {
        "default": default,
        "help": help,
        "aliases": aliases,
        "choices": choices,
        "check": check,
        "kind": kind,
        "no_value": no_value,
        "bare_value": bare_value,
        "synonyms": synonyms,
        "chosen": chosen,
        "path_option": path_option,
        "code_adds": code_adds,
    }
    metadata = {_META: meta}
    if isinstance(default, dict):
        # A copy for each configuration: one that changes its mapping must not change the schema.
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options_of(section: str, cls: type) -> dict[str, Option]:
    """Return the options of one section's dataclass, by name, in order."""
    found = {}
    for field in dataclasses.fields(cls):
        meta = dict(field.metadata[_META])
        kind, optional = _kind_of(field.type)
        kind = meta.pop("kind") or kind
        if kind is BOOL:
            meta["no_value"] = False
        found[field.name] = Option(
            name=field.name,
            section=section,
            kind=kind,
            optional=optional,
            rank=getattr(cls, "PREFIX_RANK", 0),
            **meta,
        )
    return found


def _kind_of(annotation: object) -> tuple[Kind, bool]:
    """Return (kind, may it be None) of a field's annotation."""
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    plain = [typing.get_origin(part) or part for part in parts if part is not type(None)]
    return KIND_OF_TYPE[plain[0]], type(None) in parts


def _without_dashes(name: str) -> str:
    # Choices are compared without any dashes: flipcrop, flip_crop and flip-crop are one word, unlike names of options.
    return name.lower().replace("-", "").replace("_", "")


@dataclass(frozen=True, kw_only=True)
class OptionName:
    """The option that an accepted name stands for, and whether the name is its `no-` form."""

    name: str
    negated: bool = False
    rank: int = 0  # see Option.rank

    def __str__(self) -> str:
        return f"no_{self.name}" if self.negated else self.name


def normalise_name(name: str) -> str:
    """Return a name as it is compared: lower case, underscores."""
    return name.strip().lower().replace("-", "_")


def option_names(options: Mapping[str, Option], extra: Iterable[str] = ()) -> dict[str, OptionName]:
    """Return every accepted full name of the options, and of further names that a command knows."""
    found = {normalise_name(name): OptionName(name=normalise_name(name)) for name in extra}
    for name, option in options.items():
        for spelling in (name, *option.aliases):
            found[spelling] = OptionName(name=name, rank=option.rank)
            if option.no_value is not None:
                found[f"no_{spelling}"] = OptionName(name=name, negated=True, rank=option.rank)
    return found


def find_option(written: str, known: Mapping[str, OptionName], *, place: str = "", dashes: str = "") -> OptionName:
    """Return what `written` stands for; `place` (file and line) and `dashes` (on a command line) are for errors."""
    wanted = normalise_name(written)
    if wanted in known:
        return known[wanted]
    # Other trainers' names are no aliases: the beginning of one could mean several things.
    meant = OTHER_NAMES.get(wanted)
    if meant and meant.same and meant.option in known:
        return known[meant.option]
    missing = f"{place}{'there' if place else 'There'} is no option {dashes}{written}."
    if meant and (meant.option in known or not meant.option):
        raise ConfigError(missing, remedy=meant.remedy(dashes))
    begins = [known[name] for name in known if name.startswith(wanted)] if wanted else []
    first = min((spelled.rank for spelled in begins), default=0)
    matches = {str(spelled): spelled for spelled in begins if spelled.rank == first}
    if len(matches) == 1:
        return next(iter(matches.values()))

    def as_written(name: str) -> str:
        return dashes + name.replace("_", "-") if dashes else name

    if matches:
        raise ConfigError(
            f"{place}{dashes}{written} could be several options.",
            rule="A name may be abbreviated only where one option starts with it.",
            remedy=f"Write one of: {', '.join(as_written(name) for name in matches)}.",
        )
    # Only where nothing begins so: an abbreviation is meant more often than a slip.
    guess = nearest(wanted, known)
    remedy = f"Did you mean {as_written(guess)}?" if guess else "`headrace configs options` lists all options."
    from headrace.config.translations import without_translation  # here, as it imports this file

    remedy = f"{remedy} {without_translation()}".strip()
    raise ConfigError(missing, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What rules are checked against: the configuration and where its values came from."""

    config: "Config"
    origins: Mapping[str, Origin]
    has_weights: bool = False  # code gives weights to start from

    def asked(self, name: str) -> bool:
        """Say whether somebody typed the option, or code gave it; a file and a recipe may be written for many runs."""
        return self.origins.get(name, DEFAULT).kind in (COMMAND_LINE.kind, CODE.kind)

    def given(self, name: str) -> bool:
        """Say whether somebody wrote the value, be it the default's."""
        return self.origins.get(name, DEFAULT).is_given

    def describe(self, name: str) -> str:
        """Return an option with its value and origin, for a message."""
        sections = (getattr(self.config, field.name) for field in dataclasses.fields(self.config))
        value = next(getattr(section, name) for section in sections if hasattr(section, name))
        return f"{name} {format_value(value)} ({self.origins.get(name, DEFAULT)})"


State = TypeVar("State")


@dataclass(frozen=True, kw_only=True)
class RuleOn(Generic[State]):
    """A combination that cannot work: when it is given, the problem in words, the rule it breaks, and a remedy."""

    broken: Callable[[State], object]
    problem: Callable[[State], str]
    rule: str
    remedy: str

    def check(self, state: State) -> None:
        """Raise ConfigError if the rule is broken."""
        if self.broken(state):
            raise ConfigError(self.problem(state), rule=self.rule, remedy=self.remedy)


Rule = RuleOn[Facts]


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A combination that works but may surprise.

    With `option`, it cannot be meant: a new run for which this option was typed, or given by code, is refused.
    """

    when: Callable[[Facts], object]
    text: Callable[[Facts], str]
    option: str = ""
    remedy: str = ""

    def refuse(self, facts: Facts) -> None:
        """Raise ConfigError where somebody asked for what cannot be meant."""
        if self.option and facts.asked(self.option) and self.when(facts):
            raise ConfigError(
                self.text(facts),
                rule="A new run does what each of its options says; what a file or a recipe gives is only remarked on.",
                remedy=self.remedy or f"Leave {self.option} out.",
            )


def conflict(
    first: str, second: str, when: Callable[[Facts], object], rule: str, remedy: str = "Leave one of them out."
) -> Rule:
    """Refuse two options that cannot be combined."""
    return Rule(
        broken=when,
        problem=lambda facts: f"{facts.describe(first)} with {facts.describe(second)}.",
        rule=rule,
        remedy=remedy,
    )


def both_given(first: str, second: str, when: Callable[[Facts], object], rule: str) -> Rule:
    """Refuse two options that say the same thing."""
    return Rule(
        broken=when,
        problem=lambda facts: f"Both are given: {facts.describe(first)} and {facts.describe(second)}.",
        rule=rule,
        remedy="Leave one of them out.",
    )


def idle(name: str, other: str, when: Callable[[Facts], object], *, remedy: str = "", refused: bool = True) -> Remark:
    """Remark that an option does nothing; `other` is the option whose value makes it so, or a phrase with without."""

    def text(facts: Facts) -> str:
        reason = other if " " in other else f"with {facts.describe(other)}"
        return f"{facts.describe(name)} has no effect {reason}."

    return Remark(when=when, text=text, option=name if refused else "", remedy=remedy)
