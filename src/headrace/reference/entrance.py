"""Where options enter: the functions of config/load.py, with the reference's options, defaults and recipes accepted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.config import load
from headrace.config.field import Option, Origin
from headrace.config.layers import Given, Layer
from headrace.config.load import NO_RECIPE, Resolved, Translation
from headrace.config.schema import SECTIONS, Config
from headrace.config.yaml_blocks import RECIPES, Block, blocks_of, choose
from headrace.reference.section import Reference
from headrace.reference.translate import has_defaults, translate

CACHE_VARIABLE = "TF_POPLAR_FLAGS"  # where the reference says in which directory compiled programs are kept


def _environment(environ: Mapping[str, str]) -> Layer:
    found = {}
    for flag in environ.get(CACHE_VARIABLE, "").split():
        name, _, value = flag.partition("=")
        if name.lstrip("-") == "executable_cache_path" and value:
            origin = Origin(kind="environment", where=f"${CACHE_VARIABLE}")
            found["compilation_cache_dir"] = Given(value=value, origin=origin)
    return found


REFERENCE = Translation(
    sections={"reference": Reference},
    recipes=(Path(__file__).parent / "recipes",),
    environment=_environment,
    has_defaults=has_defaults,
    translate=translate,
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


def named_blocks(config_path: str | None) -> dict[str, Block]:
    """Return the named configurations of a user's file, or those that are shipped."""
    return blocks_of(config_path, (RECIPES, *REFERENCE.recipes))


def choose_block(name: str | None, config_path: str | None) -> Block:
    """Return a named configuration, or refuse the name."""
    return choose(named_blocks(config_path), name, config_path)
