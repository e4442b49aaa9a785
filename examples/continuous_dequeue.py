"""Watch a training loop from outside: a thread reads each loss while the loop is still running on the device.

    python examples/continuous_dequeue.py

prints 100 losses as they arrive, and how many of them arrived before the loop ended:

    step 0 loss 10.7...
    step 1 loss ...
    ...
    step 99 loss 0.0...
    100 losses, ... of them while the loop ran
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax

from headrace import Infeed, Outfeed, loops

NUM_STEPS = 100
rng = np.random.default_rng(0)
true_weights = np.linspace(-1, 1, 32).astype(np.float32)


def dataset():
    """Yield batches of a linear problem with a little noise."""
    while True:
        x = rng.normal(size=(64, 32)).astype(np.float32)
        yield {"x": x, "y": x @ true_weights + 0.01 * rng.normal(size=64).astype(np.float32)}


outfeed = Outfeed()
optimizer = optax.sgd(0.05)
ended = threading.Event()
seen_early = []


def body(weights, state, x, y):
    """Train one step and enqueue its loss."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.square(x @ w - y)))(weights)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(weights, updates), state, outfeed.enqueue(loss)


def watch():
    """Poll the outfeed until all losses were seen."""
    seen = 0
    outfeed.started.wait()
    while seen < NUM_STEPS:
        for loss in outfeed.dequeue():  # what has arrived since the last time, possibly nothing
            print(f"step {seen} loss {loss:.4f}", flush=True)
            seen += 1
            if not ended.is_set():
                seen_early.append(loss)
        ended.wait(0.001)  # leave the CPU to the loop


watcher = threading.Thread(target=watch)
watcher.start()
start = np.zeros(32, np.float32)
loops.repeat(NUM_STEPS, body, [start, optimizer.init(start)], Infeed(dataset, prefetch_depth=4, block_size=10))
ended.set()
watcher.join()
print(f"{NUM_STEPS} losses, {len(seen_early)} of them while the loop ran")
