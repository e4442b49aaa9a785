"""Pruning: keep the last N checkpoints and the chosen ones, and never lose the only good one."""

import shutil
from collections.abc import Collection
from pathlib import Path

from headrace.checkpoint.store import list_checkpoints, verify


def prune(directory: Path | str, keep_last: int, keep: Collection[str] = ()) -> list[Path]:
    """Delete all checkpoints but the last `keep_last` and those named in `keep`; return the deleted paths.

    Before anything is deleted, one that stays must verify as good. If none does, the newest good one among those
    to be deleted stays as well. A checkpoint that is being written has a hidden name and is never touched.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, not {keep_last}")
    everything = list_checkpoints(directory)
    stay = [path for path in everything if path in everything[-keep_last:] or path.name.removeprefix(".old-") in keep]
    go = [path for path in everything if path not in stay]
    if go and not any(not verify(path) for path in reversed(stay)):
        last_good = next((path for path in reversed(go) if not verify(path)), None)
        go = [path for path in go if path != last_good]
    for path in go:
        _delete(path)
    return go


def _delete(path: Path) -> None:
    """Delete a checkpoint: out of sight first, so that a crash half-way leaves no damaged one behind."""
    hidden = path.with_name(f".tmp-deleted-{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
