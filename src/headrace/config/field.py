"""One option: a dataclass field that also carries its help, aliases, choices and limit."""

import copy
import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any

from headrace.config import values
from headrace.config.values import Kind, Limit
from headrace.core.errors import ConfigError, did_you_mean

_META = "headrace"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a value came from: its kind (default, environment, recipe, file, command line, code) and the place."""

    kind: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".strip()

    @property
    def is_given(self) -> bool:
        """Say whether somebody wrote the value; else it is worked out again when options change."""
        return self.kind not in ("default", "dialect")


DEFAULT = Origin(kind="default")
COMMAND_LINE = Origin(kind="command line")


@dataclass(frozen=True, kw_only=True)
class Option:
    """All that is known of an option; the single source for parsing, help, documents and checks."""

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
    same: tuple[tuple[str, str], ...] = ()  # other words for choices, or for a boolean's on and off

    @property
    def flag(self) -> str:
        """Return the option as written on a command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def placeholder(self) -> str:
        """Return what stands for the value in help texts."""
        return "{" + ",".join(self.choices) + "}" if self.choices else self.kind.metavar

    def read(self, raw: Any, origin: Origin = DEFAULT) -> Any:
        """Return the value that `raw` stands for, or refuse it with the option's help sentence."""
        none_words = () if self.kind is values.TEXT else values.NONE_WORDS
        if self.optional and (raw is None or (isinstance(raw, str) and raw.lower() in none_words)):
            return None
        if self.kind is values.BOOL:
            raw = next((meant for word, meant in self.same if _plain(str(raw)) == _plain(word)), raw)
        try:
            value = self.kind.read(raw)
        except (ValueError, TypeError, OverflowError) as error:
            told = str(error) if self.kind in (values.MAPPING, values.BYTES) else ""
            raise self._refusal(raw, told or f"not {self.kind.words}", origin) from None
        broken = self.check(value) if self.check else ""
        if self.choices and not broken:
            value, broken = self._choose(value)
        if broken:
            raise self._refusal(raw, broken, origin)
        return value

    def knows(self, word: str) -> bool:
        """Say whether a word is one of the choices, or another word for one."""
        return _plain(word) in {_plain(choice) for choice in (*self.choices, *(other for other, _ in self.same))}

    def _choose(self, value: str) -> tuple[str, str]:
        """Return the choice spelled `value`, whatever its case and dashes, or the rule it breaks."""
        plain = {_plain(choice): choice for choice in self.choices}
        plain |= {_plain(word): choice for word, choice in self.same}
        found = plain.get(_plain(value))
        return (found, "") if found else (value, "not one of the choices")

    def _refusal(self, raw: Any, why: str, origin: Origin) -> ConfigError:
        place = f"{origin.where}: " if origin.kind in ("recipe", "file") else ""
        name = self.flag if origin.kind == "command line" else self.name
        shown = "nothing" if raw is None else repr(raw)
        remedy = did_you_mean(str(raw), self.choices) if self.choices else ""
        return ConfigError(f"{place}{name} is {shown}: {why}.", rule=f"{self.name}: {self.help}", remedy=remedy)


def option(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    check: Limit | None = None,
    kind: Kind | None = None,
    no_value: Any = None,
    bare_value: Any = None,
    same: tuple[tuple[str, str], ...] = (),
) -> Any:
    """Make a dataclass field that is an option.

    `no_value` is what `--no-NAME` means where it is not a boolean, `bare_value` what `--NAME` means without a value,
    `same` other words for choices.
    """
    extra = {"help": help, "aliases": aliases, "choices": choices, "check": check, "same": same}
    bare = {"no_value": no_value, "bare_value": bare_value}
    metadata = {_META: {"default": default, "kind": kind, **extra, **bare}}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options_of(section: str, cls: type) -> dict[str, Option]:
    """Return the options of one section's dataclass, by name, in order."""
    found = {}
    for field in dataclasses.fields(cls):
        meta = dict(field.metadata[_META])
        kind, optional = _kind_of(field.type)
        kind = meta.pop("kind") or kind
        if kind is values.BOOL:
            meta["no_value"] = False
        found[field.name] = Option(name=field.name, section=section, kind=kind, optional=optional, **meta)
    return found


def _kind_of(annotation: Any) -> tuple[Kind, bool]:
    """Return (kind, may it be None) of a field's annotation."""
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    plain = [typing.get_origin(part) or part for part in parts if part is not type(None)]
    return values.KIND_OF_TYPE[plain[0]], type(None) in parts


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
