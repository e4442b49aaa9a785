"""Grad-CAM: where in an image the last blocks found evidence for a class."""

import io
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from headrace.core.errors import ConfigError, DataError, did_you_mean
from headrace.data.augmentation.preprocess import preprocess
from headrace.model.network import Network
from headrace.rows.row import Task
from headrace.rows.tasks import CLASSIFICATION
from headrace.run.prediction import order_of, read_image
from headrace.weights.weights import Weights

_SIDE = 320  # pixels of each image in the drawing, at least
_GAP = 12
_MAPS, _BEST = 2, 5
_COLD, _HOT = np.array([0, 60, 140], np.float32), np.array([255, 214, 64], np.float32)  # also for colour-blind readers


@dataclass(frozen=True, kw_only=True, repr=False)
class Explanation:
    """The class explained with its probability, the best classes, and a map [h, w] from 0 to 1 for each block."""

    pixels: np.ndarray  # uint8 [H, W, C], as the network gets them
    name: str
    probability: float
    best: tuple[tuple[str, float], ...]
    maps: dict[str, np.ndarray]
    task: Task = CLASSIFICATION

    def __repr__(self) -> str:
        return f"Explanation({self.name} {self.task.text(self.probability)}, {', '.join(self.maps)})"

    def drawn(self) -> Image.Image:
        """Return one picture of it all, for `save` or `show`."""
        return draw_explanation(self)

    def _repr_png_(self) -> bytes:
        """Return the picture for a notebook."""
        out = io.BytesIO()
        self.drawn().save(out, "PNG")
        return out.getvalue()


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


class Explainer:
    """Explains predictions of one model; its programs are compiled for the first image."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.blocks = explained_blocks(weights.network)
        self._logits = jax.jit(lambda x: weights.network.apply(weights.params, weights.stats, x, weights.context())[0])
        self._features = {block: jax.jit(partial(_features_and_slopes, weights, block)) for block in self.blocks}

    def map(self, images: np.ndarray, label: int, block: int) -> np.ndarray:
        """Return the map [h, w] of a block for one class, of one preprocessed image [1, H, W, C], not scaled."""
        features, slopes = (np.asarray(part, np.float64) for part in self._features[block](images, label))
        return np.maximum((features * slopes.mean((0, 1))).sum(-1), 0)

    def explain(self, file: Path, class_name: str | None = None) -> Explanation:
        """Explain why an image is of a class, by default of the one that is predicted."""
        self._check_class(class_name)
        pixels = np.zeros(self.weights.network.input_hwc, np.uint8)
        if problem := read_image(self.weights.form, file, pixels):
            raise DataError(f"Cannot read {file}: {problem}.")
        return self.explain_pixels(pixels, class_name)

    def _check_class(self, class_name: str | None) -> None:
        names = self.weights.class_names
        if class_name is not None and class_name not in names:
            raise ConfigError(f"There is no class {class_name}.", remedy=did_you_mean(class_name, names))

    def explain_pixels(self, image: np.ndarray, class_name: str | None = None) -> Explanation:
        """Explain an image as the network gets it, bytes [H, W, C]."""
        self._check_class(class_name)
        weights, names, pixels = self.weights, self.weights.class_names, image[None]
        images = np.asarray(preprocess(pixels, None, 0, weights.form.preprocess, train=False))
        shares = weights.answers(np.asarray(self._logits(images)))[0]
        order = order_of(shares, weights.task)[:_BEST]
        label = names.index(class_name) if class_name is not None else int(order[0])
        maps = {}
        for block in self.blocks:
            found = self.map(images, label, block)
            maps[weights.network.block_names[block]] = found / (found.max() or 1.0)
        return Explanation(
            pixels=pixels[0],
            name=names[label],
            probability=float(shares[label]),
            best=tuple((names[k], float(shares[k])) for k in order),
            maps=maps,
            task=weights.task,
        )


def _features_and_slopes(
    weights: Weights, block: int, images: jax.Array, label: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the features [h, w, c] of a block, and by how much the logit of a class grows with each."""
    network, ctx = weights.network, weights.context()

    def logit(features: jax.Array) -> jax.Array:
        rest = network.apply_range(block + 1, len(network.blocks), weights.params, weights.stats, features, ctx)
        return rest[0][0, label]

    features, _ = network.apply_range(0, block + 1, weights.params, weights.stats, images, ctx)
    return features[0], jax.grad(logit)(features)[0]


def explain(weights: Weights, file: Path, class_name: str | None = None) -> Explanation:
    """Explain why an image is of a class, by default of the one that is predicted."""
    return Explainer(weights).explain(file, class_name)


def overlays(found: Explanation, side: int) -> dict[str, Image.Image]:
    """Return the image as the network gets it, and under the map of each block, that many pixels wide."""
    levels = found.pixels if found.pixels.shape[-1] == 3 else np.repeat(found.pixels[..., :1], 3, -1)
    size = side, round(side * levels.shape[0] / levels.shape[1])
    original = Image.fromarray(levels).resize(size, Image.Resampling.BICUBIC)
    grey = np.asarray(original.convert("L"), np.float32)[..., None]
    drawn = {"image": original}
    for name, heat in found.maps.items():
        scaled = Image.fromarray(heat.astype(np.float32)).resize(size, Image.Resampling.BICUBIC)
        share = np.clip(np.asarray(scaled), 0, 1)[..., None]
        mixed = grey * (0.65 - 0.25 * share) + _color(share) * (0.35 + 0.25 * share)
        drawn[name] = Image.fromarray(np.rint(mixed).astype(np.uint8))
    return drawn


def _color(share: np.ndarray) -> np.ndarray:
    return _COLD + (_HOT - _COLD) * share


def color_text(share: float) -> str:
    """Return the color of a place with that share of the most evidence, as web pages write it."""
    return "#" + "".join(f"{round(float(level)):02x}" for level in _color(np.array(share)))


def draw_explanation(found: Explanation) -> Image.Image:
    """Return one picture of it all: the class, the image, the same under the map of each block, and the scale."""
    drawn = overlays(found, max(_SIDE, found.pixels.shape[1]))
    width, height = drawn["image"].size
    # A row of text above and below the images, in their own size.
    line = round(width / 16)
    font, small = ImageFont.load_default(0.7 * line), ImageFont.load_default(0.55 * line)
    sheet = Image.new("RGB", (len(drawn) * (width + _GAP) - _GAP, height + 3 * line), "#ffffff")
    ink = ImageDraw.Draw(sheet)
    best = ", ".join(f"{name} {found.task.text(share)}" for name, share in found.best if name != found.name)
    ink.text((0, 0), f"{found.name} {found.task.text(found.probability)}", "#1c2430", font)
    beside = ink.textlength(f"{found.name} {found.task.text(found.probability)}  ", font)
    ink.text((beside, 0.15 * line), best, "#5b6674", small)
    for place, (name, image) in enumerate(drawn.items()):
        left = place * (width + _GAP)
        sheet.paste(image, (left, line))
        title = "as the network gets it" if name == "image" else f"evidence for {found.name} in {name}"
        ink.text((left, line + height + 0.1 * line), title, "#5b6674", small)
    scale = _color(np.linspace(0, 1, width // 2)[None, :, None]).repeat(line // 2, 0)
    bottom = height + 2 * line + line // 3
    sheet.paste(Image.fromarray(np.rint(scale).astype(np.uint8)), (width + _GAP, bottom))
    ink.text((width + _GAP + width // 2 + _GAP, bottom - 0.1 * line), "none to most", "#5b6674", small)
    return sheet
