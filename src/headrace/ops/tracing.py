"""How a program is being traced: for which target, and which of its values are computed before it runs.

What is computed depends on the target in no other package.

Values that follow from the weights alone, such as packed weights, are computed once and not in every call of a program:
a network is traced twice. Under `collecting`, what operations pass to `constant` is computed and kept in a list, and
the program that returns that list contains nothing else. Under `using`, in the program that is called many times, the
same operations take the values from the list, in the same order. Without either, `constant` computes in place.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax

from headrace.core.target import Target
from headrace.core.tree import PyTree

T = TypeVar("T")
_target: ContextVar[Target | None] = ContextVar("target", default=None)


def target() -> Target:
    """Return what the program being traced will run on: this process's devices, unless `made_for` says otherwise."""
    given = _target.get()
    return given if given is not None else _own()


def given_target() -> Target | None:
    """Return the target that `made_for` says, None where programs are for this process's devices."""
    return _target.get()


def lowered(traced: jax.stages.Traced) -> jax.stages.Lowered:
    """Return a traced program as XLA's input, for the target also where the devices it names are others."""
    given = given_target()
    return traced.lower() if given is None or given.portable else traced.lower(lowering_platforms=(given.lowering,))


def _own() -> Target:
    platform = jax.default_backend()
    # Asked of GPUs alone: elsewhere it would start the devices for nothing.
    first = jax.local_devices()[0] if platform == "gpu" else None
    return Target(platform=platform, capability=str(getattr(first, "compute_capability", "") or ""))


@contextmanager
def made_for(what: Target) -> Iterator[None]:
    """Trace and compile programs for a target. JAX keeps what it has traced: a jitted function is traced for one."""
    token = _target.set(what)
    try:
        yield
    finally:
        _target.reset(token)


def portable() -> AbstractContextManager[None]:
    """Trace programs that can be lowered for any backend (for export), each with the form that suits it."""
    return made_for(replace(target(), portable=True))


def on_cpu() -> bool:
    """Return whether the program being traced will run on the CPU."""
    return target().platform == "cpu"


def on_gpu() -> bool:
    """Return whether the program being traced will run on a GPU, and nowhere else."""
    return target().platform == "gpu" and not target().portable


def compute_capability() -> str:
    """Return that of the NVIDIA GPU that the program being traced will run on, such as 9.0; "" on anything else."""
    return "" if target().portable else target().capability


def is_portable() -> bool:
    """Return whether the program being traced is meant for several backends."""
    return target().portable


# The options' names of how float32 values are multiplied, and JAX's; by default JAX's own settings stay as they are.
_MULTIPLYING = {"tf32": "tensorfloat32", "float32": "float32"}


def multiplying(precision: str) -> AbstractContextManager[Any]:
    """Trace convolutions and matrix products that multiply float32 values so on accelerators."""
    return nullcontext() if precision == "default" else jax.default_matmul_precision(_MULTIPLYING[precision])


@dataclass(frozen=True)
class _Constants:
    """The list that is being filled, or what is left of one; and the state of JAX's tracing in which that began."""

    trace: Any
    collected: list[PyTree] | None = None
    given: Iterator[PyTree] | None = None


_current: ContextVar[_Constants | None] = ContextVar("constants", default=None)


def _trace_state() -> Any:
    from jax.extend.core import get_opaque_trace_state  # here: it is 26 ms, and a second start traces nothing

    return get_opaque_trace_state(convention="flax")


def weights_are_constant() -> bool:
    """Return whether what follows from the weights alone is computed once."""
    # Not where a layer applies others inside a loop or a transformation of its own: values cannot leave it.
    current = _current.get()
    return current is not None and current.trace == _trace_state()


def constant(compute: Callable[[], T]) -> T:
    """Return what `compute` returns, a tree of arrays that follow from the weights alone."""
    current = _current.get()
    if current is None or not weights_are_constant():
        return compute()
    if current.given is not None:
        return next(current.given)
    value = compute()
    if current.collected is not None:
        current.collected.append(value)
    return value


@contextmanager
def collecting() -> Iterator[list[PyTree]]:
    """Trace a network that fills the list given."""
    values: list[PyTree] = []
    token = _current.set(_Constants(_trace_state(), collected=values))
    try:
        yield values
    finally:
        _current.reset(token)


@contextmanager
def using(values: Sequence[PyTree]) -> Iterator[None]:
    """Trace a network that takes its constants from `values`, which were collected from the same network."""
    given = iter(values)
    token = _current.set(_Constants(_trace_state(), given=given))
    try:
        yield
    finally:
        _current.reset(token)
    assert next(given, None) is None, "the network has fewer constants than were collected"
