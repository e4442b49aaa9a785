"""The full state of a run on the disk: saved atomically, verified, restored by name, pruned to the last and best."""

from headrace.checkpoint.best import Best, Scored, prune
from headrace.checkpoint.saver import Saved, Saver
from headrace.checkpoint.store import (
    checkpoint_name,
    fit_tree,
    list_checkpoints,
    load,
    newest_good,
    save,
    step_of,
    verify,
)
from headrace.core.files import hold

__all__ = [
    "Best", "Saved", "Saver", "Scored", "checkpoint_name", "fit_tree", "hold", "list_checkpoints", "load",
    "newest_good", "prune", "save", "step_of", "verify",
]  # fmt: skip
