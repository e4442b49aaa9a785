"""One training step: gradients, their exchange, and the update.

A step computes the gradients of G micro-batches on each replica, exchanges them once, and updates the weights once; it
runs inside `shard_map`. docs/explanation/numerics.md gives the order of the arithmetic. A step whose numbers are not
finite changes only the counters, so that weights are never lost; `bad` tells the host to stop (or, with dynamic loss
scaling, not to).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from headrace.core.rng import Seed
from headrace.core.tree import PyTree, map_named
from headrace.engine.apply_blocks import apply_blocks
from headrace.engine.compiler import OptionItems
from headrace.engine.devices import REPLICA
from headrace.engine.loss_scale import LossScaling, next_loss_scale, overflow_expected
from headrace.engine.lr_curve import LrCurve
from headrace.engine.objective import Objective
from headrace.engine.optimizer import Update, global_norm, update_kinds
from headrace.engine.packing import Packing, make_packing
from headrace.engine.precision import Precision, write_weights
from headrace.engine.state import State, next_ema
from headrace.model.context import NORM_WEIGHTS, Ctx, Draws, all_frozen
from headrace.model.network import Network
from headrace.ops.tracing import multiplying, on_gpu


def all_finite(_name: str, y: PyTree) -> jax.Array:
    """Say whether all numbers of a block's output are finite."""
    return jnp.stack([jnp.isfinite(part).all() for part in jax.tree.leaves(y)]).all()


Metrics = dict[str, Any]  # of a step: arrays; of a call: one row per step, and perhaps HISTOGRAMS
Gradients = tuple[PyTree, PyTree, Metrics, jax.Array]  # with batch statistics, metric sums, finite flags
SCALARS = "scalars"  # among the metrics inside a call: those that are one float32 each, as a vector
GRADIENTS = "gradients"  # among the metrics of a step: a tree, of which a call keeps the last


class Fetch(Protocol):
    """How samples come into a program, from a resident set and one micro-batch's slice of the block."""

    def __call__(self, resident: PyTree, micro: dict[str, jax.Array], /) -> tuple[Any, Any]:
        """Return images and labels."""
        ...

    def labels(self, resident: PyTree, micro: dict[str, jax.Array], /) -> Any:
        """Return the labels alone, for the last stage of a pipeline."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Everything a step needs that is not an array: a value, by which its program is found again."""

    network: Network
    optimizer: Update
    precision: Precision
    loss_scaling: LossScaling
    fp_exceptions: bool = False  # whether the numbers of each block are finite
    fetch: Fetch
    num_replicas: int
    gradient_accumulation_count: int
    seed: Seed  # of steps whose block has none
    objective: Objective
    stable_norm: bool
    norm_group_size: int = 1  # consecutive replicas whose micro-batches share batch-norm statistics
    bn_momentum: float
    bn_momentum_start: float | None = None  # with it, bn_momentum is the end of a rise: statistics_momentum
    ema_decay: float
    recompute_points: tuple[int, ...] = ()  # blocks whose inputs are kept; what is between them is recomputed
    cpu_kernels: str = "auto"
    histograms: bool = False  # of weights and gradients, after the last step of each call
    streams: bool = False  # each step's sums leave the program of a call while it runs
    compiler_options: OptionItems = ()  # XLA's: engine/compiler.py
    packing: Packing | None = None  # of the state that a step takes and returns

    @property
    def lr_curve(self) -> LrCurve:
        """The learning rate of each step."""
        return self.optimizer.lr_curve

    def with_rates(self, lr_curve: LrCurve) -> "StepSpec":
        """Return the specification with another learning rate."""
        return replace(self, optimizer=replace(self.optimizer, lr_curve=lr_curve))


def _of_block(_step: jax.typing.ArrayLike) -> jax.Array:
    raise AssertionError("the block brings the rates of its steps")


def without_values_of(block: Mapping[str, Any], spec: StepSpec) -> StepSpec:
    """Return the specification without what is no part of the program: the seed and the rates, where a block brings
    them, and the loss scale of the start. A run with other ones finds the program that was traced before.
    """
    spec = replace(spec, loss_scaling=replace(spec.loss_scaling, initial=1.0))
    if "seed" in block:
        spec = replace(spec, seed=0)
    if "rate" in block:
        spec = spec.with_rates(_of_block)
    return spec


