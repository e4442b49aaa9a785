"""The one place that asks which backend a program is traced for."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_portable: ContextVar[bool] = ContextVar("portable", default=False)


def on_cpu() -> bool:
    """Say, at trace time, whether the program will run on the CPU."""
    return jax.default_backend() == "cpu"


@contextmanager
def portable() -> Iterator[None]:
    """Trace programs for backends other than this one as well: each gets its own form when it is lowered."""
    token = _portable.set(True)
    try:
        yield
    finally:
        _portable.reset(token)


def is_portable() -> bool:
    """Say, at trace time, whether the program is meant for several backends."""
    return _portable.get()
