"""The programs of one pipeline stage on its own devices: forward, backward, reduce, update. One `jit` site for all.

A stage's devices are a mesh over the axis `replica`. What differs between replicas until the end of a step (gradients,
batch statistics, metric sums) has a leading replica dim; gradients cross replicas once per step, in `reduce`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from headrace.core.jax_private import with_arguments, without_arguments
from headrace.engine.devices import REPLICA, replicated
from headrace.engine.optimizer import global_norm
from headrace.engine.pipeline.state_placement import ON_DEVICE, Home, make_copy, shardings, to_device
from headrace.engine.segments import apply_blocks, inner_points
from headrace.engine.state import State, make_state
from headrace.engine.step import Metrics, StepSpec, finish_step, finite_by_block, train_ctx, unscaled

EACH, ALL = P(REPLICA), P()


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage: its blocks, its place, and how much it keeps from forward to backward."""

    step: StepSpec
    blocks: tuple[int, int]
    recompute: bool = False
    home: Home = ON_DEVICE

    @property
    def is_first(self) -> bool:
        return self.blocks[0] == 0

    @property
    def is_last(self) -> bool:
        return self.blocks[1] == len(self.step.network.blocks)

    @property
    def block_names(self) -> tuple[str, ...]:
        return self.step.network.block_names[slice(*self.blocks)]

    @property
    def keeps_nothing(self) -> bool:
        """Whether the forward pass leaves nothing but the stage's input for the backward pass."""
        return self.recompute and not inner_points(self.step.recompute_points, self.blocks)


@dataclass(frozen=True, kw_only=True)
class StagePrograms:
    """Jitted programs; see the functions they are made of."""

    copy: Any
    copy_to_save: Any  # what every process can read whole
    fresh: Any
    forward: Any
    backward: Any
    reduce: Any
    update: Any


def make_stage(stage: StageSpec, mesh: Mesh) -> StagePrograms:
    """Return the programs of a stage on its mesh."""
    told = dict(stage.step.compiler_options) or None

    def on_mesh(function: Callable[..., Any], in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()) -> Any:
        # check_vma=False: with True JAX would sum the gradients over replicas in every backward, by itself
        mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped, donate_argnums=donate, compiler_options=told)

    source = (ALL, {"epoch": ALL, "rest": P(None, None, REPLICA)}, ALL)  # resident set, block, (step, micro)
    like, everywhere = part_of(stage), replicated(mesh)
    home = shardings(like, mesh, stage.home)

    def update(state: State, *rest: Any) -> tuple[State, Metrics]:
        return _update(stage, to_device(state, like, mesh, stage.home), *rest)

    return StagePrograms(
        copy=make_copy(like, mesh, stage.home),
        copy_to_save=make_copy(like, mesh, stage.home, whole=not everywhere.is_fully_addressable),
        fresh=on_mesh(lambda state: _fresh(stage, state), (ALL,), (EACH, EACH)),
        forward=on_mesh(
            lambda state, counts, x, source: _forward(stage, state, counts, x, source),
            (ALL, EACH, EACH, source),
            (EACH, EACH, EACH),
            donate=(1,),
        ),
        backward=on_mesh(
            lambda state, grads, x, saved, dy, source: _backward(stage, state, grads, (x, saved, dy), source),
            (ALL, EACH, EACH, EACH, EACH, source),
            (EACH, EACH),
            donate=(1,),
        ),
        reduce=on_mesh(
            lambda loss_scale, counts, grads: _reduce(stage, loss_scale, counts, grads), (ALL, EACH, EACH), ALL
        ),
        # Not mapped by hand: where the state is cut over the replicas XLA finds what each has to compute and to send.
        update=jax.jit(
            update,
            in_shardings=(home, everywhere, everywhere, everywhere),
            out_shardings=(home, everywhere),
            donate_argnums=(0, 3),
            compiler_options=told,
        ),
    )


def part_of(stage: StageSpec) -> State:
    """Return the shape of a stage's part of the state."""
    spec = stage.step
    params, stats = spec.network.init(0)
    names = stage.block_names
    params, stats = ({name: tree[name] for name in names if name in tree} for tree in (params, stats))
    return jax.eval_shape(
        lambda: make_state(spec.optimizer, spec.precision, spec.numerics, params, stats, ema=spec.ema_decay > 0)
    )


def _fresh(stage: StageSpec, state: State) -> tuple[dict[str, Any], Any]:
    """Return what a step adds up on this replica, empty, each as [1, ...].

    First what forward passes count (batch statistics, metrics, flags), then the gradients that backward passes make:
    apart, since every array that goes in and out of a program costs the host about a microsecond.
    """
    dtype = stage.step.precision.accumulator_dtype
    sums = ("loss", "top1", "top5", "count") if stage.is_last else ()
    counts = {
        "stats": jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), state["stats"]),
        "sums": {key: jnp.zeros((1,), jnp.float32) for key in sums},
    }
    if stage.step.numerics.fp_exceptions:
        counts["finite"] = jnp.ones((1, len(stage.block_names)), bool)
    return counts, jax.tree.map(lambda w: jnp.zeros((1, *w.shape), dtype), state["params"])


