"""From what people wrote to a Config: defaults, a named YAML block, the command line; with the origin of every value.

`resolve` is for the command line, `config_from` for code, `to_flat` and `from_flat` for what is saved with a run.
"""

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.config.checks import check
from headrace.config.derived import settle
from headrace.config.dialect import choose_dialect, settle_dialect
from headrace.config.field import COMMAND_LINE, DEFAULT, Option, Origin, Spelled, find, spellings
from headrace.config.layers import Given, Layer, launcher_layer, merge_layers
from headrace.config.schema import SECTIONS, Config, all_options
from headrace.config.section_data import IMAGE_DATASETS
from headrace.config.values import BOOL, read_bool
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.config.yaml_blocks import Block

DEFAULT_RECIPE = "default"
IMAGES_RECIPE = "images"  # the default where somebody names a path to their images
NO_RECIPE = "none"
CACHE_VARIABLE = "TF_POPLAR_FLAGS"  # the reference's way to say where compiled programs are kept
DATASET_VARIABLES = ("DATASETS_DIR", "DATA_DIR")
KEPT_OF_MODEL = {"bn_momentum", "stable_norm", "dbn_replica_group_size"}  # not of one network, but of how it trains
NAMED_OF_DATA = {"dataset", "dataset_path", "image_size", "num_channels", "num_classes", "num_samples"}


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A checked configuration, where each value came from, and what the user should hear of it."""

    config: Config
    origins: Mapping[str, Origin]
    name: str = ""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def resolve(
    options: Mapping[str, Any],
    config_name: str | None = None,
    config_path: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Resolved:
    """Return the configuration of a named block with the command line's options over it.

    Without a name it is the shipped `default`, or `images` where the dataset is one of image files or only its path is
    given; `none` means the defaults of the schema alone.
    """
    from headrace.config.yaml_blocks import blocks_of, choose

    given = _option_layer(options, COMMAND_LINE)
    name = config_name or (None if config_path else _default_recipe(given))
    layers = [_environment(environ), given]
    if name != NO_RECIPE:
        block = choose(blocks_of(config_path), name, config_path)
        layers.insert(1, _block_layer(block, "file" if config_path else "recipe"))
    return _assemble(layers, name or "", environ)


def override(saved: Resolved, options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Resolved:
    """Return a saved configuration with the command line's options over it."""
    flat, known = to_flat(saved.config), all_options()
    # How the processes were started then says nothing about now.
    written = {name: origin for name, origin in saved.origins.items() if origin.is_given and name != "distributed"}
    given = {name: Given(value=known[name].read(flat[name], origin), origin=origin) for name, origin in written.items()}
    return _assemble([given, _option_layer(options, COMMAND_LINE)], saved.name, environ)


def config_from(flat: Mapping[str, Any]) -> Config:
    """Return a checked Config from flat option names (or their aliases); what is not named has its default."""
    return resolve_code(flat).config


def resolve_code(flat: Mapping[str, Any]) -> Resolved:
    """Return the configuration of options that code gives; what is not named has its default."""
    return _assemble([_option_layer(flat, Origin(kind="code"))], "")


def named_options() -> frozenset[str]:
    """Return the options that name and shape a network and a data set, which code may give instead."""
    network = {name for name, option in all_options().items() if option.section == "model"} - KEPT_OF_MODEL
    return frozenset(network | NAMED_OF_DATA)


def to_flat(config: Config) -> dict[str, Any]:
    """Return {option name: value} of plain JSON values, every option included."""
    flat = {}
    for name, option in all_options().items():
        value = getattr(getattr(config, option.section), name)
        flat[name] = list(value) if isinstance(value, tuple) else copy.deepcopy(value)
    return flat


def from_flat(flat: Mapping[str, Any], origins: Mapping[str, Origin] | None = None) -> Config:
    """Return the Config that `to_flat` was given, exactly; an option that was not saved has its default."""
    options = all_options()
    for name in flat:
        if name not in options:
            raise ConfigError(f"The saved configuration has an option {name}, which this version does not know.")
    where = origins or {}
    saved = Origin(kind="saved")
    return _build(
        {name: options[name].read(flat.get(name, options[name].default), where.get(name, saved)) for name in options}
    )


