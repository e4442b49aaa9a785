"""A pipeline with two concurrent functions, compared with the same model as a sequence of stages.

    python examples/concurrent_pipeline.py

Stage 1 has two functions, 1a on device 1 and 1b on device 2. Both take the same arguments, and stage 2 takes the
outputs of 1a followed by those of 1b. The shorter pipeline stores fewer micro batches and takes less time:

    Interleaved
    dev 0 |0F0 |...
    dev 1 |.   |1aF0|...
    dev 2 |.   |1bF0|...
    dev 3 |.   |...
    ...
    Interleaved
    dev 0 |0F0|...
    ...
    concurrent: 34 ticks, 13 micro batches stored at most; serial: 36 ticks, 15
    largest difference between the weights: 0.0e+00
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from headrace import Infeed, OptimizerOutput, Outfeed, Stage, pipeline

NUM_MICROS = 8
jax.config.update("jax_num_cpu_devices", 4)  # virtual devices, for a machine without four accelerators
rng = np.random.default_rng(0)


def weights(*shape):
    """Return random weights."""
    return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


def stage0(w, x, y):
    """Read the input; the target is needed at the end."""
    return jnp.tanh(x @ w), y


def stage1a(w, h, y):
    """Transform the hidden values in one way."""
    return jnp.sin(h @ w), y


def stage1b(w, h, y):
    """Transform them in another way."""
    return jnp.tanh(h @ w)


def stage2(w, a, y, b):
    """Join both views."""
    return jnp.tanh(jnp.concatenate([a, b], -1) @ w), y


def stage3(w, h, y):
    """Compare with the target."""
    return jnp.mean(jnp.square(h @ w - y))


def serial1a(w, h, y):
    """Do what 1a does, and pass on what 1b needs."""
    return *stage1a(w, h, y), h


def serial1b(w, a, y, h):
    """Do what 1b does, after 1a."""
    return a, y, stage1b(w, h, y)


def train(stages, device_mapping):
    """Train five steps; return the pipeline and its weights."""
    pipe = pipeline(
        stages,
        NUM_MICROS,
        optimizer_function=lambda loss: OptimizerOutput(optax.sgd(0.05), loss, apart=True),
        device_mapping=device_mapping,
        pipeline_schedule="Interleaved",
        infeed=Infeed(data, repeat=True),
        outfeed=Outfeed(),
        repeat_count=5,
    )
    print(pipe.draw())
    return pipe, jax.tree.leaves(pipe(pipe.init()).params)


data = [(weights(16, 8), weights(16, 2)) for _ in range(NUM_MICROS)]
w0, w1a, w1b, w2, w3 = weights(8, 32), weights(32, 24), weights(32, 24), weights(48, 16), weights(16, 2)

short, found = train(
    [Stage(stage0, w0), [Stage(stage1a, w1a), Stage(stage1b, w1b)], Stage(stage2, w2), Stage(stage3, w3)],
    device_mapping=[0, [1, 2], 2, 3],
)
long, wanted = train(
    [Stage(stage0, w0), Stage(serial1a, w1a), Stage(serial1b, w1b), Stage(stage2, w2), Stage(stage3, w3)],
    device_mapping=[0, 1, 2, 2, 3],
)

stored = [sum(pipe.peaks.values()) for pipe in (short, long)]
print(
    f"concurrent: {short.table.num_ticks} ticks, {stored[0]} micro batches stored at most; "
    f"serial: {long.table.num_ticks} ticks, {stored[1]}"
)
difference = max(np.max(np.abs(np.asarray(a) - np.asarray(b))) for a, b in zip(found, wanted, strict=True))
print(f"largest difference between the weights: {difference:.1e}")
