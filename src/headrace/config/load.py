"""From what people give to a Config: defaults, a named YAML block, the command line; with the origin of every value.

`resolve` is for the command line, `config_from` for code, `to_saved` and `from_saved` for what is stored with a run.
Options of another application are accepted where a package translates them (`translations.py`).

What is filled in here keeps an origin of the kind `default`, so that it is derived again when options change.
"""

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.config.checks import check
from headrace.config.derived import derive
from headrace.config.field import (
    CHOSEN,
    CODE,
    COMMAND_LINE,
    DEFAULT,
    TRANSLATED,
    Option,
    OptionName,
    Origin,
    find_option,
    option_names,
)
from headrace.config.layers import YIELDS, Given, Layer, launcher_layer, merge_layers
from headrace.config.networks import find_variant
from headrace.config.schema import SECTIONS, Config, all_options, config_options
from headrace.config.section_data import IMAGE_DATASETS
from headrace.config.section_model import ModelSection
from headrace.config.spellings import (
    PARTS_YIELD,
    SIZE,
    SPELLINGS,
    WHOLES,
    Whole,
    given_parts,
    join_layers,
    read_wholes,
    refuse_conflicts,
    said_by,
    write_parts,
)
from headrace.config.translations import known_options, translation, without_translation
from headrace.core.errors import ConfigError
from headrace.core.local_path import is_set_name
from headrace.rows.values import BOOL, read_bool

if TYPE_CHECKING:
    from headrace.config.yaml_blocks import Block

DEFAULT_RECIPE = "default"
IMAGES_RECIPE = "images"  # the default where somebody names a path to their images
NO_RECIPE = "none"
DATASET_VARIABLES = ("DATASETS_DIR", "DATA_DIR")
# Not of one network, but of how it trains.
KEPT_OF_MODEL = {"bn_momentum", "bn_momentum_start", "stable_norm", "dbn_replica_group_size"}
NAMED_OF_DATA = frozenset(
    {"dataset", "dataset_path", "validation_path", "labels", "image_size", "num_channels", "num_classes", "num_samples"}
    | {"image_column", "label_column", "image_suffix", "label_pattern"}
)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A checked configuration, where each value came from, and remarks for the user.

    `source` holds what was given in other words, as it was: options of another application, and second names of a part
    of an option. They are translated, or written into their options, again when options change.
    """

    config: Config
    origins: Mapping[str, Origin]
    name: str = ""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    source: Mapping[str, Given] = field(default_factory=dict)

    def __repr__(self) -> str:
        given = sum(origin.is_given for origin in self.origins.values())
        return f"Resolved({self.name or 'no recipe'}, {given} options given, {self.config})"

    def origin(self, name: str) -> Origin:
        """Return where the value of an option comes from, or that of a second name as it was given."""
        return self.source[name].origin if name in self.source else self.origins.get(name, DEFAULT)

    def given(self) -> dict[str, Given]:
        """Return the options that somebody gave, ours and another application's."""
        flat, known = to_flat(self.config), config_options()
        ours = {name: origin for name, origin in self.origins.items() if origin.is_given}
        found = {
            name: Given(value=known[name].read(flat[name], origin), origin=origin) for name, origin in ours.items()
        }
        return found | dict(self.source)


def resolve(
    options: Mapping[str, object],
    config_name: str | None = None,
    config_path: str | None = None,
    environ: Mapping[str, str] | None = None,
    origin: Origin = COMMAND_LINE,
) -> Resolved:
    """Return the configuration of a named block with the command line's options over it.

    Without a name it is the shipped `default`, or `images` where the dataset is one of image files or only its path is
    given; `none` means the defaults of the schema alone. Without `environ` it is that of the process.
    """
    environ = os.environ if environ is None else environ
    given = _option_layer(options, origin)
    name = config_name or (None if config_path else _default_recipe(given))
    layers = [{**_environment(environ), **translation().environment(environ)}, given]
    if name != NO_RECIPE:
        layers.insert(1, _block_layer(choose_block(name, config_path), "file" if config_path else "recipe"))
    return _assemble(layers, name or "", environ, _weight_layer(layers))


