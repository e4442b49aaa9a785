"""The weights that a run starts from: drawn, of a file, of a checkpoint or of a named network."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from headrace.checkpoint.store import weight_tensors
from headrace.core.errors import CheckpointError
from headrace.core.files import write_atomic
from headrace.core.tree import PyTree
from headrace.data.augmentation.preprocess import preprocess, preprocess_spec
from headrace.data.dataset import DataSet
from headrace.model.whitening import first_convolution, whitened
from headrace.run.design import Design
from headrace.run.directory import RunDirectory
from headrace.run.read_weights import find_checkpoint
from headrace.weights.convert import load_into
from headrace.weights.named import find_file, is_path
from headrace.weights.weight_file import ForeignWeights, read_file
from headrace.weights.weights import EMA, RAW, Weights

TABLE_FILE = "init.json"


def adopt_weights(design: Design) -> Weights | None:
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


def write_table(directory: RunDirectory, adopted: Weights) -> None:
    """Store in the run's directory what became of every tensor."""
    loading = adopted.loading
    content = {
        "source": adopted.origin,
        "names": loading.scheme,
        "prefixes": list(loading.prefixes),
        "loaded_share": loading.share,
        "used_share": loading.used_share,
        "tensors": [asdict(tensor) for tensor in loading.statuses],
        "left_over": list(loading.unused),
    }
    write_atomic(directory.path / TABLE_FILE, (json.dumps(content, indent=1) + "\n").encode())


def _read_checkpoint(path: Path, ema: bool) -> ForeignWeights:
    """Return the weights of a Headrace checkpoint, or of a run's best one."""
    checkpoint, _ = find_checkpoint(path)
    # Only the weights: the optimizer's state belongs to the other run's steps, and is left there.
    chosen = weight_tensors(checkpoint.arrays, EMA if ema else RAW)
    if ema and not chosen:
        raise CheckpointError(
            f"{checkpoint.path} holds no averaged weights.",
            remedy="Leave --init-ema out, or average: headrace average.",
        )
    return ForeignWeights(
        source=str(checkpoint.path), arrays={name: array.astype(np.float32) for name, array in chosen.items()}
    )
