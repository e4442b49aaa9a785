"""The weights that a run starts from: drawn, of a file, of a checkpoint or of a named network."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from headrace.checkpoint.store import MANIFEST_FILE, load, restore_tree, weight_tensors
from headrace.config.schema import Config
from headrace.core.errors import CheckpointError
from headrace.core.files import write_atomic
from headrace.core.tree import PyTree
from headrace.data.augmentation.preprocess import preprocess, preprocess_spec
from headrace.data.dataset import DataSet
from headrace.engine.precision import make_precision
from headrace.engine.state import State
from headrace.model.custom_block import weights_like
from headrace.model.network import Network
from headrace.model.whitening import first_convolution, whitened
from headrace.run.design import Design
from headrace.run.directory import RunDirectory, custom_parts
from headrace.run.trained_model import find_weights
from headrace.weights.convert import LoadedWeights, load_into
from headrace.weights.named import find_file, is_path
from headrace.weights.weight_file import ForeignWeights, read_file

TABLE_FILE = "init.json"


def adopt_weights(design: Design) -> LoadedWeights | None:
    """Return the weights that the option names, or None without it, or where code gives others. Nothing is written."""
    options = design.config.weights
    if options.weights is None or design.custom.weights is not None:
        return None
    path = find_file(options.weights)
    foreign = _read_checkpoint(path, options.init_ema) if path.is_dir() else read_file(path, options.init_ema)
    if not is_path(options.weights):
        foreign = replace(foreign, source=options.weights)  # messages name what was asked for, not a file of a cache
    # Drawn weights below: a new head for other classes has none in the file.
    return load_into(design.network, design.network.init(design.config.run.seed), foreign, options.init_min_loaded)


def whitened_weights(design: Design, dataset: DataSet, weights: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    """Return (params, stats) with the first convolution made from training images, if the options ask for that."""
    wanted, source = design.config.weights.whiten_images, dataset.train
    if not wanted:
        return weights
    first_convolution(design.network)  # refuse before images are read
    how = preprocess_spec(design.config.data, design.config.augment, design.info, design.config.run.seed)
    # From the whole set: files are often sorted by class.
    chosen = np.unique(np.linspace(0, source.num_distinct - 1, wanted).astype(np.int64))

    def batches(size: int) -> Iterator[np.ndarray]:
        for at in range(0, len(chosen), size):
            index = chosen[at : at + size]
            yield np.asarray(preprocess(np.asarray(source.read(index, 0)), index, 0, how, train=False))

    params, stats = weights
    return whitened(design.network, params, batches, len(chosen)), stats


def write_table(directory: RunDirectory, adopted: LoadedWeights) -> None:
    """Store in the run's directory what became of every tensor."""
    content = {
        "source": adopted.source,
        "names": adopted.scheme,
        "prefixes": list(adopted.prefixes),
        "loaded_share": adopted.share,
        "used_share": adopted.used_share,
        "tensors": [asdict(tensor) for tensor in adopted.statuses],
        "left_over": list(adopted.unused),
    }
    write_atomic(directory.path / TABLE_FILE, (json.dumps(content, indent=1) + "\n").encode())


def _read_checkpoint(path: Path, ema: bool) -> ForeignWeights:
    """Return the weights of a Headrace checkpoint, or of a run's best one."""
    checkpoint, _ = find_weights(path)
    # Only the weights: the optimizer's state belongs to the other run's steps, and is left there.
    chosen = weight_tensors(load(checkpoint)[0], "ema" if ema else "raw")
    if ema and not chosen:
        raise CheckpointError(
            f"{checkpoint} holds no averaged weights.", remedy="Leave --init-ema out, or average: headrace average."
        )
    return ForeignWeights(
        source=str(checkpoint), arrays={name: array.astype(np.float32) for name, array in chosen.items()}
    )


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The weights of a checkpoint (params, stats, and ema where it has one) and what its manifest says."""

    weights: State
    step: int
    epoch: float
    class_names: tuple[str, ...]
    custom: Mapping[str, Any] = field(default_factory=dict)  # the form of data given by code


def load_weights(path: Path, network: Network, config: Config) -> Loaded:
    """Read a checkpoint into the number format of a configuration's precision."""
    arrays, manifest = load(path)
    dtype = make_precision(config.numerics, config.batch).weight_dtype
    arrays = {name: a.astype(dtype) if name.startswith("params/") else a for name, a in arrays.items()}
    params, stats = weights_like(network)
    stored = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)
    weights = {"params": restore_tree(arrays, stored, "params"), "stats": restore_tree(arrays, stats, "stats")}
    if any(name.startswith("ema/") for name in arrays):
        weights["ema"] = restore_tree(arrays, {"params": params, "stats": stats}, "ema")
    return Loaded(
        weights=weights,
        step=manifest["step"],
        epoch=manifest.get("epoch", 0.0),
        class_names=tuple(manifest.get("class_names", ())),
        custom=custom_parts(manifest.get("config", {})) or {},
    )


def refuse_replacing(path: Path) -> None:
    """Refuse to overwrite something that is not a checkpoint."""
    if path.exists() and not (path / MANIFEST_FILE).is_file():
        raise CheckpointError(
            f"{path} exists and is not a checkpoint.",
            rule="A checkpoint is a directory with a manifest.json.",
            remedy="Choose another name.",
        )
