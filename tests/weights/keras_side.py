"""Run by a Python that has Keras: write a network's random weights in both formats, an input and the logits for it.

python keras_side.py ResNet50 FOLDER
"""

import os
import sys
from pathlib import Path

import numpy as np

os.environ.setdefault("KERAS_BACKEND", "jax")  # before the import; TensorFlow need not be there
import keras  # pyright: ignore[reportMissingImports]

name, folder = sys.argv[1], Path(sys.argv[2])
rng = np.random.default_rng(0)
plain = {"include_preprocessing": False} if name.startswith("EfficientNetV2") else {}
model = getattr(keras.applications, name)(weights=None, classifier_activation=None, **plain)
drawn = []
for variable in model.weights:
    shape, path = tuple(variable.shape), variable.path
    if "variance" in path or "gamma" in path:
        drawn.append(rng.uniform(0.5, 1.0, shape).astype("float32"))
    elif "kernel" in path:
        drawn.append((rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[:-1]))).astype("float32"))
    else:
        drawn.append((rng.normal(size=shape) * 0.05).astype(variable.dtype))
model.set_weights(drawn)
model.save_weights(folder / "it.weights.h5")
model.save(folder / "it.h5")
images = rng.normal(size=(2, 224, 224, 3)).astype("float32")
inputs, first = images, [layer for layer in model.layers if layer.name == "normalization"]
if first:  # EfficientNets scale and shift inside the network: undo it
    mean, variance = (np.asarray(first[0].get_weights()[k]) for k in (0, 1))
    inputs = 255 * (images * np.sqrt(variance) + mean)
np.savez(folder / "it.npz", images=images, logits=model.predict(inputs, verbose=0))