def override(saved: Resolved, options: Mapping[str, object], environ: Mapping[str, str] | None = None) -> Resolved:
    """Return a saved configuration with the command line's options over it."""
    environ = os.environ if environ is None else environ
    given = saved.given()
    given.pop("distributed", None)  # how the processes were started then says nothing about now
    return _assemble([given, _option_layer(options, COMMAND_LINE)], saved.name, environ, {})


def config_from(flat: Mapping[str, object]) -> Config:
    """Return a checked Config from flat option names (or their aliases); what is not named has its default."""
    return resolve_code(flat).config


def resolve_code(flat: Mapping[str, object], config_name: str | None = NO_RECIPE) -> Resolved:
    """Return the configuration of options that code gives over a recipe; None chooses it as `resolve` does."""
    if config_name != NO_RECIPE:
        return resolve(flat, config_name, None, {}, CODE)
    layers = [_option_layer(flat, CODE)]
    return _assemble(layers, "", {}, _weight_layer(layers))


def named_blocks(config_path: str | None) -> Mapping[str, "Block"]:
    """Return the named configurations of a user's file, or those that are shipped."""
    from headrace.config.yaml_blocks import RECIPES, blocks_of

    return blocks_of(config_path, (RECIPES, *translation().recipes))


def choose_block(name: str | None, config_path: str | None) -> "Block":
    """Return a named configuration, or refuse the name."""
    from headrace.config.yaml_blocks import choose

    return choose(named_blocks(config_path), name, config_path)


def network_options() -> frozenset[str]:
    """Return the options that name and shape a network, which code may give instead; NAMED_OF_DATA are a dataset's."""
    return frozenset(name for name, option in all_options().items() if option.section == "model") - KEPT_OF_MODEL


def network_changes(model: ModelSection) -> dict[str, Any]:
    """Return the options that shape a network beside its name, where they are not the defaults."""
    defaults = ModelSection()
    shaping = network_options() & config_options().keys() - {"model_name"}
    values = {name: getattr(model, name) for name in sorted(shaping)}
    return {name: value for name, value in values.items() if value != getattr(defaults, name)}


def to_flat(config: Config) -> dict[str, Any]:
    """Return {option name: value} of plain JSON values, every option of a configuration included."""
    flat = {}
    for name, option in config_options().items():
        value = getattr(getattr(config, option.section), name)
        flat[name] = list(value) if isinstance(value, tuple) else copy.deepcopy(value)
    return flat


def to_saved(resolved: Resolved) -> dict[str, Any]:
    """Return a configuration with its origins as plain JSON values; origins that are plain defaults are left out."""
    origins = {name: origin for name, origin in resolved.origins.items() if origin != DEFAULT}
    saved = {
        "name": resolved.name,
        "values": to_flat(resolved.config),
        "origins": {name: {"kind": origin.kind, "where": origin.where} for name, origin in origins.items()},
    }
    if resolved.source:
        saved["source"] = {
            name: {"value": given.value, "kind": given.origin.kind, "where": given.origin.where}
            for name, given in resolved.source.items()
        }
    return saved


def from_saved(saved: Mapping[str, Any]) -> Resolved:
    """Return the configuration that `to_saved` was given, exactly; an option that was not saved has its default.

    Runs of earlier versions have second names and the options of another application among the values, and an option
    may have been renamed since, with its old name as an alias.
    """
    no_origin, origins = {"kind": DEFAULT.kind}, saved["origins"]
    rows = {name: {"value": value, **origins.get(name, no_origin)} for name, value in saved["values"].items()}
    found, source = _read_saved(rows), _read_saved(saved.get("source", {}))
    size = found.pop(SIZE.name, None)
    if size and size.origin != DEFAULT and "model_name" in found:  # the name was made with it
        found["model_name"] = Given(value=found["model_name"].value, origin=size.origin)
    for row in WHOLES:
        given = found.pop(row.name, None)
        for name, value in row.write(given.value).items() if given and given.value != row.option.default else ():
            assert given is not None
            said = found.get(name)
            if said is None or said.origin == DEFAULT or row.states(said.value) != given.value:
                found[name] = Given(value=value, origin=given.origin)
    source |= {name: given for name, given in found.items() if name not in config_options() and given.origin != DEFAULT}
    # Runs of earlier versions decoded an image for every crop: a resumed one must make the same pixels.
    if "dataset" in found and found["dataset"].value in IMAGE_DATASETS and "decode_once" not in found:
        found["decode_once"] = Given(value="off", origin=Origin(kind=CHOSEN, where="before it was an option"))
    for name, option in config_options().items():
        if name not in found:
            found[name] = Given(value=option.read(option.default), origin=DEFAULT)
    return _resolved(found, name=saved["name"], source=source)


