"""A trained model, from a checkpoint alone: the dataset is not needed, its form was saved with the weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.checkpoint.best import BestCheckpoints
from headrace.checkpoint.store import (
    MANIFEST_FILE,
    list_checkpoints,
    load,
    newest_good,
    parse_manifest,
    restore_tree,
    step_of,
)
from headrace.config.load import network_changes
from headrace.config.schema import Config
from headrace.core.errors import CheckpointError, DataError
from headrace.core.tree import PyTree
from headrace.core.units import format_list
from headrace.data.augmentation.preprocess import Preprocess
from headrace.data.dataset import DataInfo, describe_dataset
from headrace.data.decoding.crop import uncropped_side, usual_shorter_side
from headrace.model.context import Ctx
from headrace.model.custom_block import weights_like
from headrace.model.network import Network
from headrace.model.zoo import build_network
from headrace.run.directory import checkpoints_of, custom_parts, from_saved, parts_of
from headrace.weights.published import IMAGENET_CLASSES, imagenet_names, imagenet_numbers

RAW, EMA, AUTO = "raw", "ema", "auto"
_LISTED = 5  # names of classes in a message


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A network, ready for evaluation."""

    checkpoint: Path
    weights: str  # raw, ema, or the label of an average
    step: int
    epoch: float
    config: Config
    network: Network
    params: PyTree  # float32
    stats: PyTree
    class_names: tuple[str, ...]
    preprocess: Preprocess
    shorter_side: int | None  # of a resized image, before the centre is cropped; None: the size x 256 / 224
    antialias: bool
    interpolation: str = "bilinear"
    names_dataset: bool = True  # the options name the run's dataset; False: code gave its images

    def context(self, compute_dtype: jax.typing.DTypeLike = jnp.float32) -> Ctx:
        """Return the conditions under which the network is applied outside of a run."""
        config = self.config
        return Ctx(
            train=False,
            compute_dtype=compute_dtype,
            stable_norm=config.model.stable_norm,
            matmul_precision=config.numerics.matmul_precision if compute_dtype == jnp.float32 else "default",
        )

    def describe(self) -> dict[str, Any]:
        """Return the description that is exported with the weights, as plain values."""
        spec = self.preprocess
        return {
            "model": self.network.name,
            "dialect": self.config.model.model_dialect,
            "options": network_changes(self.config.model),
            "image_hwc": list(self.network.input_hwc),
            "normalization": spec.normalization,
            **({"mean": list(spec.mean), "std": list(spec.std)} if spec.normalization == "per-channel" else {}),
            "resize_shorter_side": self.shorter_side or usual_shorter_side(self.network.input_hwc[0]),
            "interpolation": self.interpolation,
            "class_names": list(self.class_names),
            "output": "softmax of the logits",
            "checkpoint": self.checkpoint.name,
            "weights": self.weights,
            "step": self.step,
            "epoch": self.epoch,
        }


def input_form(info: DataInfo, config: Config) -> dict[str, Any]:
    """Return how images become the network's input, for a checkpoint's manifest."""
    size = info.image_hwc[0]
    return {
        "image_hwc": list(info.image_hwc),
        "normalization": info.normalization,
        "mean": list(info.channel_mean),
        "std": list(info.channel_std),
        "shorter_side": config.data.eval_resize_size or uncropped_side(size),
        "antialias": config.data.resize_antialias,
        "interpolation": config.data.eval_interpolation,
    }


def refuse_other_classes(info: DataInfo, num_classes: int, class_names: Sequence[str]) -> None:
    """Refuse data for a network that was trained on other classes, as far as their names are known."""
    rule = "Labels mean the same classes in training and evaluation."
    if info.num_classes != num_classes:
        raise DataError(
            f"{info.place or info.name} has {info.num_classes} classes, the network {num_classes}.", rule=rule
        )
    both = {tuple(class_names), info.class_names}
    # `class 3` is made up for a class without a name, and can be any class.
    if not all(any(not name.startswith("class ") for name in names) for names in both) or len(both) == 1:
        return
    # Folders of ImageNet have WordNet's numbers as names.
    if num_classes == IMAGENET_CLASSES and both == {imagenet_names(), imagenet_numbers()}:
        return
    raise DataError(
        f"The classes {format_list(info.class_names, _LISTED)} ({info.place or info.name}) are not those that the "
        f"model was trained on: {format_list(class_names, _LISTED)}.",
        rule=rule,
    )


