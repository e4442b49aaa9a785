"""Optax transforms for custom training loops: gradient accumulation, and the mean over replicas."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from headrace.core.errors import ConfigError
from headrace.core.tree import PyTree
from headrace.engine.accumulation import (
    REDUCTIONS,
    Accumulation,
    AccumulatorType,
    accumulate,
    check_accumulator,
    empty_sums,
    widened,
)
from headrace.engine.devices import REPLICA, Device
from headrace.engine.placement import host_memory_of
from headrace.program.structure import one_of, whole_number

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def check_reduction(reduction: object) -> str:
    """Return the name of a reduction, ignoring case."""
    return one_of(reduction, "The reduction of gradients", list(REDUCTIONS))


class AccumulationState(NamedTuple):
    """The state of accumulate_gradients: the number of gradients so far, their total, and the optimizer's state."""

    number: jax.Array
    totals: PyTree
    inner: Any


def accumulate_gradients(
    optimizer: optax.GradientTransformation,
    num_mini_batches: int,
    *,
    dtype: AccumulatorType = None,
    reduction: str = "SUM",
    offload_weight_update_variables: bool | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Apply the optimizer at every `num_mini_batches`-th call, to the gradients since; other calls change nothing.

    Gradients are summed in the type of their weight, or in `dtype` (a type, or a function of the weight). The optimizer
    gets them in that type, but 16-bit ones (and 16-bit weights) widened to float32. `reduction` is SUM, MEAN or
    RUNNING_MEAN. Around cross_replica(...), replicas exchange only when the optimizer acts.

    `offload_weight_update_variables` keeps the optimizer's state in host memory and brings it to the device when the
    optimizer acts. None: where several gradients are accumulated and the device can reach host memory.
    """
    count = whole_number(num_mini_batches, "num_mini_batches", 1)
    rule = Accumulation(count=count, reduction=check_reduction(reduction), dtype=dtype)
    inner = optax.with_extra_args_support(_checked(optimizer))
    check_accumulator(dtype)
    check_offload(offload_weight_update_variables)

    def init(params: PyTree) -> AccumulationState:
        slots = inner.init(widened(params))
        if offloads(offload_weight_update_variables, count, jax.local_devices()[0]):
            slots = jax.device_put(slots, HOST)
        return AccumulationState(jnp.int32(0), empty_sums(params, dtype), slots)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: object) -> tuple[PyTree, PyTree]:
        totals = accumulate(rule, state.totals, updates, state.number)

        def act() -> tuple[Any, AccumulationState]:
            slots = jax.device_put(state.inner, DEVICE)
            acted, after = inner.update(widened(totals), slots, widened(params), **extra)
            # A loop variable keeps its memory space, as it keeps its type: back to where this leaf came from.
            after = jax.tree.map(lambda new, old: jax.device_put(new, _space(old)), after, state.inner)
            return acted, AccumulationState(jnp.int32(0), jax.tree.map(jnp.zeros_like, totals), after)

        def wait() -> tuple[Any, AccumulationState]:
            # Zeros of the optimizer's types, which need not be those of the gradients: both branches must return the
            # same.
            nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(act)[0])
            return nothing, AccumulationState(state.number + 1, totals, state.inner)

        # A branch and not a select: replicas exchange inside `act`, and only then.
        return lax.cond(state.number + 1 == count, act, wait)

    return optax.GradientTransformationExtraArgs(init, update)


def check_offload(asked: object) -> None:
    """Refuse what is neither None nor a truth value."""
    if asked is not None and not isinstance(asked, bool):
        raise ConfigError(
            f"offload_weight_update_variables is {asked!r}.",
            rule="It is True, False, or None (where gradients are accumulated and the device can reach host memory).",
        )


def offloads(asked: bool | None, num_micros: int, device: Device) -> bool:
    """Return whether the optimizer's state is in host memory; refuse where it is asked for and cannot."""
    reachable = host_memory_of(device)
    if asked and not reachable:
        raise ConfigError(
            f"offload_weight_update_variables is True, but programs on {device.platform} cannot reach host memory.",
            remedy="Leave it out: the optimizer's state stays on the devices.",
        )
    return asked if asked is not None else num_micros > 1 and reachable


def _space(leaf: object) -> Any:
    return getattr(jax.typeof(leaf), "memory_space", DEVICE)


def cross_replica(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Give the optimizer the mean of the gradients over all replicas, so that their weights stay equal."""
    inner = optax.with_extra_args_support(_checked(optimizer))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: object) -> tuple[PyTree, PyTree]:
        try:
            mean = lax.pmean(updates, REPLICA)
        except NameError as error:
            raise ConfigError(
                "cross_replica() found no replicas to take the mean over.",
                rule="It acts inside a program over replicas.",
                remedy="Train inside loops.repeat(..., replicas=R); leave it out in a plain jit.",
            ) from error
        return inner.update(mean, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def accumulates(optimizer_state: object) -> bool:
    """Say whether an optimizer's state is that of one that accumulates gradients."""
    kinds = (AccumulationState, optax.MultiStepsState)
    found = jax.tree.leaves(optimizer_state, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(node, kinds) for node in found)


def _checked(optimizer: object) -> optax.GradientTransformation:
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ConfigError(
            f"The optimizer is of type {type(optimizer).__name__}.",
            rule="It is an optax transformation.",
            remedy="Write optax.sgd(0.1), for example.",
        )
    return optimizer
