"""Loops on the device: `repeat` and `while_loop` run a body many times without returning to the host.

A loop is one compiled program. Without an infeed it is also one launch; with one, a launch takes a block of elements,
as many as fit, and the next block is read and sent while it runs.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.core.errors import ConfigError
from headrace.core.tree import PyTree
from headrace.engine.devices import REPLICA, replica_mesh, start_devices
from headrace.engine.visible import count_replicas
from headrace.program.infeed import Infeed
from headrace.program.loop_program import (
    Body,
    Leaving,
    Loop,
    call_body,
    check_arguments,
    how_it_leaves,
    make_program,
    trace,
)
from headrace.program.outfeed import OutfeedMode
from headrace.program.structure import MAX_COUNT, as_list, read_replicas, structure_of, whole_number

__all__ = ["repeat", "while_loop"]


MAX_BLOCK_BYTES = 256 * 2**20  # of a block of infeed elements, per replica
WHILE_BLOCK = 16  # elements per launch of a while loop, unless block_size is given

Condition = Callable[..., Any]
Replicas = int | Literal["auto"]  # auto: one on each device


def repeat(
    n: int, body: Body, inputs: Sequence[PyTree] | None = None, infeed: Infeed | None = None, *, replicas: Replicas = 1
) -> tuple[PyTree, ...]:
    """Run `body` n times on the device and return the final loop variables (with replicas: those of the first).

    `inputs` is a list of loop variables, each an array or a tree. The body takes them, then the infeed's element (a
    dict by its names), and returns the new loop variables, then at most one `outfeed.enqueue(...)`.
    """
    n = whole_number(_index(n), "The number of repetitions", 0, MAX_COUNT)
    return _loop(body, None, inputs, infeed, (n, replicas))


def while_loop(
    condition: Condition,
    body: Body,
    inputs: Sequence[PyTree] | None = None,
    infeed: Infeed | None = None,
    *,
    max_iterations: int | None = None,
    replicas: Replicas = 1,
) -> tuple[PyTree, ...]:
    """Run `body` on the device while `condition(*loop variables)` holds; see `repeat` for the rest.

    With replicas the loop ends when the condition fails on one of them.
    """
    most = MAX_COUNT if max_iterations is None else whole_number(max_iterations, "max_iterations", 0, MAX_COUNT)
    return _loop(body, condition, inputs, infeed, (most, replicas))


def _loop(
    body: Body, condition: Condition | None, inputs: PyTree, infeed: Infeed | None, size: tuple[int, Replicas]
) -> tuple[PyTree, ...]:
    most, asked = size
    variables = _variables(inputs)
    _check_functions(body, condition, infeed)
    replicas = read_replicas(asked)
    if _is_traced():
        return _inside_a_program(body, condition, variables, infeed, size)
    loop = Loop(
        body=body,
        condition=condition,
        variables=structure_of(variables),
        element=None if infeed is None else infeed.structure,
        mesh=replica_mesh(start_devices("auto", count_replicas(replicas, 1))),
    )
    # By the loop and its shapes: a loop that is run again, with other values, is not compiled again.
    program = _kept_program(loop, most, None if infeed is None else infeed.block_size)
    return _run(program, variables, infeed, most)


@dataclass(frozen=True)
class LoopProgram:
    """A traced loop with its jitted program."""

    loop: Loop
    leaving: Leaving | None
    block: int | None  # elements per launch; None without an infeed
    longest: int | None  # maximum iterations of one launch; None: no limit
    launch: jax.stages.Wrapped


def _kept_program(loop: Loop, most: int, block_size: int | None) -> LoopProgram:
    block = None if loop.element is None else _block_length(loop, most, block_size)
    try:
        return _program(loop, block)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _program.__wrapped__(loop, block)  # a body that is not hashable is compiled again at each call


# Few: an entry keeps the body's closure alive, which may hold a dataset.
@lru_cache(maxsize=16)
def _program(loop: Loop, block: int | None) -> LoopProgram:
    """Check, trace and jit a loop; cached, so that the same loop is compiled once."""
    check_arguments(loop)
    leaving = how_it_leaves(trace(loop), block)
    longest = block
    # What does not leave from inside the program leaves at its end: a launch enqueues no more than its buffer holds.
    if leaving is not None and not leaving.inside and leaving.outfeed.mode is OutfeedMode.ALL:
        longest = leaving.depth
        block = None if block is None else leaving.depth
    return LoopProgram(loop, leaving, block, longest, make_program(loop, leaving))


def _block_length(loop: Loop, most: int, block_size: int | None) -> int:
    assert loop.element is not None
    if block_size is None:
        fit = max(1, MAX_BLOCK_BYTES // max(1, loop.element.nbytes))
        block_size = min(fit, most if loop.condition is None else WHILE_BLOCK)
    return max(1, min(block_size, most))


def _run(program: LoopProgram, variables: tuple[object, ...], infeed: Infeed | None, most: int) -> tuple[PyTree, ...]:
    loop, leaving = program.loop, program.leaving
    # Never donated: the caller may use its arrays again.
    state = jax.tree.map(lambda leaf: jax.device_put(leaf, _everywhere(leaf, loop.mesh)), variables)
    if leaving is not None:
        leaving.outfeed.begin(leaving.values, loop.replicas)
    try:
        done, goes_on, before = 0, True, None
        while done < most and goes_on:
            count = min(most - done, program.longest or most)
            elements = [] if infeed is None else _elements(infeed, program, count)
            count = min(count, len(elements) // loop.replicas) if infeed is not None else count
            block = None if program.block is None else _put_block(elements, program)
            state, buffer, number, still = program.launch(state, block, np.int32(count), np.int32(done))
            # The number of iterations of a while loop is known only at the end of the launch, so this waits for it;
            # `repeat` does not wait, and its next block is sent meanwhile.
            if loop.condition is not None:
                count, goes_on = int(number), bool(still)
                if infeed is not None:
                    infeed.put_back(elements[count * loop.replicas :])
            if leaving is not None:
                _hand_over(leaving, buffer, done, count)
            jax.block_until_ready(before)  # at most two launches in flight: more would only hold more blocks in memory
            done, before = done + count, number
        jax.block_until_ready(state)
        jax.effects_barrier()  # waits until all callbacks have delivered
    finally:
        if leaving is not None:
            leaving.outfeed.finish()
    return jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, state)


def _everywhere(leaf: jax.Array, mesh: Mesh) -> NamedSharding:
    """Return the sharding of a copy on every replica, in the memory the value is in (an optimizer may offload)."""
    return NamedSharding(mesh, P(), memory_kind=leaf.sharding.memory_kind)


def _hand_over(leaving: Leaving, buffer: PyTree, done: int, count: int) -> None:
    """Give the outfeed the rest of a launch's buffer."""
    leaves = jax.tree.leaves(buffer)
    if leaving.outfeed.mode is OutfeedMode.LAST:
        leaving.outfeed.add(done, leaves, min(count, 1))
    else:
        rest = count % leaving.depth if leaving.inside else count
        leaving.outfeed.add(done + count - rest, leaves, rest)