def best_validated(run: Path) -> dict[str, Any] | None:
    """Return {path, step, weights} of a run's checkpoint with the best validation, None where none is kept."""
    place = checkpoints_of(run)
    best = BestCheckpoints(place).first_good()
    return best and {"path": str(place / best.name), "step": step_of(place / best.name), "weights": best.weights}


def find_weights(path: Path) -> tuple[Path, str]:
    """Return (checkpoint, which weights of it are best) for a checkpoint, a directory of them, or a run's directory."""
    if (path / MANIFEST_FILE).exists():
        manifest, _ = parse_manifest((path / MANIFEST_FILE).read_bytes())  # whatever is wrong is reported on loading
        return path, EMA if manifest and manifest.get("better") == EMA else RAW
    place = path if list_checkpoints(path) else checkpoints_of(path)
    best = BestCheckpoints(place).first_good()
    if best is not None:
        return place / best.name, best.weights
    found, damaged = newest_good(place)
    if found is None:
        problems = "; ".join(f"{bad.name}: {problem}" for bad, problem in damaged)
        raise CheckpointError(
            f"{place} holds no good checkpoint{': ' + problems if problems else ''}.",
            remedy="Name another run or checkpoint.",
        )
    return found, RAW


def origin_of(checkpoint: Path) -> str:
    """Return where weights come from, in short: the run and the checkpoint."""
    run = checkpoint.parent.parent
    return f"{run.name}/{checkpoint.name}" if (run / "config.json").is_file() else checkpoint.name


def load_trained_model(path: Path, weights: str = AUTO, custom: Network | None = None) -> TrainedModel:
    """Return the network of a checkpoint, or of a run's best one; `weights` is raw, ema, or auto for the better.

    `custom` is the network of a run whose network was given by code.
    """
    checkpoint, better = find_weights(path)
    arrays, manifest = load(checkpoint)
    config = from_saved(manifest["config"], given=("network",) if custom else (), needed=("network",)).config
    # Only for those is the dataset itself needed.
    form = manifest.get("input") or input_form(describe_dataset(config.data), config)  # not in older ones
    height, width, channels = form["image_hwc"]
    network = custom or build_network(config.model, len(manifest["class_names"]), (height, width, channels))
    # Better by the run's own validation, which was stored with the checkpoint.
    chosen = better if weights == AUTO else weights
    params, stats = _tensors(network, arrays, chosen, checkpoint)
    return TrainedModel(
        checkpoint=checkpoint,
        weights=manifest.get("weights", chosen),
        step=manifest["step"],
        epoch=manifest["epoch"],
        config=config,
        network=network,
        params=params,
        stats=stats,
        class_names=tuple(manifest["class_names"]),
        preprocess=preprocess_of(form, config.run.seed, network.input_hwc),
        **resizing_of(form),
        names_dataset="dataset" not in parts_of(custom_parts(manifest["config"]) or {}),
    )


def preprocess_of(form: Mapping[str, Any], seed: int, image_hwc: tuple[int, int, int]) -> Preprocess:
    """Return how images of that form become the network's input in evaluation."""
    return Preprocess(
        augmentation="none",
        normalization=form["normalization"],
        mean=tuple(form["mean"]),
        std=tuple(form["std"]),
        seed=seed,
        image_hwc=image_hwc,
    )


def resizing_of(form: Mapping[str, object]) -> dict[str, Any]:
    """Return how images of that form are resized in evaluation, as fields of a TrainedModel."""
    return {
        "shorter_side": form["shorter_side"],
        "antialias": form["antialias"],
        "interpolation": form.get("interpolation", "bilinear"),  # not in older ones
    }


def _tensors(network: Network, arrays: Mapping[str, Any], weights: str, checkpoint: Path) -> tuple[Any, Any]:
    start = "ema/" if weights == EMA else ""
    if start and not any(name.startswith(start) for name in arrays):
        raise CheckpointError(f"{checkpoint} holds no averaged weights (ema).", remedy="Leave --use out.")
    # NumPy knows bfloat16 from ml_dtypes as kind V.
    floats = {name: array.astype(np.float32) for name, array in arrays.items() if array.dtype.kind in "fV"}
    params, stats = weights_like(network)
    return restore_tree(floats, params, f"{start}params"), restore_tree(floats, stats, f"{start}stats")
