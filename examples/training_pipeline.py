"""Train a small CNN on handwritten digits as a pipeline of four stages, with plain JAX functions and optax.

    python examples/training_pipeline.py

prints the schedule, the loss and accuracy after every 15 steps, and the accuracy on the validation images, for which an
inference pipeline of the same stages is used (about ten seconds on two cores):

    Grouped
    dev 0 |F0|F1|F2|F3|F4|F5|F6|B0|F7|B1|. |B2|. |B3|. |B4|. |B5|. |B6|. |B7|
    ...
    run 1: loss ..., top-1 ... %
    ...
    run 4: loss 0..., top-1 9... %
    validation top-1 9... %
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import headrace
from headrace import Infeed, OptimizerOutput, Outfeed, Stage

jax.config.update("jax_num_cpu_devices", 4)  # virtual devices, for a machine without four accelerators
MICRO_BATCH, NUM_MICROS, STEPS_PER_RUN, NUM_RUNS = 8, 8, 15, 4
RATE = 3e-3


def conv(x, kernel, stride):
    """Convolve images NHWC with a kernel HWIO."""
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


# Each stage takes what the previous one returns. Labels and learning rate are needed at the end, so every stage passes
# them on.
def first(params, rate, images, labels):
    """Scale the bytes to -1 ... 1 and convolve them."""
    return jax.nn.relu(conv(images.astype(jnp.float32) / 127.5 - 1, params["conv"], 1)), labels, rate


def middle(params, x, labels, rate):
    """Halve the picture."""
    return jax.nn.relu(conv(x, params["conv"], 2)), labels, rate


def last(params, x, labels, rate):
    """Classify; return the loss, how many are right, and the rate for the optimizer."""
    scores = x.reshape(len(x), -1) @ params["dense"]
    loss = optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()
    return loss, jnp.sum(scores.argmax(-1) == labels), rate


def optimizer_function(loss, _num_right, rate):
    """Say how to train: the optimizer is made from the rate that came through the stages.

    Adam treats every weight by itself, so each stage may update its own (apart).
    """
    return OptimizerOutput(optax.adam, loss, arguments=(rate,), apart=True)


def weights(key, shape):
    """Return random weights for a convolution or a product."""
    return np.asarray(jax.random.normal(key, shape)) * np.sqrt(2 / np.prod(shape[:-1]), dtype=np.float32)


digits = headrace.open_dataset(headrace.config_from({"dataset": "digits"}).data, seed=0)
height, width, channels = digits.train.image_hwc
keys = jax.random.split(jax.random.key(0), 4)
stages = [
    Stage(first, {"conv": weights(keys[0], (3, 3, channels, 8))}),
    Stage(middle, {"conv": weights(keys[1], (3, 3, 8, 16))}),
    Stage(middle, {"conv": weights(keys[2], (3, 3, 16, 32))}),
    Stage(last, {"dense": weights(keys[3], (height // 4 * width // 4 * 32, 10))}),
]
outfeed = Outfeed()
pipe = headrace.pipeline(
    stages,
    NUM_MICROS,
    optimizer_function=optimizer_function,
    inputs=[RATE],
    infeed=Infeed(digits.train, batch_size=MICRO_BATCH, seed=0, repeat=True, prefetch_depth=8),
    outfeed=outfeed,
    outfeed_mask=[False, False, True],  # the learning rate is not sent out
    reduction_method="MEAN",
    repeat_count=STEPS_PER_RUN,
)
print(pipe.draw())

state = pipe.init()
for run in range(NUM_RUNS):
    state = pipe(state, inputs=[RATE * (1 - run / NUM_RUNS)])
    losses, num_right = outfeed.dequeue()
    print(f"run {run + 1}: loss {losses.mean():.4f}, top-1 {100 * num_right.mean() / MICRO_BATCH:.1f} %")

results = Outfeed()
trained = [Stage(stage.apply, params) for stage, params in zip(stages, state.params, strict=True)]
num_batches = len(digits.validation) // MICRO_BATCH
check = headrace.pipeline(
    trained, num_batches, inputs=[0.0], infeed=Infeed(digits.validation, batch_size=MICRO_BATCH), outfeed=results
)
check(check.init())
print(f"validation top-1 {100 * results.dequeue()[1].sum() / (num_batches * MICRO_BATCH):.2f} %")