def make_step(spec: StepSpec) -> Callable[[State, PyTree, PyTree], tuple[State, Metrics]]:
    """Return `step(state, resident, slices) -> (state, metrics)`; `slices` holds G micro-batches of this replica."""

    def step(state: State, resident: PyTree, slices: PyTree) -> tuple[State, Metrics]:
        # Arguments of the program, not constants in it: a run with others then needs no other program.
        seed, rate = slices.get("seed", spec.seed), slices.get("rate")
        now = replace(spec if rate is None else spec.with_rates(lambda _step: rate), seed=seed)
        gradients = _mean_gradients(now, state, resident, slices)
        # After accumulation: the exchange costs the same however many micro-batches a step has.
        grads, batch_stats, sums, probes = _across_replicas(spec, *gradients)
        # Before the norm is taken, so that clipping and the recorded norm do not depend on the loss scale.
        grads = unscaled(state, grads)
        state, metrics = finish_step(now, state, grads, batch_stats, sums, global_norm(grads))
        if spec.fp_exceptions:
            metrics |= {"forward_finite": probes, "gradient_finite": finite_by_block(spec.network.block_names, grads)}
        return state, metrics | ({GRADIENTS: grads} if spec.histograms else {})

    return step


def unscaled(state: State, grads: PyTree) -> PyTree:
    """Divide gradients by the loss scale."""
    return jax.tree.map(lambda g: g / state["loss_scale"]["scale"], grads)


def finish_step(
    spec: StepSpec, state: State, grads: PyTree, batch_stats: PyTree, sums: Metrics, grad_norm: jax.Array
) -> tuple[State, Metrics]:
    """Update a state, or the part of it that these gradients belong to, unless something is not finite."""
    loss_finite = jnp.isfinite(sums["loss"])
    finite = loss_finite & jnp.isfinite(grad_norm)
    updated = _update(spec, state, grads, batch_stats, grad_norm)
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, {key: state[key] for key in updated})
    scale, scaling = state["loss_scale"], spec.loss_scaling
    metrics = sums | {
        "learning_rate": spec.lr_curve(state["step"]),
        "grad_norm": grad_norm,
        "loss_scale": scale["scale"],
        "skipped": 1.0 - finite.astype(jnp.float32),
        # With dynamic scaling an overflow in the gradients alone is expected, until the scale can fall no further.
        "bad": (~loss_finite | (~finite & ~overflow_expected(scale, scaling))).astype(jnp.float32),
    }
    loss_scale = next_loss_scale(scale, finite, scaling, state["step"])
    # A skipped step counts, too: the host counts launched steps, and sample order and learning rate follow from the
    # number.
    return state | kept | {"loss_scale": loss_scale, "step": state["step"] + 1}, metrics


