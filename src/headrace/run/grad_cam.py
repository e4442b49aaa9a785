"""Grad-CAM: where in an image the last blocks found evidence for a class."""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from headrace.core.errors import ConfigError, DataError, did_you_mean
from headrace.data.augmentation.preprocess import preprocess
from headrace.model.network import Network
from headrace.run.prediction import read_image
from headrace.run.trained_model import TrainedModel

_SIDE = 320  # pixels of each image in the drawing, at least
_GAP = 12
_MAPS = 2
_COLD, _HOT = np.array([0, 60, 140], np.float32), np.array([255, 214, 64], np.float32)  # also for colour-blind readers


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The class explained with its probability, the best classes, and a map [h, w] from 0 to 1 for each block."""

    pixels: np.ndarray  # uint8 [H, W, C], as the network gets them
    name: str
    probability: float
    best: tuple[tuple[str, float], ...]
    maps: dict[str, np.ndarray]


def explained_blocks(network: Network) -> tuple[int, ...]:
    """Return the last block of each of the last sizes of feature maps, as numbers of blocks, the last one first."""
    last: dict[tuple[int, int], int] = {}
    for number, shape in enumerate(network.shapes()[1:]):
        if len(shape) == 3 and not isinstance(shape[0], tuple) and shape[0] * shape[1] > 1:
            last[shape[0], shape[1]] = number
    found = tuple(sorted(last.values(), reverse=True)[:_MAPS])
    if not found:
        raise ConfigError(f"{network.name} has no block whose output is a map.", rule="Grad-CAM needs feature maps.")
    return found


def grad_cam(model: TrainedModel, images: np.ndarray, label: int, block: int) -> np.ndarray:
    """Return the map [h, w] of a block for one class, of one preprocessed image [1, H, W, C], not scaled."""
    network, ctx = model.network, model.context()

    def logit(features: jax.Array) -> jax.Array:
        rest = network.apply_range(block + 1, len(network.blocks), model.params, model.stats, features, ctx)
        return rest[0][0, label]

    @jax.jit
    def both(images: jax.Array) -> tuple[jax.Array, jax.Array]:
        features, _ = network.apply_range(0, block + 1, model.params, model.stats, images, ctx)
        return features[0], jax.grad(logit)(features)[0]

    features, slopes = (np.asarray(part, np.float64) for part in both(jnp.asarray(images)))
    return np.maximum((features * slopes.mean((0, 1))).sum(-1), 0)


def explain(model: TrainedModel, file: Path, class_name: str | None = None) -> Explanation:
    """Explain why an image is of a class, by default of the one that is predicted."""
    names = model.class_names
    if class_name is not None and class_name not in names:
        raise ConfigError(f"There is no class {class_name}.", remedy=did_you_mean(class_name, names))
    pixels = np.zeros((1, *model.network.input_hwc), np.uint8)
    if problem := read_image(model, file, pixels[0]):
        raise DataError(f"Cannot read {file}: {problem}.")
    images = np.asarray(preprocess(pixels, None, 0, model.preprocess, train=False))
    logits = jax.jit(lambda x: model.network.apply(model.params, model.stats, x, model.context())[0])(images)
    shares = np.asarray(jax.nn.softmax(logits))[0]
    label = names.index(class_name) if class_name is not None else int(shares.argmax())
    order = np.argsort(-shares, kind="stable")[:5]
    maps = {}
    for block in explained_blocks(model.network):
        found = grad_cam(model, images, label, block)
        maps[model.network.block_names[block]] = found / (found.max() or 1.0)
    return Explanation(
        pixels=pixels[0],
        name=names[label],
        probability=float(shares[label]),
        best=tuple((names[k], float(shares[k])) for k in order),
        maps=maps,
    )


def draw_explanation(found: Explanation) -> Image.Image:
    """Return the image as the network gets it, and beside it the same under the map of each block."""
    levels = found.pixels if found.pixels.shape[-1] == 3 else np.repeat(found.pixels[..., :1], 3, -1)
    side = max(_SIDE, levels.shape[1])
    size = side, round(side * levels.shape[0] / levels.shape[1])
    original = Image.fromarray(levels).resize(size, Image.Resampling.BICUBIC)
    grey = np.asarray(original.convert("L"), np.float32)[..., None]
    sheet = Image.new("RGB", ((len(found.maps) + 1) * (side + _GAP) - _GAP, size[1]), "#ffffff")
    sheet.paste(original, (0, 0))
    for place, heat in enumerate(found.maps.values(), start=1):
        scaled = Image.fromarray(heat.astype(np.float32)).resize(size, Image.Resampling.BICUBIC)
        share = np.clip(np.asarray(scaled), 0, 1)[..., None]
        color = _COLD + (_HOT - _COLD) * share
        mixed = grey * (0.65 - 0.25 * share) + color * (0.35 + 0.25 * share)
        sheet.paste(Image.fromarray(np.rint(mixed).astype(np.uint8)), (place * (side + _GAP), 0))
    return sheet
