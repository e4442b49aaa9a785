"""The full state of a run on the disk: saved atomically, verified, restored by name, pruned to the last and best."""