def _mean_gradients(spec: StepSpec, state: State, resident: PyTree, slices: PyTree) -> Gradients:
    """Return this replica's mean gradient, mean batch statistics, summed metrics and finite flags over its G micros."""
    count, dtype = spec.gradient_accumulation_count, spec.precision.accumulator_dtype
    # Outside of what is differentiated: slices of long vectors then need no backward pass.
    whole = state if spec.packing is None else spec.packing.unpack(state)
    of_step = {key: value for key, value in slices.items() if key in PER_STEP}
    micros = {key: value for key, value in slices.items() if key not in PER_STEP}

    def one(micro: PyTree) -> Gradients:
        with jax.named_scope("input"):
            images, labels = spec.fetch(resident, micro | of_step)
        ctx = train_ctx(spec, state["step"], micro["index"])
        loss = jax.grad(lambda params: _scaled_loss(spec, whole, params, (images, labels), ctx), has_aux=True)
        with multiplying(
            spec.precision.matmul_precision
        ):  # also rules of gradients, which are traced behind the network
            grads, (batch_stats, sums, probes) = loss(whole["params"])
        # Here and not after the sum, so that adding up micro-batches takes few kernels, too.
        if spec.packing is not None:
            grads = grads if _exchanges_early(spec) else spec.packing.params.pack(grads)
            batch_stats = spec.packing.stats.pack(batch_stats)
        # Divided before it is added: a 16-bit accumulator then holds a mean and cannot overflow with G.
        return jax.tree.map(lambda g: (g / count).astype(dtype), grads), batch_stats, sums, probes

    if count == 1:
        grads, batch_stats, sums, probes = one(jax.tree.map(lambda a: a[0], micros))
        # Joined once, for the norm and the update: XLA would fuse the concatenation into both, and a sum is slow so.
        joined = spec.packing is not None and not _exchanges_early(spec)
        return lax.optimization_barrier(grads) if joined else grads, batch_stats, sums, probes

    traced = jax.jit(one, inline=True)  # once for its shapes and the loop's body

    def add(total: Gradients, micro: PyTree) -> tuple[Gradients, None]:
        grads, batch_stats, sums, probes = traced(micro)
        batch_stats = jax.tree.map(lambda a: a / count, batch_stats)
        plus = lambda a, b: jax.tree.map(jnp.add, a, b)  # noqa: E731
        return (plus(total[0], grads), plus(total[1], batch_stats), plus(total[2], sums), total[3] & probes), None

    first = jax.tree.map(lambda a: a[0], micros)
    # The loop starts from zeros: to start from the first micro-batch's gradients, the network would be in the program
    # twice, and be compiled twice.
    grads, batch_stats, sums, probes = traced.eval_shape(first)
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (grads, batch_stats, sums))
    return lax.scan(add, (*zeros, jnp.ones(probes.shape, bool)), micros)[0]


def _exchanges_early(spec: StepSpec) -> bool:
    """Say whether gradients are exchanged one by one, as the backward pass makes them, and joined only then.

    A vector of all is there when the last one is: compiled for eight H200, its sum came after all convolutions.
    """
    return spec.num_replicas > 1 and spec.gradient_accumulation_count == 1


def train_ctx(spec: StepSpec, step: jax.Array, samples: jax.Array) -> Ctx:
    """Return the conditions under which a step applies the network to these samples."""
    size, groups = spec.norm_group_size, None
    if size > 1:
        # The rows of the mesh are sorted by process, so that consecutive replicas are on one host where the sizes
        # allow it.
        groups = (REPLICA, tuple(tuple(range(i, i + size)) for i in range(0, spec.num_replicas, size)))
    dtype, stable = spec.precision.compute_dtype, spec.stable_norm
    draws = Draws(spec.seed, step, samples)
    probe = all_finite if spec.fp_exceptions else None
    return Ctx(
        train=True,
        compute_dtype=dtype,
        half_partials=spec.precision.half_partials,
        stable_norm=stable,
        norm_groups=groups,
        draws=draws,
        probe=probe,
        frozen=frozen(spec),
        cpu_kernels=spec.cpu_kernels,
        matmul_precision=spec.precision.matmul_precision,
    )


def _scaled_loss(
    spec: StepSpec, state: State, params: PyTree, batch: tuple[jax.Array, jax.Array], ctx: Ctx
) -> tuple[PyTree, PyTree]:
    """Return the loss to differentiate and, beside it, (batch statistics, metric sums, finite flag of each block)."""
    images, labels = batch
    blocks = (0, len(spec.network.blocks))
    logits, batch_stats, flags = apply_blocks(
        spec.network, blocks, (params, state["stats"]), images, ctx, spec.recompute_points
    )
    with jax.named_scope("loss"):
        loss, sums = spec.objective(logits, labels)
    return loss * state["loss_scale"]["scale"], (batch_stats, sums, flags)


@jax.named_scope("exchange")
def _across_replicas(spec: StepSpec, grads: PyTree, batch_stats: PyTree, sums: Metrics, probes: jax.Array) -> Gradients:
    """Exchange once per step: mean gradients (in float32 from here on) and statistics, summed metrics."""
    if spec.num_replicas > 1:
        # Divided before they are summed: a sum of 16-bit gradients could overflow with the number of replicas.
        grads = lax.psum(jax.tree.map(lambda g: g / spec.num_replicas, grads), REPLICA)
        if spec.packing is not None and _exchanges_early(spec):
            grads = lax.optimization_barrier(spec.packing.params.pack(grads))
        batch_stats = lax.pmean(batch_stats, REPLICA)
        sums = lax.psum(sums, REPLICA)
        # As integers: the minimum of 0 and 1 is their conjunction.
        probes = lax.pmin(probes.astype(jnp.int32), REPLICA).astype(bool)
    return jax.tree.map(lambda g: g.astype(jnp.float32), grads), batch_stats, sums, probes


