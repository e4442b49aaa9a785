"""YAML files of named configurations, read as nodes so that every key keeps its line; anchors and `<<` merges work.

A file is a mapping of names to blocks, a block a mapping of options to values. The comment right above a block
describes it; in it, lines that begin with `command:` and `result:` are kept apart. A block whose name begins with `_`
is only there to be merged.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from headrace.core.errors import ConfigError, nearest

# libyaml's parser, where PyYAML was built with it: reading the recipes took a seventh of a second of every start
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_MAX_BYTES = 512 << 10  # read twice: where PyYAML has only its own parser, about 10 s
_MAX_DEPTH = 20
_MAX_NODES = 100_000


@dataclass(frozen=True, kw_only=True)
class BlockKey:
    """One key of a block as written, its value and its line. Plain values stay texts, for the option to read."""

    key: str
    value: Any
    line: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """One named configuration of a file: the entries it merges in (the last of a name wins) and its own, which win."""

    name: str
    file: str
    merged: tuple[BlockKey, ...]
    own: tuple[BlockKey, ...]
    description: str
    command: str
    result: str


class _YamlLoader(_SafeLoader):
    """YAML with few surprises: 1e-4 is a number, 010 is ten, 1:30 and dates are texts."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (yaml's own way to inherit none)


def _whole(loader: yaml.SafeLoader, node: yaml.Node) -> int:
    return int(node.value.replace("_", ""))


def _number(loader: yaml.SafeLoader, node: yaml.Node) -> float:
    return float(node.value.replace("_", ""))


# PyYAML follows YAML 1.1, in which 1e-4 is a text, 010 is eight and 1:30 is ninety.
_RESOLVERS = (
    ("bool", r"(?i:true|false|yes|no|on|off)", "yYnNtTfFoO"),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", "-+0123456789."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
)
for _name, _pattern, _first in _RESOLVERS:
    _YamlLoader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), list(_first))
_YamlLoader.add_constructor(_TAG + "int", _whole)
_YamlLoader.add_constructor(_TAG + "float", _number)


def read_blocks(path: Path, shown: str = "") -> dict[str, Block]:
    """Return the blocks of a YAML file by name; `shown` is how the file is called in messages."""
    shown = shown or str(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{shown} has more than {_MAX_BYTES:,} bytes.", remedy="Give a file of options.")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{shown} cannot be read: {reason}.", remedy="Give a YAML file with --config-path.") from None
    try:
        return _FileReader(text, shown).blocks()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{shown}{line}: not valid YAML: {error.problem or error.context}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{shown}: not valid YAML: {str(error).splitlines()[0]}.") from None
    except (ValueError, TypeError, AttributeError) as error:  # a tag that does not fit its value, such as `!!int x`
        raise ConfigError(f"{shown}: not valid YAML: {str(error)[:200]}.") from None