def _elements(infeed: Infeed, program: LoopProgram, count: int) -> list[PyTree]:
    """Return the elements of the next launch; a while loop takes what is available."""
    replicas = program.loop.replicas
    on = f" on {replicas} replicas" if replicas > 1 else ""
    if program.loop.condition is None:
        return infeed.take_all(count * replicas, f"{count} more iterations{on}")
    taken = infeed.take(count * replicas)
    if len(taken) < replicas:
        infeed.put_back(taken)
        return infeed.take_all(replicas, "the next iteration")
    return taken


def _put_block(elements: list[PyTree], program: LoopProgram) -> PyTree:
    """Stack elements as [block, replicas, ...] on the devices; at the end the rest is padding, never read."""
    assert program.block is not None
    block, replicas = program.block, program.loop.replicas
    elements = elements[: len(elements) // replicas * replicas]
    missing = block * replicas - len(elements)
    # One shape for all launches, so that the last block needs no program of its own.
    filled = [*elements, *[elements[-1]] * missing]
    sharding = NamedSharding(program.loop.mesh, P(None, REPLICA))

    def put(*arrays: np.ndarray) -> PyTree:
        stacked = np.stack(arrays)
        return jax.device_put(stacked.reshape(block, replicas, *stacked.shape[1:]), sharding)

    return jax.tree.map(put, *filled)


def _inside_a_program(
    body: Body,
    condition: Condition | None,
    variables: tuple[object, ...],
    infeed: Infeed | None,
    size: tuple[int, Replicas],
) -> tuple[PyTree, ...]:
    """Write the loop into the program that is being traced: a loop in a loop, or in a user's jit."""
    most, replicas = size
    if infeed is not None or replicas != 1:
        raise ConfigError(
            "A loop inside a device program cannot have an infeed or replicas.",
            rule="They belong to the outermost loop, which the host launches.",
            remedy="Move them to the outer loop, or call this loop outside jit.",
        )
    loop = Loop(body, condition, structure_of(variables), None, Mesh(np.array(jax.devices()[:1]), (REPLICA,)))
    check_arguments(loop)

    def iteration(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        after, operations = call_body(loop, carry[1], None)
        if operations:
            raise ConfigError("A loop inside a device program cannot enqueue.", remedy="Enqueue in the outer loop.")
        return carry[0] + 1, after

    def goes_on(carry: tuple[jax.Array, Any]) -> jax.Array:
        more = carry[0] < most
        return more if condition is None else more & condition(*carry[1])

    return lax.while_loop(goes_on, iteration, (jnp.int32(0), variables))[1]


def _variables(inputs: PyTree) -> tuple[PyTree, ...]:
    rule = "They are a list of loop variables, each an array or a tree."
    return jax.tree.map(jnp.asarray, as_list(inputs, "The inputs of a loop", rule))


def _check_functions(body: object, condition: object, infeed: object) -> None:
    for name, function in (("body", body), ("condition", condition)):
        if function is not None and not callable(function):
            raise ConfigError(f"The {name} of a loop is {function!r}.", rule="It is a function.")
    if body is None:
        raise ConfigError("The loop has no body.", rule="It is a function.")
    if infeed is not None and not isinstance(infeed, Infeed):
        raise ConfigError(f"The infeed of a loop is of type {type(infeed).__name__}.", remedy="Write Infeed(dataset).")


def _index(n: Any) -> PyTree:
    """Convert integers of NumPy and JAX to int; leave everything else to the check."""
    try:
        return n if isinstance(n, bool) else operator.index(n)
    except (TypeError, jax.errors.ConcretizationTypeError):
        return n


def _is_traced() -> bool:
    """Say whether JAX is tracing: there even a sum of constants is a tracer."""
    return isinstance(jnp.add(0, 0), Tracer)
