"""Values as people write them: how each kind is parsed from a command line, YAML or Python, limits, and keyed mappings.

A reader takes what was written and returns the value, or raises ValueError (a message, if any, is more precise than
the kind's description). A limit takes a value and returns the rule it breaks, or an empty string.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.core.addresses import hide_addresses
from headrace.core.json_text import parse_json
from headrace.core.units import parse_bytes, parse_duration

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


def read_place(raw: object) -> str:
    """Read a path, a name or an address; what opens something private is known to this process alone."""
    return hide_addresses(read_text(raw))


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


def read_duration(raw: object) -> float:
    """Read a time, with its unit or in seconds."""
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError
    return read_float(parse_duration(raw))


LOSS_SCALES = ("dynamic", "stepped", "doubling")  # those that change during a run


def read_loss_scale(raw: object) -> float | str:
    """Read a loss scale: a number, or the word for one that changes."""
    return raw.lower() if isinstance(raw, str) and raw.lower() in LOSS_SCALES else read_float(raw)


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
PLACE = Kind(description="a path, a name or an address", metavar="TEXT", read=read_place)
ANYWHERE = Kind(description="a path, or an address of a store", metavar="PATH", read=read_text)
PATH = Kind(description="a path", metavar="PATH", read=read_text)
WORDS = Kind(description="a list of words", metavar="WORD", read=read_words, many=True)
NUMBERS = Kind(description="a list of whole numbers", metavar="N", read=read_numbers, many=True)
FLOATS = Kind(description="a list of numbers", metavar="X", read=read_floats, many=True)
MAPPING = Kind(description="a mapping, KEY=VALUE,KEY=VALUE or JSON", metavar="KEY=VALUE,...", read=read_mapping)
BYTES = Kind(description="a number of bytes, such as 2GiB or 512MB", metavar="BYTES", read=read_bytes_text)
DURATION = Kind(description="a time, such as 90s, 10m or 1h30m", metavar="TIME", read=read_duration)
REPLICAS = Kind(description="a whole number or the word auto", metavar="N|auto", read=read_replicas)
LOSS_SCALE = Kind(
    description=f"a number or one of the words {', '.join(LOSS_SCALES)}",
    metavar=f"X|{'|'.join(LOSS_SCALES)}",
    read=read_loss_scale,
)
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


def pattern_of_one_group(value: str) -> str:
    """Limit to a regular expression with one group."""
    try:
        groups = re.compile(value).groups
    except re.error as error:
        return f"must be a regular expression: {error}"
    return "" if groups == 1 else f"must have one group, in brackets (it has {groups}): (?:...) is none"


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


REQUIRED = object()  # in place of the default of a key that must be given; None is a default of some


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a mapping: its kind, its limit, and its default (REQUIRED when there is none)."""

    name: str
    kind: Kind = FLOAT
    default: Any = REQUIRED
    check: Limit | None = None


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The keys of one variant of a mapping. Of `one_of` exactly one must be given, and only that one appears.

    `needs_one` off: it may be none of them.
    """

    params: tuple[Key, ...]
    one_of: tuple[Key, ...] = ()
    needs_one: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Return all keys that the variant knows."""
        return tuple(key.name for key in self.params + self.one_of)

    @property
    def required(self) -> tuple[str, ...]:
        """Return the keys that must be given."""
        return tuple(key.name for key in self.params if key.default is REQUIRED)
