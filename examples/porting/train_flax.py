"""Step 1, before: a Flax network trained on one device with a loop of one's own.

python examples/porting/train_flax.py
"""

import time

import cifar10
import jax
import numpy as np
import optax
from linen_model import EfficientNet

args = cifar10.options(__doc__).parse_args()
images, labels, test_images, test_labels = cifar10.load(args)
images, test_images = (np.asarray(part / 255, np.float32) for part in (images, test_images))

model = EfficientNet(num_classes=10)
variables = jax.jit(model.init, static_argnames="train")(jax.random.key(0, impl="rbg"), images[:1], train=False)
params, stats = variables["params"], variables["batch_stats"]
optimizer = optax.sgd(0.1, momentum=0.9)
opt_state = optimizer.init(params)


@jax.jit
def train_step(params, stats, opt_state, x, y, key):
    def loss_of(params):
        logits, changed = model.apply(
            {"params": params, "batch_stats": stats}, x, train=True, mutable=["batch_stats"], rngs={"dropout": key}
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), changed["batch_stats"]

    (loss, stats_after), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), stats_after, opt_state, loss


@jax.jit
def predict(params, stats, x):
    return model.apply({"params": params, "batch_stats": stats}, x, train=False)


rng, steps_per_epoch = np.random.default_rng(0), len(images) // args.batch
loss = np.inf  # of the last step
for epoch in range(args.epochs):
    start, order = time.perf_counter(), rng.permutation(len(images))
    for step in range(steps_per_epoch):
        batch = order[step * args.batch : (step + 1) * args.batch]
        key = jax.random.key(epoch * steps_per_epoch + step, impl="rbg")
        params, stats, opt_state, loss = train_step(params, stats, opt_state, images[batch], labels[batch], key)
    print(f"epoch {epoch + 1}: loss {loss:.3f}, {time.perf_counter() - start:.1f} s")

correct = 0
for first in range(0, len(test_images), args.batch):  # the last batch is shorter, and compiles again
    logits = predict(params, stats, test_images[first : first + args.batch])
    correct += int((logits.argmax(1) == test_labels[first : first + args.batch]).sum())
print(f"{len(test_images)} images, top-1 {correct / len(test_images):.3f}")