def _slice(source: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Return (resident set, this micro-batch's slice of the block)."""
    resident, block, (step, micro) = source
    here = {key: lax.dynamic_index_in_dim(array, step, 0, False) for key, array in block["rest"].items()}
    here = {key: lax.dynamic_index_in_dim(array, micro, 0, False) for key, array in here.items()}
    return resident, here | {"epoch": lax.dynamic_index_in_dim(block["epoch"], step, 0, False)}


def _function(stage: StageSpec, state: State, x: Any, source: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the stage as a function of what it is differentiated by: (weights, input), or weights alone if first."""
    spec = stage.step
    resident, here = _slice(source)
    ctx = train_ctx(spec, state["step"], here["index"])
    labels = spec.fetch_labels(resident, here) if stage.is_last else None

    def apply(params: Any, x: Any) -> tuple[Any, Any]:
        weights = params, state["stats"]
        points = spec.recompute_points if stage.recompute else ()
        y, batch_stats, finite = apply_blocks(spec.network, stage.blocks, weights, x, ctx, points)
        if labels is None:
            return y, (batch_stats, {}, finite)
        loss, sums = spec.objective(y, labels)
        return loss * state["loss_scale"]["scale"], (batch_stats, sums, finite)

    if not stage.is_first:
        return apply, (state["params"], x)
    images = spec.fetch(resident, here)[0]
    return lambda params: apply(params, images), (state["params"],)


def _forward(stage: StageSpec, state: State, counts: Any, x: Any, source: Any) -> tuple[Any, Any, Any]:
    """Return the output (of the last stage: the loss), what backward needs, and the counts with this micro-batch in."""
    function, arguments = _function(stage, state, x, source)
    saved: Any = ()
    if stage.keeps_nothing:
        y, (batch_stats, sums, finite) = function(*arguments)
    else:
        if not stage.recompute:
            # Convolution outputs are kept, all between them is computed again: a fifth of the memory, no more time.
            function = jax.checkpoint(function, policy=jax.checkpoint_policies.dots_saveable)
        y, vjp, (batch_stats, sums, finite) = jax.vjp(function, *arguments, has_aux=True)
        saved = jax.tree.map(lambda a: a[None], without_arguments(vjp))
    count = stage.step.gradient_accumulation_count
    added = {
        "stats": jax.tree.map(lambda total, new: total + new[None] / count, counts["stats"], batch_stats),
        "sums": {key: total + sums[key][None] for key, total in counts["sums"].items()},
    }
    if "finite" in counts:
        added["finite"] = counts["finite"] & finite[None]
    return (y[None] if stage.is_last else y), saved, added


def _backward(
    stage: StageSpec, state: State, grads: Any, carried: tuple[Any, Any, Any], source: Any
) -> tuple[Any, Any]:
    """Return the gradient of the input and the gradients of the weights with this micro-batch's added."""
    x, saved, dy = carried
    function, arguments = _function(stage, state, x, source)
    if stage.keeps_nothing:
        _, vjp, _ = jax.vjp(function, *arguments, has_aux=True)
    else:
        vjp = with_arguments(jax.tree.map(lambda a: a[0], saved), arguments)
    dparams, *dx = vjp(dy[0] if stage.is_last else dy)
    count = stage.step.gradient_accumulation_count
    grads = jax.tree.map(lambda total, g: total + (g / count).astype(total.dtype)[None], grads, dparams)
    return (dx[0] if dx else jnp.zeros((1,))), grads


def _reduce(stage: StageSpec, loss_scale: Any, counts: Any, grads: Any) -> dict[str, Any]:
    """Exchange once per step: mean gradients in float32, mean statistics, summed metrics, the squared norm."""
    replicas = stage.step.num_replicas
    grads, stats, sums = (jax.tree.map(lambda a: a[0], part) for part in (grads, counts["stats"], counts["sums"]))
    if replicas > 1:
        grads = lax.psum(jax.tree.map(lambda g: g / replicas, grads), REPLICA)
        stats, sums = lax.pmean(stats, REPLICA), lax.psum(sums, REPLICA)
    grads = unscaled({"loss_scale": loss_scale}, jax.tree.map(lambda g: g.astype(jnp.float32), grads))
    reduced = {"grads": grads, "stats": stats, "sums": sums, "square": jnp.square(global_norm(grads))}
    if stage.step.numerics.fp_exceptions:
        forward = lax.pmin(counts["finite"][0].astype(jnp.int32), REPLICA).astype(bool)
        reduced |= {"forward_finite": forward, "gradient_finite": finite_by_block(stage.block_names, grads)}
    return reduced


def _update(stage: StageSpec, state: State, reduced: Any, whole: Any, record: Metrics) -> tuple[State, Metrics]:
    """Update the stage's part of the state; the last stage also writes the step's metrics into the call's record.

    `whole` is what concerns all stages: the squared gradient norm of each, the loss, the flags of all blocks.
    """
    sums = reduced["sums"] if stage.is_last else {"loss": whole["loss"]}
    norm = jnp.sqrt(jnp.sum(whole["squares"]))
    state, metrics = finish_step(stage.step, state, reduced["grads"], reduced["stats"], sums, norm)
    at, metrics = record["at"], metrics | whole["flags"]
    written = {key: record[key].at[at].set(value) for key, value in metrics.items() if key in record}
    return state, written | {"at": at + 1}
