"""The device programs of a pipeline: a node's forward and backward passes, the loss, the update. One `jit` site.

A node is a stage, or one function of a concurrent stage; its devices are a mesh over the axis `replica`. Everything
that moves (inputs, outputs, gradients, sums, states) is a flat list of arrays with a leading replica dim; weights and
the optimizer's state are the same on all replicas. Only floating-point arrays have gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.core.jax_private import with_arguments, without_arguments
from headrace.engine.devices import REPLICA, replicated
from headrace.engine.pipeline.state_placement import HOST_MEMORY
from headrace.program.gradients import AccumulatorType, accumulate, empty_sums
from headrace.program.stage import KEPT, Function
from headrace.program.structure import Structure

EACH, ALL = P(REPLICA), P()
Leaves = list[Any]


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """How the gradients of the micro batches become one."""

    count: int
    reduction: str
    dtype: AccumulatorType


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """A node: its function and place, and what comes in and goes out."""

    function: Function
    mesh: Mesh
    inputs: Structure  # (args, kwargs)
    outputs: Structure  # a tuple
    before: tuple[Structure, ...]  # outputs of the nodes of the stage before; none at the first stage
    recomputation: bool
    accumulation: Accumulation | None  # None in inference


@dataclass(frozen=True, kw_only=True)
class NodePrograms:
    """Jitted programs; see the functions they are made of."""

    spec: NodeSpec
    forward: Any
    fresh: Any
    backward: Any
    settle: Any


def on_mesh(
    mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()
) -> Any:
    """Return the function as a program in which every replica computes on its own part."""
    # check_vma=False: with True JAX would sum the gradients over replicas in every backward pass, by itself
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donate)


def make_node(spec: NodeSpec) -> NodePrograms:
    """Return the programs of a node."""
    mesh = spec.mesh
    return NodePrograms(
        spec=spec,
        forward=on_mesh(mesh, lambda *given: _forward(spec, *given), (ALL, EACH, EACH), EACH),
        fresh=on_mesh(mesh, lambda params: _fresh(spec, params), (ALL,), EACH),
        backward=on_mesh(
            mesh, lambda *given: _backward(spec, *given), (ALL, EACH, EACH, EACH, EACH, EACH, ALL), EACH, donate=(5,)
        ),
        settle=on_mesh(mesh, _settle, (EACH,), EACH),
    )


def expand(tree: Any) -> Any:
    """Give every array of one replica the replica dim."""
    return jax.tree.map(lambda a: a[None], tree)


def squeeze(tree: Any) -> Any:
    """Take the replica dim away."""
    return jax.tree.map(lambda a: a[0], tree)


def is_float(leaf: Any) -> bool:
    """Tell whether an array has gradients."""
    return jnp.issubdtype(leaf.dtype, np.inexact)


def floats(leaves: Sequence[Any]) -> Leaves:
    """Return the arrays that have gradients."""
    return [leaf for leaf in leaves if is_float(leaf)]


def _run(spec: NodeSpec, params: Any, state: Any, leaves: Leaves) -> tuple[Leaves, tuple[Leaves, Any]]:
    """Return (outputs that have gradients, (the others, new state))."""
    args, kwargs = jax.tree.unflatten(spec.inputs.treedef, leaves)
    outputs, state = spec.function.call(params, state, args, kwargs)
    flat = [jnp.asarray(leaf) for leaf in jax.tree.leaves(outputs)]
    return floats(flat), ([leaf for leaf in flat if not is_float(leaf)], state)


def _forward(spec: NodeSpec, params: Any, state: Any, leaves: Leaves) -> tuple[Leaves, Any, Any]:
    """Return (outputs, what the backward pass needs, new state)."""
    state, leaves = squeeze((state, leaves))

    def function(*given: Any) -> Any:
        return _run(spec, *given)

    saved: Any = ()
    if spec.accumulation is None:
        with_gradients, (others, state) = function(params, state, leaves)
    else:
        policies = jax.checkpoint_policies
        # Without recomputation the outputs of products are kept, and all between them is computed again, cheaply.
        keep = policies.save_only_these_names(KEPT) if spec.recomputation else policies.dots_saveable
        with_gradients, vjp, (others, state) = jax.vjp(
            jax.checkpoint(function, policy=keep), params, state, leaves, has_aux=True
        )
        saved = expand(without_arguments(vjp))
    firsts, seconds = iter(with_gradients), iter(others)
    merged = [next(firsts) if is_float(leaf) else next(seconds) for leaf in spec.outputs.leaves]
    return expand(merged), saved, expand(state)


def _fresh(spec: NodeSpec, params: Any) -> Any:
    """Return empty sums for the gradients of a step."""
    assert spec.accumulation is not None
    return expand(empty_sums(params, spec.accumulation.dtype, "gradient_accumulation_dtype"))


def _backward(
    spec: NodeSpec, params: Any, state: Any, leaves: Leaves, saved: Any, gradients: Any, totals: Any, number: Any
) -> tuple[tuple[Leaves, ...], Any]:
    """Return (gradients of the outputs of each node before, sums with this micro batch's weight gradients in).

    `gradients` are those of this node's outputs, one list from each node of the stage after.
    """
    assert spec.accumulation is not None
    state, leaves, saved, gradients, totals = squeeze((state, leaves, saved, gradients, totals))
    incoming = [sum(group[1:], group[0]) for group in zip(*gradients, strict=True)]
    d_params, _, d_leaves = with_arguments(saved, (params, state, leaves))(incoming)
    rule = spec.accumulation
    totals = accumulate(rule.reduction, totals, d_params, number, rule.count)
    parts, at = [], 0
    for outputs in spec.before:
        mine = d_leaves[at : at + len(outputs.leaves)]
        parts.append([d for d, leaf in zip(mine, outputs.leaves, strict=True) if is_float(leaf)])
        at += len(outputs.leaves)
    return expand((tuple(parts), totals))


def _settle(state: Any) -> Any:
    """Make the states of all replicas equal: the mean of numbers, the first replica's of all else."""

    def one(leaf: Any) -> Any:
        return lax.pmean(leaf, REPLICA) if is_float(leaf) else lax.all_gather(leaf, REPLICA)[0]

    return expand(jax.tree.map(one, squeeze(state)))


def make_loss(mesh: Mesh, outputs: tuple[Structure, ...], finish: Callable[..., tuple[Any, Any]]) -> Any:
    """Return the program that takes the outputs of all last nodes and returns (loss, gradients of each, arguments).

    `finish(*outputs) -> (loss, arguments)` is the user's optimizer function.
    """

    def program(lists: tuple[Leaves, ...]) -> Any:
        lists = squeeze(lists)

        def loss_of(with_gradients: tuple[Leaves, ...]) -> Any:
            values: list[Any] = []
            for structure, leaves, mine in zip(outputs, lists, with_gradients, strict=True):
                left = iter(mine)
                merged = [next(left) if is_float(leaf) else leaf for leaf in leaves]
                values += jax.tree.unflatten(structure.treedef, merged)
            return finish(*values)

        given = tuple(floats(leaves) for leaves in lists)
        (loss, arguments), gradients = jax.value_and_grad(loss_of, has_aux=True)(given)
        return expand((loss, gradients, arguments))

    return on_mesh(mesh, program, (EACH,), EACH)


def make_update(mesh: Mesh, optimizer: Callable[..., Any], *, in_host_memory: bool) -> Any:
    """Return `update(params, optimizer state, sums, arguments) -> (params, optimizer state)`.

    `sums[key]` are the totals of every node that uses the weights `params[key]`. Gradients cross replicas here, once.
    """
    home = NamedSharding(mesh, ALL, memory_kind=HOST_MEMORY) if in_host_memory else replicated(mesh)

    def each(params: Any, state: Any, sums: dict[int, list[Any]], arguments: Any) -> Any:
        sums, arguments = squeeze((sums, arguments))
        totals = {key: jax.tree.map(lambda *all_of: sum(all_of[1:], all_of[0]), *lists) for key, lists in sums.items()}
        updates, state = optimizer(*arguments).update(lax.pmean(totals, REPLICA), state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(each, mesh=mesh, in_specs=(ALL, ALL, EACH, EACH), out_specs=ALL, check_vma=False)

    def update(params: Any, state: Any, sums: Any, arguments: Any) -> Any:
        if in_host_memory:
            state = jax.device_put(state, NamedSharding(mesh, ALL, memory_kind="device"))
        return mapped(params, state, sums, arguments)

    return jax.jit(update, out_shardings=(replicated(mesh), home))
