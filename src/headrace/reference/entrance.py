"""Where options enter: the functions of config/load.py, with the reference's options, defaults and recipes accepted."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import load
from headrace.config.field import Option, Origin
from headrace.config.layers import Given, Layer
from headrace.config.load import NO_RECIPE, Resolved, Translation
from headrace.config.schema import SECTIONS, Config
from headrace.config.yaml_blocks import RECIPES, Block, blocks_of, choose
from headrace.core.errors import ConfigError
from headrace.reference.section import Reference
from headrace.reference.translate import has_defaults, translate

if TYPE_CHECKING:
    from headrace.weights.published import WeightFacts

CACHE_VARIABLE = "TF_POPLAR_FLAGS"  # where the reference says in which directory compiled programs are kept


def _environment(environ: Mapping[str, str]) -> Layer:
    found = {}
    for flag in environ.get(CACHE_VARIABLE, "").split():
        name, _, value = flag.partition("=")
        if name.lstrip("-") == "executable_cache_path" and value:
            origin = Origin(kind="environment", where=f"${CACHE_VARIABLE}")
            found["compilation_cache_dir"] = Given(value=value, origin=origin)
    return found


def _weight_options(name: str) -> Mapping[str, Any]:
    """Return the options that come with weights of a name; those of a run are in its newest checkpoint."""
    from headrace.weights.named import facts_of

    path = Path(name).expanduser()
    facts = _facts_of_run(path) if path.is_dir() else facts_of(name)
    return {**facts.network, **facts.data} if facts else {}


def _facts_of_run(path: Path) -> "WeightFacts | None":
    from headrace.checkpoint.store import MANIFEST_FILE, list_checkpoints, parse_manifest
    from headrace.weights.named import pixel_options
    from headrace.weights.published import WeightFacts

    places = [path, *reversed(list_checkpoints(path)), *reversed(list_checkpoints(path / "checkpoints"))]
    file = next((place / MANIFEST_FILE for place in places if (place / MANIFEST_FILE).is_file()), None)
    manifest = parse_manifest(file.read_bytes())[0] if file else None
    try:
        saved, form = (manifest or {})["config"], (manifest or {})["input"]
        model = from_saved(saved).config.model
    except (KeyError, ConfigError):  # too old, or given by code
        return None
    from headrace.data.decoding.resize import usual_shorter_side  # here, since it loads NumPy

    size, shorter = form["image_hwc"][0], form["shorter_side"]
    data = {"image_size": size, "eval_resize_size": shorter or usual_shorter_side(size)}
    data |= {"eval_interpolation": form.get("interpolation", "bilinear")}
    network = {"model_name": model.model_name, **load.network_changes(model)}
    return WeightFacts(network=network, data=data | pixel_options(form))


REFERENCE = Translation(
    sections={"reference": Reference},
    recipes=(Path(__file__).parent / "recipes",),
    environment=_environment,
    has_defaults=has_defaults,
    translate=translate,
    weight_options=_weight_options,
)
ALL_SECTIONS: Mapping[str, type] = {**SECTIONS, **REFERENCE.sections}


def known_options() -> Mapping[str, Option]:
    """Return every option that is accepted, ours and the reference's, by its flat name."""
    return REFERENCE.options


def resolve(
    options: Mapping[str, Any],
    config_name: str | None = None,
    config_path: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Return the configuration of a named block with the command line's options over it.

    Without a name it is the shipped `default`, or `images` where the dataset is one of image files or only its path is
    given; `none` means the defaults of the schema alone. Without `environ` it is that of the process.
    """
    return load.resolve(options, config_name, config_path, environ, REFERENCE)


def override(saved: Resolved, options: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Resolved:
    """Return a saved configuration with the command line's options over it."""
    return load.override(saved, options, environ, REFERENCE)


def config_from(flat: Mapping[str, Any]) -> Config:
    """Return a checked Config from flat option names (or their aliases); what is not named has its default."""
    return resolve_code(flat).config


def resolve_code(flat: Mapping[str, Any], config_name: str | None = NO_RECIPE) -> Resolved:
    """Return the configuration of options that code gives over a recipe; None chooses it as `resolve` does."""
    if config_name == NO_RECIPE:
        return load.resolve_code(flat, REFERENCE)
    return load.resolve(flat, config_name, None, {}, REFERENCE, Origin(kind="code"))


def from_saved(saved: Mapping[str, Any]) -> Resolved:
    """Return a configuration as it was stored with a run."""
    return load.from_saved(saved, REFERENCE)


def named_blocks(config_path: str | None) -> Mapping[str, Block]:
    """Return the named configurations of a user's file, or those that are shipped."""
    return blocks_of(config_path, (RECIPES, *REFERENCE.recipes))


def choose_block(name: str | None, config_path: str | None) -> Block:
    """Return a named configuration, or refuse the name."""
    return choose(named_blocks(config_path), name, config_path)