def _refuse_deep(text: str, shown: str) -> None:
    """Refuse deep nesting before the composer, which recurses, sees it."""
    depth = 0
    for event in yaml.parse(text, _YamlLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ConfigError(
                f"{shown}:{event.start_mark.line + 1}: nested deeper than {_MAX_DEPTH} levels.",
                rule="Options are a mapping of blocks.",
            )


class _FileReader:
    """One file while it is read: its text, its name and the loader that holds its nodes."""

    def __init__(self, text: str, shown: str) -> None:
        self.lines, self.shown = text.splitlines(), shown
        _refuse_deep(text, shown)
        self.loader = _YamlLoader(text)
        self.own_keys: dict[int, int] = {}

    def blocks(self) -> dict[str, Block]:
        root = self.loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise self.refusal(root, "the file is not a mapping of names to blocks")
        self.refuse_large(root)
        # Before any merge, since merging puts the keys of both blocks into one list.
        self.count_own_keys(root)
        return {str(key.value): self.block(key, node) for key, node in root.value}

    def refuse_large(self, root: yaml.Node) -> None:
        """Refuse aliases and merges that contain themselves, or expand to more than a file of options needs.

        A few hundred bytes of them can stand for a million entries.
        """
        sizes: dict[int, int] = {}
        open_nodes: set[int] = set()

        def size(node: yaml.Node) -> int:
            if isinstance(node, yaml.ScalarNode):
                return 1
            if id(node) in open_nodes:
                raise self.refusal(node, "an alias that contains itself")
            if id(node) not in sizes:
                open_nodes.add(id(node))
                parts = (
                    node.value
                    if isinstance(node, yaml.SequenceNode)
                    else [each for item in node.value for each in item]
                )
                sizes[id(node)] = 1 + sum(map(size, parts))
                open_nodes.discard(id(node))
                if sizes[id(node)] > _MAX_NODES:
                    raise self.refusal(node, f"aliases and merges that expand to more than {_MAX_NODES:,} values")
            return sizes[id(node)]

        size(root)

    def count_own_keys(self, node: yaml.Node) -> None:
        """Note how many keys each mapping has of its own, and refuse a key that is there twice."""
        if id(node) in self.own_keys or isinstance(node, yaml.ScalarNode):
            return
        self.own_keys[id(node)] = 0
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self.count_own_keys(item)
            return
        seen: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                raise self.refusal(key, f"{name} is given twice (first in line {seen[name]})")
            seen[name] = key.start_mark.line + 1
            self.own_keys[id(node)] += key.tag != _TAG + "merge"
            self.count_own_keys(value)

    def block(self, key: yaml.Node, node: yaml.Node) -> Block:
        if not isinstance(key, yaml.ScalarNode):
            raise self.refusal(key, "the name of a block is not a plain text")
        # A name without options under it: all of them have their defaults.
        if node.tag == _TAG + "null":
            node = yaml.MappingNode(_TAG + "map", [])
        if not isinstance(node, yaml.MappingNode) or node.tag != _TAG + "map":
            raise self.refusal(node, f"{key.value} is not a block of options")
        self.loader.flatten_mapping(node)  # puts the keys of merged blocks first
        entries = tuple(self.entry(*item) for item in node.value)
        first_own = len(entries) - self.own_keys.get(id(node), 0)
        description, command, result = self.comment_above(key.start_mark.line)
        return Block(
            name=str(key.value),
            file=self.shown,
            merged=entries[:first_own],
            own=entries[first_own:],
            description=description,
            command=command,
            result=result,
        )

    def entry(self, key: yaml.Node, node: yaml.Node) -> BlockKey:
        if not isinstance(key, yaml.ScalarNode):
            raise self.refusal(key, "the name of an option is not a plain text")
        return BlockKey(key=str(key.value), value=self.value(node), line=key.start_mark.line + 1)

    def value(self, node: yaml.Node) -> Any:
        """Return plain values as their text, so that `precision: 16.16` keeps its digits; mappings as Python values."""
        if isinstance(node, yaml.ScalarNode):
            return None if node.tag == _TAG + "null" else node.value
        if isinstance(node, yaml.SequenceNode):
            if node.tag != _TAG + "seq":
                raise self.refusal(node, f"the tag {node.tag[:80]} is not allowed")
            scalar = yaml.ScalarNode
            return [
                item.value if isinstance(item, scalar) else self.loader.construct_object(item) for item in node.value
            ]
        return self.loader.construct_object(node, deep=True)

    def comment_above(self, line: int) -> tuple[str, str, str]:
        """Return (description, command, result) of the comment lines right above a line."""
        first = line
        while first > 0 and self.lines[first - 1].lstrip().startswith("#"):
            first -= 1
        parts = {"": "", "command": "", "result": ""}
        part = ""
        for text in self.lines[first:line]:
            words = text.strip().lstrip("#").strip()
            head, colon, rest = words.partition(":")
            if colon and head in ("command", "result"):
                part, words = head, rest.strip()
            parts[part] = f"{parts[part]} {words}".strip()
        return parts[""], parts["command"], parts["result"]

    def refusal(self, node: yaml.Node, problem: str) -> ConfigError:
        line = f":{node.start_mark.line + 1}" if node.start_mark else ""
        return ConfigError(f"{self.shown}{line}: {problem}.")


RECIPES = Path(__file__).parent / "recipes"


@cache
def shipped_blocks(directories: tuple[Path, ...] = (RECIPES,)) -> Mapping[str, Block]:
    """Return the recipes of the package by name: those that most people need first, then by file."""
    files = [path for directory in directories for path in directory.glob("*.yml")]
    place = {name: number for number, name in enumerate(("default", "images", "cifar", "today"))}
    found: dict[str, Block] = {}
    for path in sorted(files, key=lambda path: (place.get(path.stem, len(place)), path.name)):
        for name, block in read_blocks(path, path.name).items():
            assert name.startswith("_") or name not in found, f"two recipes are named {name}"
            found[name] = block
    return found


def blocks_of(config_path: str | None, directories: tuple[Path, ...] = (RECIPES,)) -> Mapping[str, Block]:
    """Return the blocks of a user's file, or those of the package's directories of recipes."""
    return shipped_blocks(directories) if config_path is None else read_blocks(Path(config_path))


def listed(blocks: Mapping[str, Block]) -> list[Block]:
    """Return the blocks that can be chosen."""
    return [block for block in blocks.values() if not block.name.startswith("_")]


OLD_RECIPES = {"pictures": "images"}  # names that were changed and stay accepted


def choose(blocks: Mapping[str, Block], name: str | None, config_path: str | None) -> Block:
    """Return the block of that name, or refuse with the nearest name."""
    if config_path is None and name is not None:
        name = OLD_RECIPES.get(name, name)
    names = [block.name for block in listed(blocks)]
    there = f"{config_path or 'The package'} has: {', '.join(names) or 'no configurations'}."
    if name is None:
        raise ConfigError(
            f"--config-path {config_path} is given without --config.", rule=there, remedy="Add --config NAME."
        )
    if name not in blocks:
        guess = nearest(name, names)
        if guess is None and config_path:
            remedy = there
        else:
            remedy = (f"Did you mean {guess}? " if guess else "") + "`headrace configs` lists them."
        raise ConfigError(f"There is no configuration {name}.", remedy=remedy)
    return blocks[name]
