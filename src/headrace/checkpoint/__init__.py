"""The full state of a run on the disk: saved atomically, verified, restored by name, pruned to the last and best."""

from headrace.checkpoint.saver import BestCheckpoints, SavedCheckpoint, Saver, ScoredCheckpoint, prune
from headrace.checkpoint.store import (
    checkpoint_name,
    list_checkpoints,
    load,
    newest_good,
    restore_tree,
    save,
    step_of,
    verify,
)
from headrace.core.files import lock_directory

__all__ = [
    "BestCheckpoints",
    "SavedCheckpoint",
    "Saver",
    "ScoredCheckpoint",
    "checkpoint_name",
    "list_checkpoints",
    "load",
    "lock_directory",
    "newest_good",
    "prune",
    "restore_tree",
    "save",
    "step_of",
    "verify",
]
