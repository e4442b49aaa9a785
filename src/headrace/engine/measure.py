"""Time every block of a network alone on a device, forward and backward: what cuts can be made by."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.model.context import Ctx, Draws
from headrace.model.network import Network

MIN_SECONDS = 0.05  # a block is run again until it has run so long: a clock's grain is far below
ROUNDS = 3  # of which the quickest counts: other work on the machine only adds time


def measure_blocks(network: Network, micro_batch_size: int, compute_dtype: Any, device: Any) -> dict[str, float]:
    """Return the seconds that a forward and a backward pass of each block takes on a micro batch."""
    params, stats = network.init(0)
    rng = np.random.default_rng(0)
    images = rng.standard_normal((micro_batch_size, *network.input_hwc), np.float32)
    x = jax.device_put(jnp.asarray(images, compute_dtype), device)
    samples = jnp.arange(micro_batch_size, dtype=jnp.int32)
    ctx = Ctx(train=True, compute_dtype=compute_dtype, draws=Draws(0, jnp.int32(0), samples))
    seconds = {}
    for number, name in enumerate(network.block_names):
        weights = jax.device_put(tuple({name: tree[name]} if name in tree else {} for tree in (params, stats)), device)

        def forward(params: Any, x: Any, stats: Any, number: int = number) -> tuple[Any, Any]:
            return network.apply_range(number, number + 1, params, stats, x, ctx)

        def both(params: Any, stats: Any, x: Any, forward: Any = forward) -> tuple[Any, Any]:
            y, back, _ = jax.vjp(lambda p, v: forward(p, v, stats), params, x, has_aux=True)
            return y, back(jax.tree.map(jnp.ones_like, y))

        program = jax.jit(both)
        x_next, _ = jax.block_until_ready(program(*weights, x))  # compiles
        seconds[name] = min(_seconds(program, (*weights, x)) for _ in range(ROUNDS))
        x = x_next
    return seconds


def _seconds(program: Any, arguments: tuple[Any, ...]) -> float:
    runs, begin = 0, time.perf_counter()
    while True:
        result = program(*arguments)
        runs += 1
        if runs % 4 == 0 or runs == 1:  # now and then: waiting for each run would time the host, too
            jax.block_until_ready(result)
            taken = time.perf_counter() - begin
            if taken > MIN_SECONDS:
                return taken / runs
