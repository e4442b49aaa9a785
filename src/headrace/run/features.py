"""Features of images: what the last layer of a network scores, to search, to group and to compare images by."""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from headrace.core.errors import ConfigError, DataError
from headrace.core.tree import flatten_named, unflatten_named
from headrace.data.augmentation.preprocess import preprocess
from headrace.model.network import Network, weights_like
from headrace.run.prediction import logits_of, with_flip
from headrace.weights.weights import Weights

SUFFIXES = (".npz", ".csv")
_AT_ONCE = 32


def without_head(weights: Weights) -> Weights:
    """Return the weights of the network without its last layer of weights: its outputs are features."""
    params, stats = (flatten_named(tree) for tree in weights.raw)
    head = weights.network.head(params)
    whole = weights.network.refined([head])
    end = whole.block_names.index(head)
    shape = whole.shapes()[end]
    if len(shape) != 1:
        raise ConfigError(
            f"{whole.name} has no features: its last layer, {head}, takes a map, {'x'.join(map(str, shape))}.",
            rule="Features are one row of numbers for each image.",
            remedy="Take a network that pools before its last layer, such as a ResNet.",
        )
    made = Network(name=whole.name, blocks=whole.blocks[:end], input_hwc=whole.input_hwc, num_classes=int(shape[0]))
    like = weights_like(made)
    trees = (unflatten_named(each, found) for each, found in zip(like, (params, stats), strict=True))
    params, stats = trees
    return with_flip(replace(weights, network=made, params=params, stats=stats, ema=None), False)


def features_of_files(weights: Weights, files: Sequence[Path], batch_size: int = _AT_ONCE) -> np.ndarray:
    """Return the features [N, features] of image files, float32, in order; one that cannot be read is refused."""
    return logits_of(without_head(weights), files, batch_size)


def features_of_arrays(weights: Weights, images: np.ndarray) -> np.ndarray:
    """Return the features of an array of images [N, H, W, C], as the network was trained on them."""
    chosen = without_head(weights)
    if images.shape[1:] != chosen.network.input_hwc:
        found, wanted = ("x".join(map(str, each)) for each in (images.shape[1:], chosen.network.input_hwc))
        raise DataError(f"The images are {found}, the network takes {wanted}.")
    form, context = chosen.form.preprocess, chosen.context()

    @jax.jit
    def apply(batch: jax.Array) -> jax.Array:
        inputs = preprocess(batch, None, 0, form, train=False)
        return chosen.network.apply(chosen.params, chosen.stats, inputs, context)[0]

    size = min(_AT_ONCE, len(images))
    rows = []
    for start in range(0, len(images), size):
        part = images[start : start + size]
        # Always of one size: the last batch is padded, and needs no second program.
        padded = np.concatenate([part, np.zeros((size - len(part), *part.shape[1:]), part.dtype)])
        rows.append(np.asarray(apply(padded))[: len(part)])
    return np.concatenate(rows)


def write_features(file: Path, names: Sequence[str], features: np.ndarray) -> bytes:
    """Return the bytes of a file of features: arrays `files` and `features` (.npz), or a row for each image (.csv)."""
    if file.suffix == ".npz":
        out = io.BytesIO()
        np.savez(out, files=np.array(names), features=features)
        return out.getvalue()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", *(f"feature_{number}" for number in range(features.shape[1]))])
    for name, row in zip(names, features.tolist(), strict=True):
        writer.writerow([name, *(f"{value:.9g}" for value in row)])
    return text.getvalue().encode()
