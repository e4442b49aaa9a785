"""The nodes of a pipeline, and the passes over them that every pipeline has.

A node is a stage, or one function of a concurrent stage. Its devices are a mesh over the axis `replica`. Training,
staged evaluation and `pipeline()` each make nodes from what they are given; from there on there is one way: pure
functions for the passes, and `add_passes` that puts them into the plan of a step in a schedule's order.

What differs between replicas until the end of a step (state, counts, sums of gradients, what is kept for the backward
pass) has a leading replica dim. Outputs and gradients of outputs are cut over the replicas along their first dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from headrace.core.jax_private import with_arguments, without_arguments
from headrace.core.tree import PyTree
from headrace.engine.accumulation import Accumulation, accumulate, empty_sums
from headrace.engine.apply_blocks import KEPT
from headrace.engine.compiler import OptionItems
from headrace.engine.pipeline.split_gradient import SplitGradient
from headrace.engine.pipeline.step_plan import ALL, EACH, NOTHING, Key, Program, StepBuilder, on_mesh
from headrace.ops import PRODUCT, multiplying
from headrace.plan.schedule import Node, Op, Work
from headrace.plan.timeline import Timetable

# The shape of something small that is there when a pass is done, whose sums are donated to the next one.
_DONE = (1,)
PRODUCTS, INPUTS, MARKED = "products", "inputs", "marked"  # what a node keeps from its forward to its backward pass


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """A node: what it computes, where, and what it keeps for its backward pass.

    `apply(params, fixed, state, inputs, source)` returns (outputs, (new state, counted)). `fixed` is what the step does
    not change, the same on all replicas. `state` goes from micro batch to micro batch. `inputs` holds the outputs of
    each node of the stage before. `source` is what `fetch` made of the values that `source_specs` describe. `counted`
    is added to the node's counts by `count(counts, counted)`.
    """

    mesh: Mesh
    apply: Callable[[PyTree, PyTree, PyTree, tuple[PyTree, ...], PyTree], tuple[PyTree, tuple[PyTree, PyTree]]]
    name: str = "node"  # other than those of the other nodes, to tell their programs apart in a profile
    num_inputs: int = 1
    num_gradients: int = 1  # nodes that give gradients of its outputs: those of the stage after, or the loss
    is_first: bool = False  # nobody needs the gradients of its inputs
    source_specs: tuple[PyTree, ...] = ()
    fetch: Callable[..., PyTree] = lambda *_: ()
    accumulation: Accumulation | None = None  # None where nothing is trained
    # PRODUCTS: the outputs of convolutions and matrix products; all between them is computed again: a fifth of the
    # memory, no more time. INPUTS: the inputs, and values marked by recomputation_checkpoint. MARKED: what the function
    # itself keeps, by its own jax.checkpoint.
    keeps: str = PRODUCTS
    empty_counts: Callable[[PyTree], PyTree] = lambda fixed: ()
    count: Callable[[PyTree, PyTree], PyTree] = lambda counts, counted: counts
    exchanges: bool = False  # between replicas, in its passes
    matmul_precision: str = "default"
    compiler_options: OptionItems = ()


@dataclass(frozen=True, kw_only=True)
class NodePrograms:
    """The programs of a node; `fresh` and `backward` are there in training alone, `weights` where that is split."""

    spec: NodeSpec
    forward: Program
    fresh: Program | None = None
    backward: Program | None = None
    weights: Program | None = None


def make_node(spec: NodeSpec, split: bool = False) -> NodePrograms:
    """Return the programs of a node; `split` makes two of its backward pass."""
    inputs, gradients = (EACH,) * spec.num_inputs, (EACH,) * spec.num_gradients
    common: dict[str, Any] = {"compiler_options": spec.compiler_options}
    forward = on_mesh(
        spec.mesh,
        _multiplying(spec, _forward),
        (ALL, ALL, EACH, EACH, *spec.source_specs, *inputs),
        (EACH, EACH, EACH, EACH),
        donate=(3,),
        name=f"{spec.name}_forward",
        exchanges=spec.exchanges,
        **common,
    )
    if spec.accumulation is None:
        return NodePrograms(spec=spec, forward=forward)
    rest = (ALL, *spec.source_specs) if spec.keeps == INPUTS else ()
    fresh = on_mesh(
        spec.mesh, lambda *given: _fresh(spec, *given), (ALL, ALL), (EACH, EACH), name=f"{spec.name}_fresh", **common
    )
    if split:
        common |= {"exchanges": spec.exchanges}
        return NodePrograms(
            spec=spec,
            forward=forward,
            fresh=fresh,
            backward=on_mesh(
                spec.mesh,
                _multiplying(spec, _backward_of_inputs),
                (ALL, EACH, EACH, *rest, *inputs, *gradients),
                (*(EACH,) * spec.num_inputs, EACH),
                name=f"{spec.name}_backward",
                **common,
            ),
            weights=on_mesh(
                spec.mesh,
                _multiplying(spec, _backward_of_weights),
                (ALL, EACH, EACH, EACH, ALL, EACH, *rest, *inputs, *gradients),
                (EACH, EACH),
                donate=(3,),
                name=f"{spec.name}_weights",
                **common,
            ),
        )
    return NodePrograms(
        spec=spec,
        forward=forward,
        fresh=fresh,
        backward=on_mesh(
            spec.mesh,
            _multiplying(spec, _backward),
            (ALL, EACH, EACH, EACH, ALL, *rest, *inputs, *gradients),
            (*(EACH,) * (1 if spec.is_first else spec.num_inputs), EACH),
            donate=(3,),
            name=f"{spec.name}_backward",
            exchanges=spec.exchanges,
            **common,
        ),
    )


def _multiplying(spec: NodeSpec, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pass that multiplies as its node says, also in rules of gradients, which JAX traces apart."""

    def multiplies(*given: PyTree) -> Any:
        with multiplying(spec.matmul_precision):
            return run(spec, *given)

    return multiplies


