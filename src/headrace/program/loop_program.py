"""The device program of a loop: many iterations of a body in one launch. The only `jit` of loops is here.

The program takes the loop variables, a block of infeed elements [K, replicas, ...] and how many iterations to run, at
most K. Enqueued values are gathered in a buffer on the device. Small ones leave it from inside the program, whenever
the buffer is full; larger ones, and what is left at the end, come out as results of the launch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from headrace.core.errors import ConfigError
from headrace.core.tree import PyTree
from headrace.engine.devices import REPLICA
from headrace.program.outfeed import Enqueue, Outfeed, OutfeedMode, operations_made
from headrace.program.structure import (
    Structure,
    can_take,
    describe_call,
    difference,
    element_arguments,
    name_of,
    structure_of,
)

# A callback copies what it is given. JAX's CPU backend copies more than about 100 KB on the threads that run programs,
# so that four replicas, all in a callback with 400 KB, deadlocked on two cores. With 64 KB they do not.
MAX_CALLBACK_BYTES = 64 * 1024

Body = Callable[..., Any]


@dataclass(frozen=True)
class Loop:
    """A loop: its functions, the structure of its variables and of an infeed element, its mesh."""

    body: Body
    condition: Callable[..., Any] | None
    variables: Structure  # a tuple of loop variables
    element: Structure | None
    mesh: Mesh

    @property
    def replicas(self) -> int:
        return self.mesh.devices.size


@dataclass(frozen=True)
class Leaving:
    """How enqueued values leave: into which outfeed, their structure, and how many at a time."""

    outfeed: Outfeed
    values: Structure
    depth: int
    inside: bool  # from inside the program, or only at the end of a launch


def check_arguments(loop: Loop) -> None:
    """Refuse functions that cannot take the loop variables and the infeed's element."""
    given = tuple(jax.tree.unflatten(loop.variables.treedef, loop.variables.leaves))
    args, kwargs = given, {}
    if loop.element is not None:
        more, kwargs = element_arguments(jax.tree.unflatten(loop.element.treedef, loop.element.leaves))
        args = (*given, *more)
    name = name_of(loop.body)
    if not can_take(loop.body, args, kwargs):
        if loop.element is not None and can_take(loop.body, given, {}):
            raise ConfigError(
                f"The loop has an infeed, but {name} takes no element of it.",
                rule=f"The body takes the loop variables, then the element: {describe_call(args, kwargs)}.",
                remedy="Add the parameters, or leave the infeed out.",
            )
        raise ConfigError(
            f"{name} cannot be called with {describe_call(args, kwargs)}.",
            rule=f"The body takes the {len(given)} loop variables"
            + (", then what the infeed's element holds." if loop.element is not None else "; there is no infeed."),
        )
    if loop.condition is not None and not can_take(loop.condition, given, {}):
        raise ConfigError(
            f"The condition {name_of(loop.condition)} cannot be called with {describe_call(given, {})}.",
            rule="It takes the loop variables, and not the infeed's element.",
        )


def split_result(loop: Loop, result: object) -> tuple[tuple[Any, ...], list[Enqueue]]:
    """Split a body's result into (loop variables, operations); refuse what does not fit."""
    values = () if result is None else tuple(result) if isinstance(result, tuple | list) else (result,)
    kinds = [isinstance(value, Enqueue) for value in values]
    name, wanted = name_of(loop.body), loop.variables.shapes()
    if True in kinds and False in kinds[kinds.index(True) :]:
        raise ConfigError(f"{name} returns a loop variable after an operation.", rule="Operations come last.")
    variables = values[: len(kinds) - sum(kinds)]
    operations = [value for value in values if isinstance(value, Enqueue)]
    if len(variables) != len(wanted):
        raise ConfigError(
            f"{name} returns {len(variables)} loop variables, but there are {len(wanted)}.",
            rule="The body returns every loop variable, in order, then at most one outfeed.enqueue(...).",
        )
    for number, (before, after) in enumerate(zip(wanted, variables, strict=True)):
        change = difference(structure_of(before), structure_of(jax.tree.map(jnp.asarray, after)))
        if change:
            raise ConfigError(
                f"Loop variable {number}, as {name} returns it, {change}.",
                rule="A loop variable keeps its shapes and types.",
                remedy="Cast it in the body, or start with a value of the other type.",
            )
    if len(operations) > 1:
        raise ConfigError(
            f"{name} enqueues {len(operations)} times.",
            rule="A program enqueues once per iteration.",
            remedy="Enqueue one dict with all the values.",
        )
    return variables, operations


