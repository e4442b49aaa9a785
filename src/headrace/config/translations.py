"""Options of other applications, which an installed package translates into ours.

Such a package names its `Translation` in its metadata, by an entry point of the group `headrace.translations`. Programs
that bring one along hand it over with `use`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from headrace.config.field import Option
from headrace.config.layers import Found, Layer, Yields
from headrace.config.schema import SECTIONS, all_options, options_in
from headrace.core.errors import ConfigError

GROUP = "headrace.translations"


@dataclass(frozen=True, kw_only=True)
class Translated:
    """Ordinary options, the options they were translated from, and remarks for the user."""

    options: Found
    source: Layer = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ApplicationHelp:
    """What help says otherwise in an application: defaults as texts, other meanings, and options it does not have."""

    name: str
    about: str
    defaults: Mapping[str, str]
    meanings: Mapping[str, str]
    hidden: frozenset[str]


def _no_script(script: str, argv: Sequence[str]) -> list[str]:
    raise ConfigError(
        f"There is no script {script} here.",
        rule="Scripts of another application come with an installed package that translates its options.",
        remedy="Give the script's path, or install the package that has it.",
    )


@dataclass(frozen=True, kw_only=True)
class Translation:
    """Options of another application and how they become ordinary ones; without arguments, there are none.

    `has_defaults` says whether that application's defaults apply, in which case no recipe is chosen by default;
    `chooses`, by what was given to it, whether a run chooses what nobody gave, as it does for ordinary options.
    """

    sections: Mapping[str, type] = field(default_factory=dict)
    yields: tuple[Yields, ...] = ()
    recipes: tuple[Path, ...] = ()
    environment: Callable[[Mapping[str, str]], Layer] = lambda environ: {}
    has_defaults: Callable[[Found], bool] = lambda found: False
    chooses: Callable[[Layer], bool] = lambda source: True
    # Names that mean something else there are put right before layers meet: saved and typed are told apart by layer.
    reword: Callable[[list[Layer]], list[Layer]] = lambda layers: layers
    translate: Callable[[Found], Translated] = lambda found: Translated(options=found)
    # What help says otherwise for a command line, whose words and options are given.
    help: Callable[[Sequence[str], Mapping[str, object]], ApplicationHelp | None] = lambda argv, options: None
    # The words of our command that one of its scripts makes of its own.
    script_words: Callable[[str, list[str]], list[str]] = _no_script

    @cached_property
    def options(self) -> Mapping[str, Option]:
        """Every option that is accepted: ours and theirs."""
        return options_in({**SECTIONS, **self.sections}) if self.sections else all_options()


PLAIN = Translation()
_current: Translation | None = None


def translation() -> Translation:
    """Return the translation that was handed over, else the installed one; without either it has no options."""
    global _current
    if _current is None:
        _current = _installed()
    return _current


def use(given: Translation | None) -> None:
    """Translate by this from now on; by the installed one with None."""
    global _current
    _current = given


def _installed() -> Translation:
    from importlib.metadata import entry_points  # here: it takes as long to import as the first screen of help

    found = {entry.value: entry for entry in entry_points(group=GROUP)}
    if len(found) > 1:
        raise ConfigError(
            f"Several packages translate options: {', '.join(sorted(found))}.",
            rule="Options are those of Headrace and of one other application, which could share names otherwise.",
            remedy="Uninstall all but one.",
        )
    for value, entry in found.items():
        try:
            return entry.load()
        except ModuleNotFoundError as error:  # the package was removed by hand
            if error.name != value.partition(".")[0]:
                raise
    return PLAIN


def known_options() -> Mapping[str, Option]:
    """Return every option that is accepted, ours and the other application's, by its flat name."""
    return translation().options


def known_sections() -> Mapping[str, type]:
    """Return the sections of all accepted options."""
    return {**SECTIONS, **translation().sections}


def without_translation() -> str:
    """Return what to do about an option that nobody here knows: another application's needs the package that has it."""
    if translation().sections:
        return ""
    return f"Options of another application need the package that translates them, installed (entry points {GROUP})."