def expand(tree: PyTree) -> PyTree:
    """Give every array of one replica the replica dim."""
    return jax.tree.map(lambda a: a[None], tree)


def squeeze(tree: PyTree) -> PyTree:
    """Take the replica dim away."""
    return jax.tree.map(lambda a: a[0], tree)


def is_float(leaf: Any) -> bool:
    """Tell whether an array has gradients."""
    return jnp.issubdtype(leaf.dtype, np.inexact)


def floats(tree: PyTree) -> list[PyTree]:
    """Return the arrays that have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def _differentiated(
    spec: NodeSpec, fixed: PyTree, source: tuple[PyTree, ...]
) -> tuple[Callable[..., Any], Callable[..., tuple[PyTree, ...]]]:
    """Return the node as a function to differentiate, and what it takes for (params, state, inputs).

    It returns (outputs that have gradients, (all outputs, new state, counted)).
    """

    def run(params: PyTree, state: PyTree, inputs: PyTree, fixed: PyTree, fetched: PyTree) -> PyTree:
        outputs, (state, counted) = spec.apply(params, fixed, state, inputs, fetched)
        return floats(outputs), (outputs, state, counted)

    if spec.keeps == INPUTS:
        # Everything is an argument, and fetched inside: nothing but the arguments is needed to compute all again.
        def function(params: PyTree, state: PyTree, inputs: PyTree, fixed: PyTree, source: PyTree) -> PyTree:
            return run(params, state, inputs, fixed, spec.fetch(*source))

        policy = jax.checkpoint_policies.save_only_these_names(KEPT)
        return jax.checkpoint(function, policy=policy), lambda *given: (*given, fixed, source)

    fetched = spec.fetch(*source)

    def closed(params: PyTree, state: PyTree, inputs: PyTree) -> PyTree:
        return run(params, state, inputs, fixed, fetched)

    if spec.keeps == PRODUCTS:
        closed = jax.checkpoint(closed, policy=keep_products())
    return closed, lambda *given: given


def keep_products() -> Callable[..., Any]:
    """Return the checkpoint policy that keeps the results of convolutions and matrix products alone."""
    # Convolutions and matrix products are nearly all of the FLOPs; what lies between them is cheap to compute again.
    # For a residual block of 16 channels this kept 1.05 instead of 5.5 MB, at the same time for both passes together.
    policies = jax.checkpoint_policies
    kernels = policies.save_only_these_names(PRODUCT)  # our own convolutions are calls that XLA cannot look into
    return policies.save_from_both_policies(policies.dots_saveable, kernels)


def _forward(
    spec: NodeSpec, params: PyTree, fixed: PyTree, state: PyTree, counts: PyTree, *rest: PyTree
) -> tuple[PyTree, PyTree, PyTree, PyTree]:
    """Return (outputs, what the backward pass needs, new state, counts with this micro batch in)."""
    source, inputs = rest[: len(spec.source_specs)], rest[len(spec.source_specs) :]
    state, counts = squeeze((state, counts))
    saved: PyTree = ()
    if spec.accumulation is None:
        outputs, (state, counted) = spec.apply(params, fixed, state, inputs, spec.fetch(*source))
    else:
        function, arguments = _differentiated(spec, fixed, source)
        _, vjp, (outputs, state, counted) = jax.vjp(function, *arguments(params, state, inputs), has_aux=True)
        # Weights and inputs are arguments of the backward pass anyway; left among the residuals, they would be copied
        # for every micro-batch.
        saved = without_arguments(vjp)
    # With a replica dim for all: residuals may be scalars, which cannot be cut over replicas along their first dim.
    return outputs, expand(saved), expand(state), expand(spec.count(counts, counted))


def _fresh(spec: NodeSpec, params: PyTree, fixed: PyTree) -> tuple[PyTree, PyTree]:
    """Return empty counts, and empty sums for the gradients of a step."""
    assert spec.accumulation is not None
    sums = empty_sums(params, spec.accumulation.dtype, "gradient_accumulation_dtype")
    return expand(spec.empty_counts(fixed)), expand(sums)


def _backward(
    spec: NodeSpec, params: PyTree, state: PyTree, saved: PyTree, totals: PyTree, number: jax.Array, *rest: PyTree
) -> tuple[PyTree, ...]:
    """Return the gradients of each input, and the sums with this micro batch's weight gradients in."""
    assert spec.accumulation is not None
    state, saved, totals = squeeze((state, saved, totals))
    d_params, parts = _gradients(*_arguments(spec, params, state, saved, rest))
    totals = accumulate(spec.accumulation, totals, d_params, number)
    if spec.is_first:
        return jnp.zeros(_DONE), expand(totals)
    return *parts, expand(totals)


