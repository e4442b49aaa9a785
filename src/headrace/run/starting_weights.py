"""The weights that a run starts from: drawn at random, or read from a file, a checkpoint or another run."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from headrace.checkpoint.store import MANIFEST_FILE, load, newest_good, restore_tree
from headrace.config.model_table import OPTION_FAMILIES, VARIANTS
from headrace.config.schema import Config
from headrace.core.errors import CheckpointError
from headrace.core.files import write_atomic
from headrace.engine.precision import make_precision
from headrace.engine.state import State
from headrace.model.custom_block import weights_like
from headrace.model.network import Network
from headrace.run.design import Design
from headrace.run.directory import RunDirectory, custom_parts
from headrace.run.trained_model import find_weights
from headrace.weights.convert import LoadedWeights, load_into
from headrace.weights.named import facts_of, find_file
from headrace.weights.weight_file import ForeignWeights, read_file

TABLE_FILE = "init.json"


def adopt_weights(design: Design) -> LoadedWeights | None:
    """Return the weights that the option names, or None without it, or where code gives others. Nothing is written."""
    options = design.config.weights
    if options.weights is None or design.custom.weights is not None:
        return None
    path = find_file(options.weights)
    foreign = _read_checkpoint(path, options.init_ema) if path.is_dir() else read_file(path, options.init_ema)
    # Drawn weights below: a new head for other classes has none in the file.
    return load_into(design.network, design.network.init(design.config.run.seed), foreign, options.init_min_loaded)


def dialect_hint(config: Config, name: str, adopted: LoadedWeights) -> str:
    """Say which option makes the network of that name compute what weights of another definition did.

    Nothing is said of weights whose definition is known: their dialect came with them.
    """
    variant = VARIANTS.get(name)
    family = variant.family if variant else ""
    known = facts_of(config.weights.weights) if config.weights.weights else None
    wanted = {"common": "torchvision", "common-fc": "torchvision"}.get(adopted.scheme, adopted.scheme)
    has_dialects = family in OPTION_FAMILIES["model_dialect"] and wanted in ("torchvision", "timm", "keras")
    # The reference's EfficientNets are Keras'; networks that only PyTorch's libraries have are theirs in every dialect.
    same = (wanted == "keras" and family == "efficientnet") or bool(variant and variant.torch_only)
    if config.model.model_dialect != "reference" or known or not has_dialects or same:
        return ""
    text = (
        f"The names are those of {adopted.scheme}, while padding, epsilon and shortcuts are the reference's: "
        f"weights that were trained there need --model-dialect {wanted} to compute the same"
    )
    if wanted == "timm" and family == "efficientnet":
        # The same names in both, but timm's tf_ networks are padded, and divided by the epsilon, as in TensorFlow.
        return f"{text}, but not if timm calls their network tf_..."
    if wanted == "timm" and family == "mobilenet":
        return f"{text}, and --model-dialect keras if timm calls their network tf_..."
    return f"{text}."


def write_table(directory: RunDirectory, adopted: LoadedWeights) -> None:
    """Store in the run's directory what became of every tensor."""
    content = {
        "source": adopted.source,
        "names": adopted.scheme,
        "loaded_share": adopted.share,
        "used_share": adopted.used_share,
        "tensors": [asdict(tensor) for tensor in adopted.statuses],
        "left_over": list(adopted.unused),
    }
    write_atomic(directory.path / TABLE_FILE, (json.dumps(content, indent=1) + "\n").encode())


def _read_checkpoint(path: Path, ema: bool) -> ForeignWeights:
    """Return the weights of a Headrace checkpoint, or of a run's best one."""
    checkpoint, _ = find_weights(path)
    arrays, _ = load(checkpoint)
    start = "ema/" if ema else ""
    if ema and not any(name.startswith("ema/") for name in arrays):
        raise CheckpointError(
            f"{checkpoint} holds no averaged weights.", remedy="Leave --init-ema out, or average: headrace average."
        )
    # The optimizer's state belongs to the other run's steps, and is left there.
    kinds = tuple(f"{start}{kind}/" for kind in ("params", "stats"))
    chosen = {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(kinds)}
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
    """Read a checkpoint, or the newest good one of a run, into the format of a configuration's precision."""
    arrays, manifest = load(_checkpoint(path))
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
