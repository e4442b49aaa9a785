"""A profile of the first calls of a run, made by JAX's profiler, in the run's directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

FOLDER = "profile"
NUM_CALLS = 2  # the first one shows the start, the second how calls follow each other


class FirstCalls:
    """Counts calls, and closes the profile behind the last one that it should hold."""

    def __init__(self, num_calls: int) -> None:
        self.left = num_calls

    def called(self, outputs: Any) -> None:
        """Note that a call was launched; `outputs` are ready when it is over."""
        if self.left:
            self.left -= 1
            if not self.left:
                jax.block_until_ready(outputs)
                jax.profiler.stop_trace()

    def close(self) -> None:
        """End a profile that saw fewer calls than it could hold."""
        if self.left:
            self.left = 0
            jax.profiler.stop_trace()


@contextmanager
def profile_first_calls(wanted: bool, run: Path) -> Iterator[FirstCalls]:
    """Profile the first calls made in the block into RUN/profile, if wanted."""
    calls = FirstCalls(NUM_CALLS if wanted else 0)
    if wanted:
        jax.profiler.start_trace(str(run / FOLDER))
    try:
        yield calls
    finally:
        calls.close()


def profile_told(wanted: bool, run: Path) -> list[str]:
    """Return where the profile lies and what opens it."""
    if not wanted:
        return []
    return [f"profile of the first {NUM_CALLS} calls: {run / FOLDER} (TensorBoard's profile plugin, ui.perfetto.dev)"]