def _backward_of_inputs(
    spec: NodeSpec, params: PyTree, state: PyTree, saved: PyTree, *rest: PyTree
) -> tuple[PyTree, ...]:
    """Return the gradients of each input, and what the other half of the backward pass needs."""
    state, saved = squeeze((state, saved))
    kept, incoming = _arguments(spec, params, state, saved, rest)
    parts, handed = _split(spec, kept, incoming).of_inputs(kept, incoming)
    return *parts, expand(handed)


def _backward_of_weights(
    spec: NodeSpec, params: PyTree, state: PyTree, saved: PyTree, totals: PyTree, number: jax.Array, *rest: PyTree
) -> tuple[PyTree, ...]:
    """Return the sums with this micro batch's weight gradients in."""
    assert spec.accumulation is not None
    state, saved, totals, handed = squeeze((state, saved, totals, rest[0]))
    kept, incoming = _arguments(spec, params, state, saved, rest[1:])
    d_params = _split(spec, kept, incoming).of_weights(kept, incoming, handed)
    return jnp.zeros(_DONE), expand(accumulate(spec.accumulation, totals, d_params, number))


def _arguments(
    spec: NodeSpec, params: PyTree, state: PyTree, saved: PyTree, rest: tuple[PyTree, ...]
) -> tuple[PyTree, list[jax.Array]]:
    """Return (what the backward pass differentiates with, the gradients of the outputs)."""
    rest, gradients = rest[: -spec.num_gradients], rest[-spec.num_gradients :]
    given, inputs = rest[: len(rest) - spec.num_inputs], rest[len(rest) - spec.num_inputs :]
    arguments = (params, state, inputs)
    if spec.keeps == INPUTS:
        arguments = (*arguments, given[0], given[1:])
    # Several nodes of the next stage may use one output: their gradients add up.
    return (saved, arguments), [reduce(jnp.add, group) for group in zip(*gradients, strict=True)]


def _split(spec: NodeSpec, kept: PyTree, incoming: list[jax.Array]) -> SplitGradient:
    # Where convolutions are computed again, once is enough.
    return SplitGradient(_gradients, kept, incoming, hands_all=spec.keeps != PRODUCTS)


def _gradients(kept: PyTree, incoming: list[jax.Array]) -> tuple[PyTree, list[list[jax.Array]]]:
    """Return the gradients of the weights and of each input."""
    saved, arguments = kept
    d_params, _, d_inputs, *_ = with_arguments(saved, arguments)(incoming)
    # Integer inputs (labels, masks) have gradients of type float0, which are no arrays that could be sent.
    return d_params, [[d for d in jax.tree.leaves(d_input) if d.dtype != jax.dtypes.float0] for d_input in d_inputs]