def _read_saved(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Given]:
    """Return saved options, each a value with its origin, under their names of today."""
    options = known_options()
    known, found = option_names(options), {}
    for written, row in rows.items():
        if written not in known:
            raise ConfigError(
                f"The saved configuration has an option {written}, which this version does not know.",
                remedy=without_translation(),
            )
        kind = str(row["kind"])
        origin = Origin(kind=_OLD_KINDS.get(kind, kind), where=row.get("where", ""))
        found[known[written].name] = Given(value=options[known[written].name].read(row["value"], origin), origin=origin)
    return found


_OLD_KINDS = {"dialect": TRANSLATED}  # how earlier versions called a kind of origin


def _assemble(layers: list[Layer], name: str, environ: Mapping[str, str], with_weights: Layer) -> Resolved:
    layers = translation().reword(layers)
    launched, overruled = launcher_layer(layers, environ)
    network = {name: given for name, given in with_weights.items() if all_options()[name].section == "model"}
    layers = [*layers[:-1], network, layers[-1]]  # over a recipe, below what was asked for
    options = {name: option for name, option in known_options().items() if not isinstance(SPELLINGS.get(name), Whole)}
    yields = (*YIELDS, *PARTS_YIELD, *translation().yields)
    found, dropped = merge_layers([*layers, launched], options, yields)
    translated = translation().translate(found)
    # After the translation, which fills in the mappings that parts are written into. Another application has rules of
    # its own for what a path means.
    settled = derive(translated.options, with_weights, detects=not translation().has_defaults(found))
    resolved = _resolved(settled, name=name, source={**given_parts(translated.options), **translated.source})
    warnings, notes = check(resolved.config, resolved.origins)
    return replace(resolved, warnings=overruled + warnings, notes=dropped + translated.notes + notes)


def _resolved(found: Mapping[str, Given], *, name: str, source: Mapping[str, Given]) -> Resolved:
    return Resolved(
        config=build({name: given.value for name, given in found.items()}),
        origins={option: found[option].origin for option in config_options()},
        name=name,
        source=source,
    )


def _weight_layer(layers: list[Layer]) -> Layer:
    """Return the options that come with the weights that are named; without those of a network that was not asked for.

    They are kept with a run, so that resuming it does not ask again what its weights are.
    """
    said = next((layer["weights"] for layer in reversed(layers) if "weights" in layer), None)
    if said is None or not said.value:
        return {}
    origin = Origin(kind=CHOSEN, where=f"with {said.value}")
    options = _weight_options(said.value)
    found = {name: Given(value=all_options()[name].read(value), origin=origin) for name, value in options.items()}
    named, size = layers[-1].get("model_name"), layers[-1].get("model_size")
    if not found or (named is None and size is None):
        return found
    try:
        asked = find_variant((named or found["model_name"]).value, size.value if size else None)
        is_same = asked == find_variant(found["model_name"].value)
    except ConfigError:  # said when the network is built
        is_same = False
    return found if is_same else {name: one for name, one in found.items() if all_options()[name].section == "data"}


def _weight_options(name: str) -> Mapping[str, Any]:
    """Return the options that come with weights of a name; who reads weights and runs is to the right of this room."""
    return import_module("headrace.run.weight_options").weight_options(name)


