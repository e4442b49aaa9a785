"""Messages for somebody who writes Python: options by their names and values, not as flags of the command line."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from headrace.config.field import Option, OptionName, option_names
from headrace.config.translations import known_options
from headrace.core.errors import HeadraceError
from headrace.rows.values import BOOL, BYTES, DURATION, FRACTION, LOSS_SCALE, REPLICAS

_FLAG = re.compile(r"(?<![\w-])--(?P<flag>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?P<rest>[ =](?P<value>[^\s;:)\]]+))?")
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_PLACEHOLDER = re.compile(r"[A-Z]+(?:_[A-Z]+)*")
_MEASURED = (BYTES, DURATION, FRACTION, REPLICAS, LOSS_SCALE)  # their words are texts in Python: "10m", "2GiB", "1/3"

F = TypeVar("F", bound=Callable[..., Any])


@functools.cache
def _names() -> tuple[Mapping[str, OptionName], Mapping[str, Option]]:
    options = known_options()
    return option_names(options), options


def in_python(text: str) -> str:
    """Return a message with the flags of options as keyword arguments; flags of commands stay as they are."""
    return _FLAG.sub(_argument, text)


def _argument(found: re.Match[str]) -> str:
    named, options = _names()
    spelled = named.get(found["flag"].replace("-", "_"))
    if spelled is None:
        return found[0]
    option, written, rest = options[spelled.name], found["flag"].replace("-", "_"), found["rest"] or ""
    if spelled.negated:
        return f"{option.name}={'False' if option.kind is BOOL else repr(option.no_value)}{rest}"
    value = (found["value"] or "").rstrip(".,")
    after = rest[1 + len(value) :]
    shown = _value(option, value)
    return f"{written}={shown}{after}" if shown else f"{written}{rest}"


def _value(option: Option, value: str) -> str:
    """Return the value that stands behind a flag as Python writes it; nothing where the next word is none."""
    if _PLACEHOLDER.fullmatch(value):
        return value if option.kind is not BOOL else ""
    if _NUMBER.fullmatch(value) and option.kind is not BOOL:
        return value
    if value and (option.knows(value) if option.choices else option.kind in _MEASURED and _reads(option, value)):
        return f'"{value}"' if option.kind is not BOOL else ""
    return ""


def _reads(option: Option, value: str) -> bool:
    try:
        return option.read(value) is not None or value == "auto"
    except HeadraceError:
        return False


@contextmanager
def errors_in_python() -> Iterator[None]:
    """Let errors that pass speak of arguments instead of flags."""
    try:
        yield
    except HeadraceError as error:
        parts = [in_python(part) for part in (error.problem, error.rule, error.remedy)]
        error.problem, error.rule, error.remedy = parts
        error.args = (" ".join(part for part in parts if part),)
        raise


def speaks_python(function: F) -> F:
    """Return a function whose errors speak of arguments instead of flags."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with errors_in_python():
            return function(*args, **kwargs)

    return cast(F, wrapped)
