"""Weights of a model from a checkpoint of any plan, and the facts that a checkpoint keeps of its data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from headrace.checkpoint.manifest import MANIFEST_FILE
from headrace.checkpoint.restore import fit_tree
from headrace.checkpoint.store import load, newest_good
from headrace.config.schema import Config
from headrace.core.errors import CheckpointError
from headrace.engine.precision import make_precision
from headrace.engine.state import State
from headrace.model.network import Network
from headrace.model.own_block import weights_like


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The weights of a checkpoint (params, stats, and ema where it has one) and what its manifest says."""

    weights: State
    step: int
    epoch: float
    class_names: tuple[str, ...]
    own: Mapping[str, Any] = field(default_factory=dict)  # of the data, where code gave it


def load_weights(path: Path, network: Network, config: Config) -> Loaded:
    """Read a checkpoint, or the newest good one of a run, into the format of a configuration's precision."""
    arrays, manifest = load(_checkpoint(path))
    dtype = make_precision(config.numerics, config.batch).weight_dtype
    arrays = {name: a.astype(dtype) if name.startswith("params/") else a for name, a in arrays.items()}
    params, stats = weights_like(network)
    stored = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)
    weights = {"params": fit_tree(arrays, stored, "params"), "stats": fit_tree(arrays, stats, "stats")}
    if any(name.startswith("ema/") for name in arrays):
        weights["ema"] = fit_tree(arrays, {"params": params, "stats": stats}, "ema")
    return Loaded(
        weights=weights,
        step=manifest["step"],
        epoch=manifest.get("epoch", 0.0),
        class_names=tuple(manifest.get("class_names", ())),
        own=manifest.get("config", {}).get("own", {}),
    )


def refuse_replacing(path: Path) -> None:
    """Refuse to write a checkpoint over something that is none."""
    if path.exists() and not (path / MANIFEST_FILE).is_file():
        raise CheckpointError(
            f"{path} exists and is not a checkpoint.",
            rule="A checkpoint is a directory of its own.",
            remedy="Choose another name.",
        )


def _checkpoint(path: Path) -> Path:
    if (path / MANIFEST_FILE).is_file() or not path.is_dir():
        return path
    for place in (path / "checkpoints", path):
        found, damaged = newest_good(place)
        if found is not None:
            return found
        if damaged:
            raise CheckpointError(f"{place} holds no good checkpoint: {damaged[0][0].name}: {damaged[0][1]}.")
    raise CheckpointError(f"{path} holds no checkpoint.", remedy="Give a checkpoint or a run's directory.")
