"""Named trees: nested dicts, tuples and named tuples of arrays as one flat dict of path -> leaf, and back."""

from collections.abc import Callable
from typing import Any

import jax

# Any nesting of dicts, tuples and lists with arrays (or shapes) as leaves; JAX has no type for it.
PyTree = Any


def path_name(path: jax.tree_util.KeyPath) -> str:
    """Return the canonical name of a key path, such as `conv2_block1/1_conv/kernel`."""
    # These names are in every checkpoint: another form of them would make old ones unreadable.
    return jax.tree_util.keystr(path, simple=True, separator="/")


def flatten_named(tree: PyTree) -> dict[str, Any]:
    """Return {path name: leaf} in tree order."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def unflatten_named(like: PyTree, leaves: dict[str, Any]) -> PyTree:
    """Return a tree shaped as `like` with the leaves of those names; a missing name is a KeyError."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[path_name(path)], like)


def map_named(fn: Callable[..., Any], tree: PyTree, *rest: object) -> PyTree:
    """Map `fn(name, leaf, *leaves of the rest)` over a tree."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: fn(path_name(path), *leaves), tree, *rest)
