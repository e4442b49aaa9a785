"""The weights of a run, of a checkpoint or of a name. A checkpoint is read and hashed once.

The dataset is not needed: how images become the input was saved with the weights.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from headrace.checkpoint.best import BestCheckpoints
from headrace.checkpoint.store import (
    MANIFEST_FILE,
    Checkpoint,
    list_checkpoints,
    read,
    read_newest,
    restore_tree,
    weight_tensors,
)
from headrace.core.errors import CheckpointError
from headrace.data.dataset import describe_dataset
from headrace.model.network import Network, weights_like
from headrace.model.zoo import build_network
from headrace.run.directory import checkpoints_of, custom_parts, from_saved, parts_of
from headrace.run.named_weights import load_named
from headrace.weights.input_form import InputForm
from headrace.weights.named import is_path, path_of
from headrace.weights.weights import EMA, RAW, Pair, Weights


def find_weights(name: str, which: str) -> Weights:
    """Return one set of weights of a run, of a checkpoint or of a name; `which` is raw, ema or auto, of a run."""
    path = path_of(name) if is_path(name) else Path(name)
    return read_weights(path).only(which) if path.is_dir() else load_named(name)


def read_weights(place: Path, network: Network | None = None) -> Weights:
    """Return the weights of a checkpoint, or of a run's best one.

    `network` is the network of a run whose network was given by code.
    """
    checkpoint, better = find_checkpoint(place)
    manifest = checkpoint.manifest
    resolved = from_saved(manifest["config"], given=("network",) if network else (), needed=("network",))
    form = form_in(checkpoint)
    if form is None:  # the first versions did not save it: only for their checkpoints is the dataset itself needed
        form = InputForm.of_data(describe_dataset(resolved.config.data), resolved.config)
    network = network or build_network(resolved.config.model, len(manifest["class_names"]), form.image_hwc)
    found = weights_in(checkpoint, better, network)
    return replace(found, input_form=form.at_size(network.input_hwc), resolved=resolved)


def find_checkpoint(place: Path) -> tuple[Checkpoint, str]:
    """Read a checkpoint, or the best of a directory of them or of a run; return it, and which of its weights is best.

    Which one that is, the run's own validation says: it was stored with the checkpoint.
    """
    if (place / MANIFEST_FILE).exists():
        found = read(place)
        return found, EMA if found.manifest.get("better") == EMA else RAW
    folder = place if list_checkpoints(place) else checkpoints_of(place)
    if best := BestCheckpoints(folder).read_first_good():
        return best[1], best[0].weights
    newest, damaged = read_newest(folder)
    if newest is None:
        problems = "; ".join(f"{bad.name}: {problem}" for bad, problem in damaged)
        raise CheckpointError(
            f"{folder} holds no good checkpoint{': ' + problems if problems else ''}.",
            remedy="Name another run or checkpoint.",
        )
    return newest, RAW


def form_in(checkpoint: Checkpoint) -> InputForm | None:
    """Return how images become the input, as a checkpoint says it."""
    saved = checkpoint.manifest.get("input")
    return InputForm.of_saved(saved) if saved else None


def weights_in(checkpoint: Checkpoint, better: str, network: Network) -> Weights:
    """Return the weights in a checkpoint of this network."""
    manifest, form = checkpoint.manifest, form_in(checkpoint)
    custom = custom_parts(manifest.get("config", {})) or {}
    # NumPy knows bfloat16 from ml_dtypes as kind V.
    floats = {name: array.astype(np.float32) for name, array in checkpoint.arrays.items() if array.dtype.kind in "fV"}
    shapes = weights_like(network)

    def pair(start: str = "") -> Pair:
        params, stats = shapes
        return restore_tree(floats, params, f"{start}params"), restore_tree(floats, stats, f"{start}stats")

    params, stats = pair()
    return Weights(
        network=network,
        params=params,
        stats=stats,
        ema=pair(f"{EMA}/") if weight_tensors(floats, EMA) else None,
        origin=_origin_of(checkpoint.path),
        path=checkpoint.path,
        step=manifest["step"],
        epoch=manifest.get("epoch", 0.0),
        label=manifest.get("weights", RAW),  # an average has another label
        better=better,
        class_names=tuple(manifest.get("class_names", ())),
        input_form=form,
        by_code=frozenset(parts_of(custom)),
        image_dtype=custom.get("image_dtype", "uint8" if form else ""),
    )


def _origin_of(checkpoint: Path) -> str:
    """Return where weights come from, in short: the run and the checkpoint."""
    run = checkpoint.parent.parent
    return f"{run.name}/{checkpoint.name}" if (run / "config.json").is_file() else checkpoint.name
