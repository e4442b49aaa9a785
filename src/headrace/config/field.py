"""Options: dataclass fields with help, aliases, choices and limits; the types of their values; rules across options."""

import copy
import dataclasses
import json
import math
import os
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace.core.errors import ConfigError, did_you_mean, nearest
from headrace.core.files import parse_json
from headrace.core.units import parse_bytes

if TYPE_CHECKING:
    from headrace.config.schema import Config

# Types of option values: how each is parsed from a command line, YAML or Python, and limits on values.
#
# A reader takes what was written and returns the value, or raises ValueError (a message, if any, is more precise than
# the type's description). A limit takes a value and returns the rule it breaks, or an empty string.


TRUE_WORDS = ("true", "on", "yes", "1")
FALSE_WORDS = ("false", "off", "no", "0")
NONE_WORDS = ("none", "null")

Limit = Callable[[Any], str]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of value: its description in errors, its placeholder in help texts, and its reader."""

    description: str
    metavar: str
    read: Callable[[Any], Any]
    many: bool = False  # a list: takes several arguments on a command line


def read_bool(raw: object) -> bool:
    """Read a boolean: true/false, on/off, yes/no, 1/0."""
    word = str(raw).lower()
    if word not in TRUE_WORDS + FALSE_WORDS:
        raise ValueError
    return word in TRUE_WORDS


def read_int(raw: object) -> int:
    """Read an integer; 1e6 is one, too."""
    # A bool is an int in Python: seed=True is a mistake and not 1.
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError
    if isinstance(raw, str) and re.fullmatch(r"[-+]?\d+", raw.strip()):
        return int(raw)
    value = raw if isinstance(raw, int) else read_float(raw)
    if value != int(value):
        raise ValueError
    return int(value)


def read_float(raw: object) -> float:
    """Read a finite number."""
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError
    value = float(raw)
    if not math.isfinite(value):
        raise ValueError
    return value


def read_fraction(raw: object) -> float:
    """Read a number or a fraction, such as 1/3; 0.3333333 is taken for 1/3, so that periods come out whole."""
    if isinstance(raw, str) and "/" in raw:
        numerator, denominator = raw.split("/", 1)
        if float(denominator) == 0:
            raise ValueError
        raw = float(numerator) / float(denominator)
    value = read_float(raw)
    if 1e-6 < value < 1:
        nearest = round(1 / value)
        if abs(value * nearest - 1) <= 1e-6:
            return 1 / nearest
    return value


def read_text(raw: object) -> str:
    """Read a text; numbers count as their digits."""
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise ValueError
    return str(raw)


def read_words(raw: object) -> tuple[str, ...]:
    """Read a list of words; one word alone is a list of one."""
    if isinstance(raw, list | tuple):
        return tuple(read_text(word) for word in raw)
    return (read_text(raw),)


def _separate(raw: object) -> list[Any]:
    """Divide a text, or each text of a list, at spaces and commas."""
    parts = raw if isinstance(raw, list | tuple) else [raw]
    return [word for part in parts for word in (part.replace(",", " ").split() if isinstance(part, str) else [part])]


def read_numbers(raw: object) -> tuple[int, ...]:
    """Read a list of whole numbers, also as one text with spaces or commas between them."""
    return tuple(read_int(part) for part in _separate(raw))


def read_floats(raw: object) -> tuple[float, ...]:
    """Read a list of numbers, also as one text with spaces or commas between them."""
    return tuple(read_float(part) for part in _separate(raw))


def read_mapping(raw: object) -> dict[str, Any]:
    """Read a mapping with text keys, or one written as JSON or as KEY=VALUE,KEY=VALUE."""
    if isinstance(raw, str) and raw.strip()[:1] not in ("{", "[", ""):
        return _read_pairs(raw)
    if isinstance(raw, str):
        try:
            raw = parse_json(raw)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON ({error.msg} at character {error.pos + 1})") from None
    if not isinstance(raw, dict):
        raise ValueError
    # Through JSON and back: mappings are stored with a run, and what JSON cannot hold would fail only then.
    return json.loads(json.dumps({str(key): value for key, value in raw.items()}, allow_nan=False))


def _read_pairs(text: str) -> dict[str, Any]:
    """Read momentum=0.9,nesterov=true. Several numbers of one key are divided by spaces or colons: drops=0.3:0.6."""
    found: dict[str, Any] = {}
    for pair in text.split(","):
        key, equals, value = (part.strip() for part in pair.rpartition("="))  # a regular expression may hold a =
        if not equals or not key or not value:
            raise ValueError(f"{pair.strip()!r} is not KEY=VALUE")
        if key in found:
            raise ValueError(f"{key} is given twice")
        words = value.replace(":", " ").split()
        found[key] = _scalar(value) if len(words) == 1 else [_scalar(word) for word in words]
    return found


def _scalar(word: str) -> Any:
    """Read a number, a boolean, or else a word."""
    try:
        return read_int(word) if re.fullmatch(r"[-+]?\d+", word) else read_float(word)
    except ValueError:
        return {"true": True, "false": False}.get(word.lower(), word)


def read_bytes_text(raw: Any) -> str:
    """Read a number of bytes with its unit; the text is kept as written."""
    if isinstance(raw, bool):
        raise ValueError
    parse_bytes(raw)
    return str(raw)


def read_loss_scale(raw: object) -> float | str:
    """Read a loss scale: a number, or the word dynamic."""
    return "dynamic" if isinstance(raw, str) and raw.lower() == "dynamic" else read_float(raw)


def read_class_weights(raw: object) -> tuple[Any, ...]:
    """Read weights of classes: the word balanced, or a number for each class."""
    words = _separate(raw)
    if [str(word).lower() for word in words] == ["balanced"]:
        return ("balanced",)
    return tuple(read_float(word) for word in words)


def read_replicas(raw: object) -> int | None:
    """Read a number of replicas; auto is None."""
    return None if isinstance(raw, str) and raw.lower() == "auto" else read_int(raw)


BOOL = Kind(description="true or false (on/off, yes/no, 1/0)", metavar="BOOL", read=read_bool)
INT = Kind(description="a whole number", metavar="N", read=read_int)
FLOAT = Kind(description="a number", metavar="X", read=read_float)
FRACTION = Kind(description="a number or a fraction, such as 1/3", metavar="X", read=read_fraction)
TEXT = Kind(description="a text", metavar="TEXT", read=read_text)
WORDS = Kind(description="a list of words", metavar="WORD", read=read_words, many=True)
NUMBERS = Kind(description="a list of whole numbers", metavar="N", read=read_numbers, many=True)
FLOATS = Kind(description="a list of numbers", metavar="X", read=read_floats, many=True)
MAPPING = Kind(description="a mapping, KEY=VALUE,KEY=VALUE or JSON", metavar="KEY=VALUE,...", read=read_mapping)
BYTES = Kind(description="a number of bytes, such as 2GiB or 512MB", metavar="BYTES", read=read_bytes_text)
REPLICAS = Kind(description="a whole number or the word auto", metavar="N|auto", read=read_replicas)
LOSS_SCALE = Kind(description="a number or the word dynamic", metavar="X|dynamic", read=read_loss_scale)
CLASS_WEIGHTS = Kind(
    description="the word balanced or a number for each class", metavar="X|balanced", read=read_class_weights, many=True
)

KIND_OF_TYPE = {bool: BOOL, int: INT, float: FLOAT, str: TEXT, tuple: WORDS, dict: MAPPING}


def at_least(low: float) -> Limit:
    """Limit a number from below."""
    return lambda value: "" if value >= low else f"must be {low} or more"


def above(low: float) -> Limit:
    """Limit a number to more than `low`."""
    return lambda value: "" if value > low else f"must be more than {low}"


def between(low: float, high: float) -> Limit:
    """Limit a number to a closed range."""
    return lambda value: "" if low <= value <= high else f"must be from {low} to {high}"


def fraction(value: float) -> str:
    """Limit a number to 0 <= x < 1."""
    return "" if 0 <= value < 1 else "must be at least 0 and less than 1"


def all_positive(value: tuple[float, ...]) -> str:
    """Limit every number of a list to more than 0."""
    return "" if all(number > 0 for number in value) else "must be more than 0, each of them"


def all_fractions(value: tuple[float, ...]) -> str:
    """Limit every number of a list to 0 <= x < 1."""
    return "" if not any(fraction(number) for number in value) else "must be at least 0 and less than 1, each of them"


def positive_or_all(value: int) -> str:
    """Limit to a positive count, or -1 for a whole epoch."""
    return "" if value == -1 or value >= 1 else "must be -1 (the whole dataset) or 1 or more"


def class_weights(value: tuple[Any, ...]) -> str:
    """Limit weights of classes to numbers that are not negative, and not all 0."""
    if not value or value == ("balanced",):
        return ""
    return "" if min(value) >= 0 and max(value) > 0 else "must be 0 or more, and one of them more than 0"


def regular_expressions(value: tuple[str, ...]) -> str:
    """Limit each word to a regular expression that compiles."""
    for word in value:
        try:
            re.compile(word)
        except re.error as error:
            return f"must be regular expressions; {word!r} is not one ({error})"
    return ""


def factors_by_pattern(value: dict[str, Any]) -> str:
    """Limit a mapping to regular expressions with a factor of 0 or more each."""
    for pattern, factor in value.items():
        if isinstance(factor, bool) or not isinstance(factor, int | float) or factor < 0:
            return f"must give each regular expression a factor of 0 or more; {pattern!r} has {factor!r}"
    return regular_expressions(tuple(value))


def supported_precision(value: str) -> str:
    """Limit to the supported compute.update precisions, telling a malformed one from an unsupported one."""
    if not re.fullmatch(r"\d+\.\d+", value):
        return "must be written compute.update, such as 16.32; this is not a precision"
    supported = ("16.16", "16.32", "32.32")
    return "" if value in supported else f"is well formed, but only {', '.join(supported)} are supported"


def format_value(value: object) -> str:
    """Return a value as a person would write it on a command line."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, dict):
        return json.dumps(value)
    return " ".join(map(format_value, value)) or "none" if isinstance(value, tuple) else str(value)