# The passes of a step. Values are named (kind, node, ...); whoever makes the nodes provides what they read.


@dataclass(frozen=True, kw_only=True)
class NodeValues:
    """The names of the values that a node's passes read."""

    params: Key
    fixed: Key = NOTHING
    state: Key = NOTHING
    source: Callable[[int], tuple[Key, ...]] = lambda micro: ()  # of a micro batch
    inputs: Callable[[int], tuple[Key, ...]] | None = None  # None: the outputs of the stage before
    number: Callable[[int], Key] = lambda micro: NOTHING  # of a micro batch, where the accumulation asks for it


def add_passes(
    builder: StepBuilder,
    table: Timetable,
    nodes: dict[Node, NodePrograms],
    values: dict[Node, NodeValues],
    end: Callable[[int], Sequence[Key]],
) -> dict[Node, Key]:
    """Add the passes of a step in the order of a schedule; return the name of each node's state after them.

    `end(micro)` is called when the forward passes of the last stage over a micro batch have been added. In training it
    returns the name of the gradients of each last node's outputs.
    """
    work = table.work
    for node, programs in nodes.items():
        if programs.fresh is not None:
            reads = (values[node].params, values[node].fixed)
            builder.add(work.device_of[node], programs.fresh, reads, [counts_of(node), sums_of(node)])
    states = {node: values[node].state for node in nodes}
    before: dict[tuple[Node, int], Key] = {}  # the state that a forward pass took, for its backward pass
    ended: dict[tuple[Node, int], Key] = {}
    for lane, action in table.in_order():
        node, micro = action.node, action.micro
        mine, programs = values[node], nodes[node]
        if mine.inputs is not None:
            inputs = mine.inputs(micro)
        else:
            inputs = tuple(("outputs", earlier, micro) for earlier in work.stages[action.stage - 1])
        if action.op is Op.F:
            # The backward pass computes its forward pass again, from the state that this one took.
            before[node, micro], states[node] = states[node], ("state", node, micro)
            counts = counts_of(node) if builder.has(counts_of(node)) else NOTHING
            reads = (mine.params, mine.fixed, before[node, micro], counts, *mine.source(micro), *inputs)
            writes = (("outputs", node, micro), ("saved", node, micro), states[node], counts_of(node))
            builder.add(lane, programs.forward, reads, writes, action)
            if all(builder.has(("outputs", other, micro)) for other in work.stages[-1]):
                # Not strict: in inference `end` returns no gradients.
                ended |= {(last, micro): key for last, key in zip(work.stages[-1], end(micro), strict=False)}
            continue
        if (node, micro) in ended:
            gradients: tuple[Key, ...] = (ended[node, micro],)
        else:
            gradients = tuple(("gradients", later, node, micro) for later in work.stages[action.stage + 1])
        assert programs.backward is not None
        rest = (mine.fixed, *mine.source(micro)) if programs.spec.keeps == INPUTS else ()
        kept = mine.params, before[node, micro], ("saved", node, micro)
        if work.is_split(node):
            handed = ("handed", node, micro)
            if action.op is Op.B:
                reads, writes = (*kept, *rest, *inputs, *gradients), [*_gradient_names(work, node, micro), handed]
                builder.add(lane, programs.backward, reads, writes, action)
            else:
                assert programs.weights is not None
                sums, done = (sums_of(node), mine.number(micro), handed), ("done", node, micro)
                builder.add(
                    lane, programs.weights, (*kept, *sums, *rest, *inputs, *gradients), [done, sums_of(node)], action
                )
            continue
        builder.add(
            lane,
            programs.backward,
            (
                *(*kept, sums_of(node), mine.number(micro)),
                *(*rest, *inputs, *gradients),
            ),
            [*_gradient_names(work, node, micro), sums_of(node)],
            action,
        )
    return states


def counts_of(node: Node) -> Key:
    """Return the name of what a node's forward passes count."""
    return "counts", node


def sums_of(node: Node) -> Key:
    """Return the name of the sums of a node's weight gradients."""
    return "sums", node


def _gradient_names(work: Work, node: Node, micro: int) -> list[Key]:
    """Return the names of the gradients of a node's inputs; where nobody needs them, of the sign that it is done."""
    earlier = work.stages[node.stage - 1] if node.stage else ()
    return [("gradients", node, other, micro) for other in earlier] or [("done", node, micro)]
