"""The full state of a run on the disk: saved atomically, verified, restored by name, pruned to the last and best."""

from headrace.checkpoint.best import Best, best_good, best_names, offer, read_best, rewind_best
from headrace.checkpoint.prune import prune
from headrace.checkpoint.restore import fit_tree
from headrace.checkpoint.saver import Saved, Saver
from headrace.checkpoint.store import checkpoint_name, list_checkpoints, load, newest_good, save, step_of, verify

__all__ = [
    "Best", "Saved", "Saver", "best_good", "best_names", "checkpoint_name", "fit_tree", "list_checkpoints", "load",
    "newest_good", "offer", "prune", "read_best", "rewind_best", "save", "step_of", "verify",
]  # fmt: skip
