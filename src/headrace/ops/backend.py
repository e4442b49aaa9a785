"""Which backend a program is being traced for. No other file asks."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_portable: ContextVar[bool] = ContextVar("portable", default=False)


def on_cpu() -> bool:
    """Return whether the program being traced will run on the CPU."""
    return jax.default_backend() == "cpu"


def on_gpu() -> bool:
    """Return whether the program being traced will run on a GPU, and nowhere else."""
    return jax.default_backend() == "gpu" and not is_portable()


@contextmanager
def portable() -> Iterator[None]:
    """Trace programs that can be lowered for any backend (for export), each with the form that suits it."""
    token = _portable.set(True)
    try:
        yield
    finally:
        _portable.reset(token)


def is_portable() -> bool:
    """Return whether the program being traced is meant for several backends."""
    return _portable.get()