def origins_to_json(origins: Mapping[str, Origin]) -> dict[str, dict[str, str]]:
    """Return origins as plain JSON values; those that are defaults are left out."""
    return {name: {"kind": origin.kind, "where": origin.where} for name, origin in origins.items() if origin != DEFAULT}


def origins_from_json(saved: Mapping[str, Mapping[str, str]]) -> dict[str, Origin]:
    """Return the origins that `origins_to_json` was given, for every option."""
    found = {name: Origin(kind=row["kind"], where=row["where"]) for name, row in saved.items()}
    return {name: found.get(name, DEFAULT) for name in all_options()}


def _assemble(layers: list[Layer], name: str, environ: Mapping[str, str] | None = None) -> Resolved:
    launched, overruled = launcher_layer(layers, environ or {})
    found, tie_notes = merge_layers([*layers, launched])
    found, dialect_notes = settle_dialect(found)
    found = settle(found)
    config = _build({option: given.value for option, given in found.items()})
    origins = {option: given.origin for option, given in found.items()}
    warnings, notes = check(config, origins)
    return Resolved(
        config=config,
        origins=origins,
        name=name,
        warnings=overruled + warnings,
        notes=tie_notes + dialect_notes + notes,
    )


def _build(values: Mapping[str, Any]) -> Config:
    by_section: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, option in all_options().items():
        by_section[option.section][name] = values[name]
    return Config(**{section: SECTIONS[section](**items) for section, items in by_section.items()})


def _default_recipe(given: Layer) -> str:
    if choose_dialect(merge_layers([given])[0])[0] != "headrace":
        return NO_RECIPE  # a reference's command line comes with that application's own defaults
    if "dataset" in given:
        return IMAGES_RECIPE if given["dataset"].value in IMAGE_DATASETS else DEFAULT_RECIPE
    return IMAGES_RECIPE if "dataset_path" in given else DEFAULT_RECIPE


def _environment(environ: Mapping[str, str]) -> Layer:
    found = {}
    for variable in reversed(DATASET_VARIABLES):
        if environ.get(variable):
            origin = Origin(kind="environment", where=f"${variable}")
            found["dataset_path"] = Given(value=environ[variable], origin=origin)
    for word in environ.get(CACHE_VARIABLE, "").split():
        name, _, value = word.partition("=")
        if name.lstrip("-") == "executable_cache_path" and value:
            origin = Origin(kind="environment", where=f"${CACHE_VARIABLE}")
            found["compilation_cache_dir"] = Given(value=value, origin=origin)
    return found


def _block_layer(block: "Block", kind: str) -> Layer:
    """Return what a block gives: what it merges in, and its own over that. One option under two names is refused."""
    merged, own = {}, {}
    for entries, layer in ((block.merged, merged), (block.own, own)):
        for entry in entries:
            origin = Origin(kind=kind, where=f"{block.file}:{entry.line}")
            spelled = find(entry.key, spellings(all_options()), place=f"{origin.where}: ")
            if layer is own and spelled.name in own:
                problem = f"{origin.where}: {entry.key} is given twice (first at {own[spelled.name].origin.where})."
                raise ConfigError(problem, rule=f"Both names mean {spelled.name}.", remedy="Keep one of them.")
            layer[spelled.name] = Given(value=_read(spelled, entry.value, origin), origin=origin)
    return {**merged, **own}


def _option_layer(options: Mapping[str, Any], origin: Origin) -> Layer:
    layer = {}
    for written, raw in options.items():
        spelled = find(written, spellings(all_options()), dashes="--" if origin is COMMAND_LINE else "")
        layer[spelled.name] = Given(value=_read(spelled, raw, origin), origin=origin)
    return layer


def _read(spelled: Spelled, raw: Any, origin: Origin) -> Any:
    option = all_options()[spelled.name]
    return _read_negated(option, raw, origin) if spelled.negated else option.read(raw, origin)


def _read_negated(option: Option, raw: Any, origin: Origin) -> Any:
    """Read `no_x: true` as x turned off, and `no_x: false` as x left on."""
    try:
        off = read_bool(raw)
    except ValueError:
        place = f"{origin.where}: " if origin.kind in ("recipe", "file") else ""
        raise ConfigError(f"{place}no_{option.name} is {raw!r}: not {BOOL.words}.", rule=option.help) from None
    return option.no_value if off else (True if option.kind is BOOL else option.default)
