"""The weights that a run starts from: drawn at random, or read from a file, a checkpoint or another run."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from headrace.checkpoint.best import Best
from headrace.checkpoint.manifest import MANIFEST_FILE
from headrace.checkpoint.store import list_checkpoints, load, newest_good
from headrace.core.errors import CheckpointError
from headrace.core.files import write_atomic
from headrace.run.design import Design
from headrace.run.directory import RunDirectory, read_run
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


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a directory means: itself, or a run's best good one, or its newest good one."""
    if (path / MANIFEST_FILE).exists():
        return path
    place = path if list_checkpoints(path) else read_run(path)[0].checkpoints
    best = Best(place).first_good()
    found = place / best.name if best is not None else newest_good(place)[0]
    if found is None:
        raise CheckpointError(f"{place} holds no good checkpoint.", remedy="Name another run, or a checkpoint.")
    return found


def _read_own(path: Path, ema: bool) -> Foreign:
    """Return the weights of a Headrace checkpoint, or of a run's best one."""
    checkpoint = find_checkpoint(path)
    arrays, _ = load(checkpoint)
    start = "ema/" if ema else ""
    if ema and not any(name.startswith("ema/") for name in arrays):
        raise CheckpointError(
            f"{checkpoint} holds no averaged weights.", remedy="Leave --init-ema out, or average: headrace average."
        )
    kinds = tuple(f"{start}{kind}/" for kind in ("params", "stats"))
    chosen = {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(kinds)}
    return Foreign(source=str(checkpoint), arrays={name: array.astype(np.float32) for name, array in chosen.items()})
