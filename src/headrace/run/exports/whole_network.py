"""What exports of whole networks share: the network as a function, its input, and batches to compare it on."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.data.augmentation.crop_resize import CentreView, centre_view
from headrace.data.augmentation.preprocess import preprocess
from headrace.engine.objective import answers
from headrace.run.check_images import CheckImages, network_input
from headrace.run.exports.values import RESIZED_TOLERANCE, TOLERANCES, ExportOptions
from headrace.weights.weights import Weights


def batches_of(
    weights: Weights, options: ExportOptions, images: CheckImages
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return batches to run an exported network on, of more than one batch size, and the network's logits for each."""
    inputs = network_input(images.views(weights.form), weights.form)
    logits = np.asarray(jax.jit(as_function(weights, False))(inputs)["logits"])
    if not options.with_preprocessing:
        batch = images.views(weights.form) if options.as_pixels else inputs
        return [batch[:1], batch], [logits[:1], logits]
    each = [image[None] for image in images.images]
    return [*each, np.repeat(each[0], 2, 0)], [*(row[None] for row in logits), np.repeat(logits[:1], 2, 0)]


def tolerance_of(options: ExportOptions) -> float:
    """Return by how much logits may differ, as a share of the largest one."""
    exact = TOLERANCES[options.dtype]
    return max(exact, RESIZED_TOLERANCE) if options.with_preprocessing else exact


def describe_input(weights: Weights, options: ExportOptions) -> dict[str, Any]:
    """Return what the description of the file says about its input."""
    height, width, channels = weights.network.input_hwc
    sides: Sequence[int | str] = (height, width)
    form = "uint8 pixels, 0 to 255, resized and cropped; normalised inside"
    if options.with_preprocessing:
        sides = ("height", "width")
        form = "uint8 pixels, 0 to 255, of images of any size (one in a batch); resized, cropped and normalised inside"
    elif not options.as_pixels:
        form = "float32, resized, cropped and normalised"
    return {"input": {"name": "images", "shape": ["batch", *sides, channels], "what": form}}


def as_function(
    weights: Weights, as_pixels: bool, dtype: str = "float32", view: CentreView | None = None
) -> Callable[[Any], dict[str, Any]]:
    """Return the network as a function of pixels (0 to 255, normalised inside) or of normalised numbers.

    With a view, the function takes pixels of any size, and resizes and crops them.
    """
    params = weights.params
    if dtype != "float32":
        params = jax.tree.map(lambda array: np.asarray(array).astype(dtype), params)

    def apply(images: Any) -> dict[str, Any]:
        images = centre_view(images, view) if view is not None else images
        inputs = preprocess(images, None, 0, weights.form.preprocess, train=False) if as_pixels else images
        logits, _ = weights.network.apply(params, weights.stats, inputs, weights.context(jnp.dtype(dtype)))
        return {"logits": logits, weights.task.answers: answers(logits, weights.task, weights.scale)}

    return apply


def centre_view_of(weights: Weights, options: ExportOptions) -> CentreView | None:
    """Return the view that is part of the exported network, None where it takes images of its own size."""
    if not options.with_preprocessing:
        return None
    form = weights.form
    return CentreView(
        size=form.image_hwc[0],
        shorter_side=form.resized_side,
        antialias=form.antialias,
        bicubic=form.interpolation == "bicubic",
    )
