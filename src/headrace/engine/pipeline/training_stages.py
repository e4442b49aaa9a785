"""Training with stages: the nodes of a network that is cut into ranges of blocks, and the end of a step.

A step ends in two programs for each stage. `reduce` takes mean gradients and statistics over the replicas, once per
step; `update` changes the stage's part of the state. What concerns all stages (the loss, the norm of the whole
gradient, the flags of all blocks) goes from each `reduce` to every `update`.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from headrace.core.rng import seed_word
from headrace.core.tree import PyTree
from headrace.engine.accumulation import Accumulation, widened
from headrace.engine.apply_blocks import apply_blocks
from headrace.engine.call_loop import STEPS
from headrace.engine.devices import REPLICA, replicated
from headrace.engine.optimizer import global_norm
from headrace.engine.pipeline.nodes import INPUTS, MARKED, PRODUCTS, NodeSpec
from headrace.engine.pipeline.step_plan import ALL, EACH, Program, on_mesh
from headrace.engine.placement import ON_DEVICE, UPDATE_ONLY, Placement, placed_shardings, to_device
from headrace.engine.state import State, make_state
from headrace.engine.step import Metrics, StepSpec, finish_step, finite_by_block, train_ctx, unscaled
from headrace.model.network import weights_like
from headrace.plan.recompute import segments

FIXED = ("stats", "loss_scale", "step")  # parts of the state that the passes read beside the weights


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage: its blocks, how much it keeps from forward to backward, and where its optimizer's state is stored."""

    step: StepSpec
    blocks: tuple[int, int]
    recompute: bool = False
    placement: Placement = ON_DEVICE

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
    def name(self) -> str:
        """Name the stage in a profile, by its blocks."""
        return f"stage_{self.blocks[0]}_{self.blocks[1]}"

    @property
    def keeps(self) -> str:
        """What the forward pass leaves for the backward pass."""
        if not self.recompute:
            return PRODUCTS
        # With points inside, apply_blocks wraps the segments itself: a second jax.checkpoint around them would keep
        # nothing but the inputs again.
        return MARKED if len(segments(self.step.recompute_points, *self.blocks)) > 1 else INPUTS


def part_of(stage: StageSpec) -> State:
    """Return the shape of a stage's part of the state."""
    spec = stage.step
    return jax.eval_shape(
        partial(make_state, spec.optimizer, spec.precision, spec.loss_scaling, ema=spec.ema_decay > 0),
        *weights_like(spec.network, stage.block_names),
    )


def training_node(stage: StageSpec, mesh: Mesh) -> NodeSpec:
    """Return a stage as a node; its source is (resident set, block, number of the step in it, micro batch)."""
    step = stage.step
    return NodeSpec(
        mesh=mesh,
        apply=lambda *given: _apply(stage, *given),
        name=stage.name,
        num_inputs=0 if stage.is_first else 1,
        is_first=stage.is_first,
        source_specs=(ALL, {"of_step": ALL, "rest": STEPS}, ALL, ALL),
        fetch=lambda *source: _fetch(stage, *source),
        accumulation=Accumulation(count=step.gradient_accumulation_count, dtype=step.precision.accumulator_dtype),
        keeps=stage.keeps,
        empty_counts=lambda fixed: _empty_counts(stage, fixed),
        count=lambda counts, counted: _count(stage, counts, counted),
        exchanges=step.norm_group_size > 1,
        matmul_precision=step.precision.matmul_precision,
        compiler_options=step.compiler_options,
    )


def _fetch(
    stage: StageSpec, resident: PyTree, block: PyTree, number: jax.Array, micro: jax.Array
) -> tuple[PyTree, PyTree, PyTree, PyTree]:
    """Return (images at the first stage, labels at the last, the numbers of the samples, the seed)."""
    here = {key: lax.dynamic_index_in_dim(array, number, 0, False) for key, array in block["rest"].items()}
    here = {key: lax.dynamic_index_in_dim(array, micro, 0, False) for key, array in here.items()}
    here |= {key: lax.dynamic_index_in_dim(row, number, 0, False) for key, row in block["of_step"].items()}
    images = stage.step.fetch(resident, here)[0] if stage.is_first else None
    labels = stage.step.fetch.labels(resident, here) if stage.is_last else None
    return images, labels, here["index"], here.get("seed", seed_word(stage.step.seed))


def _apply(
    stage: StageSpec,
    params: PyTree,
    fixed: State,
    state: PyTree,
    inputs: tuple[PyTree, ...],
    fetched: tuple[PyTree, PyTree, PyTree, PyTree],
) -> tuple[PyTree, tuple[PyTree, PyTree]]:
    """Run the stage's blocks; the output of the last stage is the scaled loss."""
    spec, (images, labels, samples, seed) = stage.step, fetched
    ctx = train_ctx(replace(spec, seed=seed), fixed["step"], samples)
    points = spec.recompute_points if stage.recompute else ()
    x = images if stage.is_first else inputs[0]
    y, batch_stats, finite = apply_blocks(spec.network, stage.blocks, (params, fixed["stats"]), x, ctx, points)
    sums: Metrics = {}
    if stage.is_last:
        loss, sums = spec.objective(y, labels)
        # With a dim: outputs are cut over the replicas along their first one, which a scalar does not have.
        y = (loss * fixed["loss_scale"]["scale"])[None]
    return y, (state, {"stats": batch_stats, "sums": sums, "finite": finite})


