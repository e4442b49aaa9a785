"""Results of steps that leave the program of a call while it runs, for whoever listens in this process.

The program holds no listener, only this module's `deliver`: one that was traced before serves the next run, too.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback

from headrace.engine.devices import REPLICA

SENT = ("loss", "top1", "count")  # sums over the samples of a step; NaN for one that the task has not
Listener = Callable[[int, Mapping[str, float]], None]  # the steps done, and the sums of the last one

_listeners: list[Listener] = []
_lock = threading.Lock()


def send(steps_done: jax.Array, sums: Mapping[str, jax.Array]) -> None:
    """Send the sums of a step, which are equal on all replicas, from the first of them; inside `shard_map`."""
    lax.cond(
        lax.axis_index(REPLICA) == 0,
        lambda: io_callback(deliver, None, steps_done, *(sums.get(name, jnp.float32(jnp.nan)) for name in SENT)),
        lambda: None,
    )


def deliver(steps_done: jax.Array, *sums: jax.Array) -> None:
    """Tell the listeners; called from inside the program."""
    found = {name: float(value) for name, value in zip(SENT, sums, strict=True)}
    with _lock:
        listeners = tuple(_listeners)
    for listener in listeners:
        listener(int(steps_done), found)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Give the results of steps to `listener`, on a thread of the devices; it must return soon."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)