def call_body(loop: Loop, variables: tuple[object, ...], element: PyTree) -> tuple[tuple[Any, ...], list[Enqueue]]:
    """Run the body once; return the new loop variables, in their types, and the operations."""
    args, kwargs = element_arguments(element) if loop.element is not None else ((), {})
    with operations_made() as made:
        after, operations = split_result(loop, loop.body(*variables, *args, **kwargs))
    if any(each is not operation for each in made for operation in operations or (None,)):
        raise ConfigError(
            f"{name_of(loop.body)} makes an operation with enqueue() that it does not return.",
            rule="An operation takes effect only if the body returns it, after the loop variables.",
            remedy="Write: return variable, outfeed.enqueue(values).",
        )
    return jax.tree.map(lambda a, shape: jnp.asarray(a, shape.dtype), after, loop.variables.shapes()), operations


def holds(loop: Loop, variables: tuple[object, ...]) -> jax.Array:
    """Return whether the loop continues: its condition holds on every replica."""
    if loop.condition is None:
        return jnp.bool_(True)
    value = jnp.asarray(loop.condition(*variables))
    if value.shape or value.dtype != jnp.bool_:
        raise ConfigError(
            f"The condition {name_of(loop.condition)} returns {structure_of(value)}.",
            rule="It returns one truth value.",
            remedy="Compare, or reduce with jnp.all or jnp.any.",
        )
    # Replicas stop together: one that continued alone would wait for ever in its next exchange.
    return lax.pmin(value.astype(jnp.int32), REPLICA) == 1


def trace(loop: Loop) -> tuple[Outfeed, Structure] | None:
    """Trace the functions without running them, so that errors are raised now; return what is enqueued where."""
    found: list[tuple[Outfeed, Structure]] = []

    def once(variables: PyTree, element: PyTree) -> PyTree:
        after, operations = call_body(loop, variables, element)
        found.extend((op.outfeed, structure_of(jax.tree.map(jnp.asarray, op.values))) for op in operations)
        return after, holds(loop, after)

    mapped = jax.shard_map(once, mesh=loop.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    jax.eval_shape(mapped, loop.variables.shapes(), loop.element.shapes() if loop.element is not None else None)
    return found[-1] if found else None


def make_program(loop: Loop, leaving: Leaving | None) -> jax.stages.Wrapped:
    """Return `program(variables, block, count, first) -> (variables, buffer, number of iterations, continues)`."""

    def program(variables: PyTree, block: PyTree, count: jax.Array, first: jax.Array) -> PyTree:
        def iteration(carry: PyTree) -> PyTree:
            number, _, variables, buffer = carry
            element = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, number, 0, False)[0], block)
            variables, operations = call_body(loop, variables, element)
            if leaving is not None:
                buffer = _gather(leaving, buffer, operations[0].values, number, first)
            return number + 1, holds(loop, variables), variables, buffer

        # The buffer is part of the loop's carry, whose shape cannot change: it has its full length from the start.
        empty = leaving.values.shapes(leaving.depth) if leaving is not None else ()
        buffer = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), empty)
        start = (jnp.int32(0), holds(loop, variables), variables, buffer)
        number, goes_on, variables, buffer = lax.while_loop(
            lambda carry: (carry[0] < count) & carry[1], iteration, start
        )
        return variables, jax.tree.map(lambda a: a[None], buffer), number, goes_on

    # Loop variables are declared equal on all replicas. They need not be: each device continues with its values.
    specs = (P(), P(None, REPLICA), P(), P())
    out_specs = (P(), P(REPLICA), P(), P())
    return jax.jit(jax.shard_map(program, mesh=loop.mesh, in_specs=specs, out_specs=out_specs, check_vma=False))


def _gather(leaving: Leaving, buffer: PyTree, values: PyTree, number: jax.Array, first: jax.Array) -> PyTree:
    """Write an iteration's values into the buffer; send it to the host when it is full."""
    depth = leaving.depth
    place = number % depth
    buffer = jax.tree.map(
        lambda rows, value: lax.dynamic_update_index_in_dim(rows, jnp.asarray(value, rows.dtype), place, 0),
        buffer,
        values,
    )
    if leaving.inside:
        lax.cond(
            place == depth - 1,
            lambda: io_callback(
                leaving.outfeed.deliver,
                None,
                lax.axis_index(REPLICA),
                first + number - (depth - 1),
                *jax.tree.leaves(buffer),
            ),
            lambda: None,
        )
    return buffer


def how_it_leaves(enqueued: tuple[Outfeed, Structure] | None, launch_length: int | None) -> Leaving | None:
    """Return how enqueued values leave; None for a loop that enqueues nothing."""
    if enqueued is None:
        return None
    outfeed, values = enqueued
    # Only the last row is wanted: a buffer of one is enough, and the earlier rows need not be sent.
    if outfeed.mode is OutfeedMode.LAST:
        return Leaving(outfeed, values, 1, inside=False)
    if values.nbytes * outfeed.buffer_depth <= MAX_CALLBACK_BYTES:
        return Leaving(outfeed, values, outfeed.buffer_depth, inside=True)
    return Leaving(outfeed, values, min(outfeed.buffer_depth, launch_length or outfeed.buffer_depth), inside=False)
