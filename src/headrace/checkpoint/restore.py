"""Restore: put loaded tensors into a tree by their names. No plan is involved: any plan reads any checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.core.errors import CheckpointError

_SHOWN = 4  # names per kind of trouble; a wrong model would otherwise fill the screen


def fit_tree(arrays: Mapping[str, np.ndarray], like: Any, prefix: str = "") -> Any:
    """Return a tree built as `like` whose leaves are the arrays of those names, exactly as loaded.

    Leaves of `like` need only a shape and a dtype (arrays, jax.ShapeDtypeStruct). With `prefix` "params" the tree is
    what lies under `params/`, and other tensors are left alone; without it every tensor must have its place.
    """
    from headrace.core.tree import (
        flatten_named,
        unflatten_named,
    )  # here, because it imports jax, which saving does not need

    start = f"{prefix}/" if prefix else ""
    wanted = {start + name: leaf for name, leaf in flatten_named(like).items()}
    given = {name: array for name, array in arrays.items() if name.startswith(start)}
    troubles = [
        _list("missing", [name for name in wanted if name not in given]),
        _list("unexpected", [name for name in given if name not in wanted]),
        _list(
            "of another shape or type", [_differs(name, given[name], wanted[name]) for name in wanted if name in given]
        ),
    ]
    if any(troubles):
        raise CheckpointError(
            f"The checkpoint does not fit this model and optimizer. {' '.join(filter(None, troubles))}",
            rule="Every tensor must be there under its name, with its shape and type.",
            remedy="Use the options that the checkpoint was made with; its manifest.json holds them.",
        )
    return unflatten_named(like, {name.removeprefix(start): given[name] for name in wanted})


def _differs(name: str, found: np.ndarray, leaf: Any) -> str:
    """Return '' when the array fits the leaf, else what differs."""
    shape, dtype = tuple(np.shape(leaf)), np.dtype(getattr(leaf, "dtype", type(leaf)))
    if found.shape == shape and found.dtype == dtype:
        return ""
    return f"{name} ({found.dtype.name}{list(found.shape)}, needed {dtype.name}{list(shape)})"


def _list(word: str, names: Sequence[str]) -> str:
    names = [name for name in names if name]
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'} {word}: {', '.join(names[:_SHOWN])}{more}."
