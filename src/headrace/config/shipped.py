"""Where named configurations are found: the recipes shipped in the package, or a user's own YAML file."""

from collections.abc import Mapping
from pathlib import Path

from headrace.config.yaml_file import Block, read_blocks
from headrace.core.errors import ConfigError, did_you_mean

RECIPES = Path(__file__).parent / "recipes"


def shipped_blocks() -> dict[str, Block]:
    """Return the recipes of the package by name: the default first, then by file."""
    found: dict[str, Block] = {}
    for path in sorted(RECIPES.glob("*.yml"), key=lambda path: (path.stem != "default", path.name)):
        for name, block in read_blocks(path, path.name).items():
            assert name.startswith("_") or name not in found, f"two recipes are named {name}"
            found[name] = block
    return found


def blocks_of(config_path: str | None) -> dict[str, Block]:
    """Return the blocks of a user's file, or the shipped ones."""
    return shipped_blocks() if config_path is None else read_blocks(Path(config_path))


def listed(blocks: Mapping[str, Block]) -> list[Block]:
    """Return the blocks that are there to be chosen."""
    return [block for block in blocks.values() if not block.name.startswith("_")]


def choose(blocks: Mapping[str, Block], name: str | None, config_path: str | None) -> Block:
    """Return the block of that name, or refuse with the nearest name and the list."""
    names = [block.name for block in listed(blocks)]
    rule = f"{config_path or 'The package'} has: {', '.join(names) or 'no configurations'}."
    if name is None:
        raise ConfigError(
            f"--config-path {config_path} is given without --config.", rule=rule, remedy="Add --config NAME."
        )
    if name not in blocks:
        remedy = did_you_mean(name, names) if names else ""
        raise ConfigError(f"There is no configuration {name}.", rule=rule, remedy=remedy if "Did" in remedy else "")
    return blocks[name]