def options_of(resolved: Resolved) -> dict[str, Given]:
    """Return the value and the origin of every option of the configuration."""
    return {
        name: Given(value=getattr(getattr(resolved.config, option.section), name), origin=resolved.origins[name])
        for name, option in config_options().items()
    }


def with_values(resolved: Resolved, values: Layer) -> Resolved:
    """Return a configuration with values that follow from what it describes, such as the size of its dataset."""
    settled = write_parts(options_of(resolved) | dict(values))
    kept = {name: given for name, given in resolved.source.items() if not values.keys() & said_by(name)}
    changed = _resolved(settled, name=resolved.name, source={**kept, **given_parts(values)})
    # Checked again, because what was chosen may not go with what was given; but nothing is said twice.
    warnings, _ = check(changed.config, changed.origins)
    new = tuple(text for text in warnings if text not in resolved.warnings)
    return replace(changed, warnings=resolved.warnings + new, notes=resolved.notes)


def build(values: Mapping[str, object]) -> Config:
    """Return the Config of a value for every option, unchecked."""
    by_section: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, option in config_options().items():
        by_section[option.section][name] = values[name]
    return Config(**{section: SECTIONS[section](**items) for section, items in by_section.items()})


def _default_recipe(given: Layer) -> str:
    if translation().has_defaults(merge_layers([given], known_options())[0]):
        return NO_RECIPE
    if "dataset" in given:
        return IMAGES_RECIPE if given["dataset"].value in IMAGE_DATASETS else DEFAULT_RECIPE
    return IMAGES_RECIPE if "dataset_path" in given or "labels" in given else DEFAULT_RECIPE


def _environment(environ: Mapping[str, str]) -> dict[str, Given]:
    found = {}
    # The first of them wins, so it is written last.
    for variable in reversed(DATASET_VARIABLES):
        if environ.get(variable):
            origin = Origin(kind="environment", where=f"${variable}")
            found["dataset_path"] = Given(value=environ[variable], origin=origin)
    return found


def _block_layer(block: "Block", kind: str) -> Layer:
    """Return what a block gives: what it merges in, and its own over that. One option under two names is refused."""
    known = option_names(known_options())
    merged: dict[str, Given] = {}
    own: dict[str, Given] = {}
    for entries, layer in ((block.merged, merged), (block.own, own)):
        for entry in entries:
            origin = Origin(kind=kind, where=f"{block.file}:{entry.line}")
            spelled = find_option(entry.key, known, place=f"{origin.where}: ")
            if layer is own and spelled.name in layer:
                problem = f"{origin.where}: {entry.key} is given twice (first at {layer[spelled.name].origin.where})."
                raise ConfigError(problem, rule=f"Both names mean {spelled.name}.", remedy="Keep one of them.")
            layer[spelled.name] = Given(value=_read(spelled, entry.value, origin), origin=origin)
    return join_layers(_one_source(merged), _one_source(own))


def _option_layer(options: Mapping[str, object], origin: Origin) -> Layer:
    known = option_names(known_options())
    layer = {}
    for given, raw in options.items():
        # --dataset hf:OWNER/NAME: a name that says where the files are.
        written = "dataset_path" if given.lstrip("-") == "dataset" and is_set_name(raw) else given
        spelled = find_option(written, known, dashes="--" if origin is COMMAND_LINE else "")
        layer[spelled.name] = Given(value=_read(spelled, raw, origin), origin=origin)
    return _one_source(layer)


def _one_source(layer: Layer) -> Layer:
    refuse_conflicts(layer)
    return read_wholes(layer)


def _read(spelled: OptionName, raw: object, origin: Origin) -> Any:
    option = known_options()[spelled.name]
    return _read_negated(option, raw, origin) if spelled.negated else option.read(raw, origin)


def _read_negated(option: Option, raw: object, origin: Origin) -> Any:
    """Read `no_x: true` as x turned off, and `no_x: false` as x left on."""
    try:
        off = read_bool(raw)
    except ValueError:
        raise ConfigError(
            f"{origin.prefix}no_{option.name} is {raw!r}: not {BOOL.description}.", rule=option.help
        ) from None
    return option.no_value if off else (True if option.kind is BOOL else option.default)
