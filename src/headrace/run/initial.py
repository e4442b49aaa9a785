"""The weights that a run starts from: drawn at random, or read from a file, a checkpoint or another run."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from headrace.checkpoint.store import load
from headrace.core.errors import CheckpointError
from headrace.core.files import write_atomic
from headrace.run.bundle import find_weights
from headrace.run.design import Design
from headrace.run.directory import RunDirectory
from headrace.weights.adopt import Adopted, adopt
from headrace.weights.files import Foreign, read_file

TABLE_FILE = "init.json"


def adopt_weights(design: Design) -> Adopted | None:
    """Return the weights that `init_from` gives, or None without it. Nothing is written yet."""
    options = design.config.weights
    if options.init_from is None:
        return None
    path = Path(options.init_from)
    foreign = _read_own(path, options.init_ema) if path.is_dir() else read_file(path, options.init_ema)
    return adopt(design.network, design.network.init(design.config.run.seed), foreign, options.init_min_loaded)


def dialect_hint(design: Design, adopted: Adopted) -> str:
    """Say, where weights come from another definition of the network, which option makes it compute the same."""
    dialect = design.config.model.model_dialect
    wanted = {"common": "torchvision", "common-fc": "torchvision"}.get(adopted.scheme, adopted.scheme)
    same = wanted == "keras" and design.network.name.startswith("efficientnet")  # the reference's is Keras'
    if dialect != "reference" or wanted not in ("torchvision", "timm", "keras") or same:
        return ""
    return (
        f"The names are those of {adopted.scheme}, while padding, epsilon and shortcuts are the reference's: "
        f"weights that were trained elsewhere need --model-dialect {wanted} to compute what they did there."
    )


def write_table(directory: RunDirectory, adopted: Adopted) -> None:
    """Keep what became of every tensor with the run."""
    content = {
        "source": adopted.source,
        "names": adopted.scheme,
        "loaded_share": adopted.share,
        "used_share": adopted.used_share,
        "tensors": [asdict(fate) for fate in adopted.fates],
        "left_over": list(adopted.unused),
    }
    write_atomic(directory.path / TABLE_FILE, (json.dumps(content, indent=1) + "\n").encode())


def _read_own(path: Path, ema: bool) -> Foreign:
    """Return the weights of a Headrace checkpoint, or of a run's best one."""
    checkpoint, _ = find_weights(path)
    arrays, _ = load(checkpoint)
    start = "ema/" if ema else ""
    if ema and not any(name.startswith("ema/") for name in arrays):
        raise CheckpointError(
            f"{checkpoint} holds no averaged weights.", remedy="Leave --init-ema out, or average: headrace average."
        )
    kinds = tuple(f"{start}{kind}/" for kind in ("params", "stats"))
    chosen = {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(kinds)}
    return Foreign(source=str(checkpoint), arrays={name: array.astype(np.float32) for name, array in chosen.items()})