# Options: dataclass fields with help, aliases, choices and limits; how names are spelled; rules across options.


_META = "headrace"
_FEW_CHOICES = 8  # are listed beside the nearest one


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
        none_words = () if self.kind is TEXT else NONE_WORDS
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
        broken = self.check(value) if self.check else ""
        if self.choices and not broken:
            value, broken = self._choose(value)
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
) -> Any:
    """Make a dataclass field that is an option.

    `no_value` is what `--no-NAME` means where it is not a boolean, `bare_value` what `--NAME` means without a value,
    `synonyms` other words for choices, `chosen` what a run chooses where nobody gives the option,
    `path_option` the option that a path belongs to.
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


# A name of Keras's that is no alias: --steps, its beginning, could mean several things.
_KERAS = {"steps_per_epoch": "weight_updates_per_epoch"}


def find_option(written: str, known: Mapping[str, OptionName], *, place: str = "", dashes: str = "") -> OptionName:
    """Return what `written` stands for; `place` (file and line) and `dashes` (on a command line) are for errors."""
    wanted = normalise_name(written)
    wanted = _KERAS.get(wanted, wanted)
    if wanted in known:
        return known[wanted]
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
    raise ConfigError(f"{place}{'there' if place else 'There'} is no option {dashes}{written}.", remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What rules are checked against: the configuration and where its values came from."""

    config: "Config"
    origins: Mapping[str, Origin]

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
    """A combination that works but may surprise."""

    when: Callable[[Facts], object]
    text: Callable[[Facts], str]


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


def idle(name: str, other: str, when: Callable[[Facts], object]) -> Remark:
    """Note that an option does nothing; `other` is the option whose value makes it so, or a phrase with without."""

    def text(facts: Facts) -> str:
        reason = other if " " in other else f"with {facts.describe(other)}"
        return f"{facts.describe(name)} has no effect {reason}."

    return Remark(when=when, text=text)