@jax.named_scope("update")
def _update(spec: StepSpec, state: State, grads: PyTree, batch_stats: PyTree, grad_norm: jax.Array) -> State:
    """Return the parts of the state that a good step changes: weights, statistics, optimizer, EMA."""
    # The rule sees float32 whatever the stored format is; the result is rounded once, where the weights are written.
    params32 = jax.tree.map(lambda w: w.astype(jnp.float32), state["params"])
    step = state["step"]
    with multiplying(spec.precision.matmul_precision):  # Muon's
        updates, opt = spec.optimizer.update(
            grads, state["opt"], params32, step=step, rate=spec.lr_curve(step), grad_norm=grad_norm
        )
    params = write_weights(state["params"], updates, spec.seed, state["step"], spec.precision)
    keep = statistics_momentum(spec, step)

    # Statistics move once per step, by the mean over micro-batches and replicas: so plans with the same norm groups
    # have the same statistics, whatever their replicas and accumulation.
    def moved(name: str, old: jax.Array, new: jax.Array) -> jax.Array:
        # Kept as it is and not averaged with itself, which would round it anew at every step.
        return keep * old + (1 - keep) * new if is_moved(spec, name) else old

    stats = map_named(moved, state["stats"], batch_stats)
    changed = {"params": params, "stats": stats, "opt": opt}
    if "ema" in state:
        changed["ema"] = next_ema(state["ema"], {"params": params, "stats": stats}, state["step"], spec.ema_decay)
    return changed


def statistics_momentum(spec: StepSpec, step: jax.typing.ArrayLike) -> float | jax.Array:
    """Return the share of batch norm's running statistics that a step keeps.

    With a start, they are means over a 60th of the steps so far: while the weights change fast, statistics that are ten
    steps old are those of another network; at the end, those of many steps are the more exact ones.
    """
    if spec.bn_momentum_start is None:
        return spec.bn_momentum
    rising = 1 - STATISTICS_SHARE / (jnp.asarray(step, jnp.float32) + 1)
    return jnp.clip(rising, spec.bn_momentum_start, spec.bn_momentum)


def frozen(spec: StepSpec) -> Callable[[str], bool] | None:
    """Return which weights keep their values, by their names; None if all are trained."""
    trained = spec.optimizer.trained
    return trained.frozen if trained.any_frozen else None


def is_moved(spec: StepSpec, name: str) -> bool:
    """Say whether a running statistic follows the batches: not where its layer's weights are frozen."""
    return not all_frozen(frozen(spec), name.rpartition("/")[0], NORM_WEIGHTS)


def with_packing(spec: StepSpec, state: State) -> StepSpec:
    """Return the specification of a step on a packed state, where that is faster and changes nothing else.

    On GPUs alone: elsewhere no gain was measured. Not with 16-bit weights, whose rounding draws bits by the tensor's
    name, nor where each block's gradients are checked.
    """
    kind = update_kinds(spec.optimizer)
    if not on_gpu() or kind is None or spec.precision.half_weights or spec.fp_exceptions:
        return spec
    return replace(spec, packing=make_packing(state, kind, partial(is_moved, spec)))


def finite_by_block(names: Sequence[str], grads: PyTree) -> jax.Array:
    """Return, for each block, whether all gradients of its weights are finite."""
    flags = []
    for name in names:
        leaves = [jnp.isfinite(g).all() for g in jax.tree.leaves(grads.get(name, {}))]
        flags.append(jnp.stack(leaves).all() if leaves else jnp.ones((), bool))
    return jnp.stack(flags)


STATISTICS_SHARE = 60  # of the steps so far that running statistics are means over, where they follow them
# How a block of K steps is sharded: [K, G, B, ...] with B over the replicas, but for these, one number for each step.
PER_STEP = ("epoch", "seed", "rate")
