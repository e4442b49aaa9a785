"""The training state: one dict of arrays, which a call takes and returns and a checkpoint stores.

`params` (weights in their stored dtype), `stats` (running batch-norm statistics), `opt` (optimizer slots), `ema` (the
moving averages of params and stats, when on), `loss_scale`, `step`. Its key paths are the tensor names in a checkpoint.
Pipeline stages have such a dict each, with their own weights and what belongs to them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from headrace.core.tree import PyTree
from headrace.engine.devices import host_device, replicated
from headrace.engine.loss_scale import LossScaling, init_loss_scale
from headrace.engine.multiprocess_arrays import place
from headrace.engine.optimizer import Update
from headrace.engine.precision import Precision, store_weights

State = dict[str, Any]


def init_ema(values: PyTree) -> PyTree:
    """Return the average at the start: a float32 copy, not an alias, because the state is donated."""
    return jax.tree.map(lambda value: jnp.array(value, jnp.float32, copy=True), values)


def ema_decay(step: jax.Array | int, decay: float) -> jax.Array:
    """Return min(decay, (1 + step) / (10 + step)): a warm-up, so that the initial weights are soon forgotten."""
    step = jnp.asarray(step).astype(jnp.float32)
    return jnp.minimum(jnp.float32(decay), (1.0 + step) / (10.0 + step))


def next_ema(ema: PyTree, values: PyTree, step: jax.Array | int, decay: float) -> PyTree:
    """Return the average after a step whose new weights and statistics are `values`."""
    kept = ema_decay(step, decay)
    return jax.tree.map(lambda old, new: kept * old + (1.0 - kept) * new.astype(jnp.float32), ema, values)


def make_state(
    optimizer: Update,
    precision: Precision,
    scaling: LossScaling,
    params: PyTree,
    stats: PyTree,
    *,
    ema: bool,
) -> State:
    """Return the state of step 0 for these initial weights (float32) and statistics."""
    state = {
        "params": store_weights(params, precision),
        "stats": stats,
        "opt": optimizer.init(params),
        "loss_scale": init_loss_scale(scaling),
        "step": jnp.zeros((), jnp.int32),
    }
    return state | ({"ema": init_ema({"params": params, "stats": stats})} if ema else {})


def state_from(
    optimizer: Update,
    precision: Precision,
    scaling: LossScaling,
    weights: tuple[PyTree, PyTree],
    *,
    ema: bool,
) -> State:
    """Return the state of step 0 in host memory for given (params, stats)."""
    # One jitted program: an eager op per tensor would compile one small program per shape (4.7 s for a ResNet-20).
    make = jax.jit(partial(make_state, optimizer, precision, scaling, ema=ema))
    # By the host: a GPU would compile its own program first, and send back more than it got.
    with jax.default_device(host_device()):
        return jax.device_get(make(*weights))


def put_state(state: State, mesh: Mesh) -> State:
    """Place a state in host memory on every device of the mesh."""
    # From NumPy copies: device_put of a JAX array may alias it, and the first donation would then delete the source.
    return place(jax.tree.map(np.array, state), replicated(mesh))


@jax.jit
def snapshot(state: State) -> State:
    """Copy a state on its devices, so that it outlives the call that the original is donated to."""
    return jax.tree.map(jnp.copy, state)


def evaluated_weights(state: State) -> dict[str, tuple[PyTree, PyTree]]:
    """Return the sets of weights to validate, each as (params, stats): `raw`, and `ema` when it is kept."""
    sets = {"raw": (state["params"], state["stats"])}
    if "ema" in state:
        sets["ema"] = (state["ema"]["params"], state["ema"]["stats"])
    return sets
