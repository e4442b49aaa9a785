"""The schema: Config and its sections, from which all names, types, defaults and limits come."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from headrace.config.field import Option, options_of
from headrace.config.section_augment import Augment
from headrace.config.section_compiler import Compiler
from headrace.config.section_data import Data
from headrace.config.section_learning import CheckpointSection, Learning, Logging, Numerics, Validation
from headrace.config.section_model import ModelSection, WeightsSection
from headrace.config.section_pipeline import PipelineSection
from headrace.config.section_run import Batch, Run
from headrace.config.spellings import SPELLINGS

__all__ = [
    "SECTIONS",
    "Augment",
    "Batch",
    "CheckpointSection",
    "Compiler",
    "Config",
    "Data",
    "Learning",
    "Logging",
    "ModelSection",
    "Numerics",
    "PipelineSection",
    "Run",
    "Validation",
    "WeightsSection",
    "all_options",
    "config_options",
    "options_in",
]

_SHOWN = 8  # values in the representation of a configuration


@dataclass(frozen=True, kw_only=True, repr=False)
class Config:
    """The whole configuration of a run: frozen, typed, one attribute per section."""

    run: Run = field(default_factory=Run)
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    model: ModelSection = field(default_factory=ModelSection)
    weights: WeightsSection = field(default_factory=WeightsSection)
    batch: Batch = field(default_factory=Batch)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    numerics: Numerics = field(default_factory=Numerics)
    learning: Learning = field(default_factory=Learning)
    validation: Validation = field(default_factory=Validation)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    logging: Logging = field(default_factory=Logging)
    compiler: Compiler = field(default_factory=Compiler)

    def __repr__(self) -> str:
        """Return the first values that are not the defaults; each section shows all of its values."""
        changed = [
            f"{option.name}={getattr(section, option.name)!r}"
            for section, default in ((getattr(self, name), cls()) for name, cls in SECTIONS.items())
            for option in dataclasses.fields(section)
            if getattr(section, option.name) != getattr(default, option.name)
        ]
        more = [f"... {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
        return f"Config({', '.join(changed[:_SHOWN] + more)})"


SECTIONS: dict[str, Any] = {section.name: section.type for section in dataclasses.fields(Config)}


def options_in(sections: Mapping[str, type]) -> Mapping[str, Option]:
    """Return every option that is accepted for some sections by its flat name, second names beside their options."""
    found: dict[str, Option] = {}
    for section, cls in sections.items():
        fields = options_of(section, cls)
        assert not found.keys() & fields.keys(), "a name is in two sections"
        for name, option in fields.items():
            found[name] = option
            found |= {row.name: row.option for row in SPELLINGS.values() if row.of[0] == name}
    return MappingProxyType(found)


@functools.cache
def all_options() -> Mapping[str, Option]:
    """Return every option that is accepted by its flat name, in order."""
    return options_in(SECTIONS)


@functools.cache
def config_options() -> Mapping[str, Option]:
    """Return the options that are fields of Config by their flat names, in order."""
    return MappingProxyType({name: option for name, option in all_options().items() if name not in SPELLINGS})