def _empty_counts(stage: StageSpec, fixed: State) -> dict[str, Any]:
    """Return what forward passes count, empty: batch statistics, metrics at the last stage, flags if asked for."""
    counts = {
        "stats": jax.tree.map(jnp.zeros_like, fixed["stats"]),
        "sums": {key: jnp.zeros((), jnp.float32) for key in (stage.step.objective.sum_names if stage.is_last else ())},
    }
    if stage.step.fp_exceptions:
        counts["finite"] = jnp.ones((len(stage.block_names),), bool)
    return counts


def _count(stage: StageSpec, counts: dict[str, Any], counted: dict[str, Any]) -> dict[str, Any]:
    num_micros = stage.step.gradient_accumulation_count
    added = {
        "stats": jax.tree.map(lambda total, new: total + new / num_micros, counts["stats"], counted["stats"]),
        "sums": {key: total + counted["sums"][key] for key, total in counts["sums"].items()},
    }
    if "finite" in counts:
        added["finite"] = counts["finite"] & counted["finite"]
    return added


def make_reduce(stage: StageSpec, mesh: Mesh) -> Program:
    """Return `reduce(fixed, counts, sums) -> (what the stage's update needs, what every stage's update needs)`."""
    replicas, step = stage.step.num_replicas, stage.step

    def reduce(fixed: State, counts: PyTree, grads: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
        counts, grads = jax.tree.map(lambda a: a[0], (counts, grads))
        stats, sums = counts["stats"], counts["sums"]
        if replicas > 1:
            # As in a step without stages: divided first, so that 16-bit sums cannot overflow.
            grads = lax.psum(jax.tree.map(lambda g: g / replicas, grads), REPLICA)
            stats, sums = lax.pmean(stats, REPLICA), lax.psum(sums, REPLICA)
        grads = unscaled(fixed, widened(grads))
        # The square of this stage's norm: squares can be added up over stages.
        shared = {"square": jnp.square(global_norm(grads))} | ({"loss": sums["loss"]} if stage.is_last else {})
        if step.fp_exceptions:
            forward = lax.pmin(counts["finite"].astype(jnp.int32), REPLICA).astype(bool)
            shared |= {"forward_finite": forward, "gradient_finite": finite_by_block(stage.block_names, grads)}
        return {"grads": grads, "stats": stats, "sums": sums}, shared

    return on_mesh(
        mesh,
        reduce,
        (ALL, EACH, EACH),
        (ALL, ALL),
        name=f"{stage.name}_reduce",
        compiler_options=step.compiler_options,
    )


def make_update(stage: StageSpec, mesh: Mesh, like: State) -> Program:
    """Return `update(params, fixed, slots, reduced, at, record, *shared) -> (params, fixed, slots, at, record)`.

    `slots` are the parts of the state that only the update touches, `at` is the number of the step in the block,
    and `record` the call's metrics, at the last stage. Each stage gives one `shared`. `like` is the shape of the
    stage's part of the state.
    """
    slot_shardings = placed_shardings({key: like[key] for key in UPDATE_ONLY if key in like}, mesh, stage.placement)

    def update(
        params: PyTree, fixed: State, slots: State, reduced: PyTree, at: jax.Array, record: Metrics, *shared: Metrics
    ) -> tuple[PyTree, ...]:
        state = {"params": params} | fixed | to_device(slots, mesh, stage.placement)
        # Every stage has to know whether the loss is finite, because all of them skip the step, or none.
        sums = reduced["sums"] if stage.is_last else {"loss": shared[-1]["loss"]}
        # Every stage computes the same norm from the same numbers in the same order, so all agree on whether to update.
        norm = jnp.sqrt(jnp.sum(jnp.stack([part["square"] for part in shared])))
        state, metrics = finish_step(stage.step, state, reduced["grads"], reduced["stats"], sums, norm)
        if stage.is_last:
            flags = [key for key in ("forward_finite", "gradient_finite") if key in shared[0]]
            metrics |= {key: jnp.concatenate([part[key] for part in shared]) for key in flags}
            record = {key: rows.at[at].set(metrics[key]) for key, rows in record.items()}
        parts = state["params"], {key: state[key] for key in FIXED}, {key: state[key] for key in slots}
        return *parts, at + 1, record

    # Not mapped by hand: where the state is cut over the replicas XLA finds what each has to compute and to send.
    everywhere = replicated(mesh)
    update.__name__ = f"{stage.name}_update"
    jitted = jax.jit(
        update,
        out_shardings=(everywhere, everywhere, slot_shardings, everywhere, everywhere),
        donate_argnums=(0, 1, 2, 5),
    )
    outs: tuple[Any, ...] = (ALL, ALL, slot_shardings, ALL, ALL)
    options = stage.step.compiler_options
    return Program(jitted=jitted, mesh=mesh, outs=outs, name=update.__name__, compiler_options=options)
