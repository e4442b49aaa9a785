"""Exports of whole networks: ONNX and StableHLO."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.core.errors import ConfigError, did_you_mean
from headrace.data.augmentation.crop_resize import CentreView, centre_view
from headrace.data.augmentation.preprocess import preprocess
from headrace.ops.tracing import portable
from headrace.run.check_images import CheckImages, network_input
from headrace.run.export_values import PLATFORMS, RESIZED_TOLERANCE, TOLERANCES, ExportOptions, Made, centre_view_of
from headrace.weights.onnx_file import OnnxForm, check_onnx, compare_logits, write_onnx
from headrace.weights.weights import Weights


def onnx_file(weights: Weights, path: Path, options: ExportOptions) -> Made:
    more = _input_form(weights, options)
    form = OnnxForm(dtype=options.dtype, view=centre_view_of(weights, options))
    along = weights.describe() | {"dtype": options.dtype} | more
    data = write_onnx(weights.network, weights.raw, weights.form.preprocess, options.as_pixels, along, form)
    return Made(data=data, more=more)


def onnx_difference(file: Path, weights: Weights, options: ExportOptions, images: CheckImages) -> tuple[float, str]:
    batches, expected = _batches(weights, options, images)
    answers = iter(expected)
    difference = check_onnx(
        file.read_bytes(), weights.network, options.as_pixels, lambda _: next(answers), batches, _tolerance(options)
    )
    return difference, "with onnxruntime"


def stablehlo_file(weights: Weights, path: Path, options: ExportOptions) -> Made:
    unknown = [name for name in options.platforms if name not in (*PLATFORMS, "rocm")]
    if unknown:
        raise ConfigError(f"There is no platform {unknown[0]!r}.", remedy=did_you_mean(unknown[0], PLATFORMS))
    data = _lowered(weights, options, options.platforms)
    more = _input_form(weights, options) | {"platforms": list(options.platforms)}
    return Made(data=data, more=more, remark=f"for {', '.join(options.platforms)}; read it with jax.export.deserialize")


def _lowered(weights: Weights, options: ExportOptions, platforms: tuple[str, ...]) -> bytes:
    batch, *hw = jax.export.symbolic_shape("batch, height, width")
    height, width, channels = weights.network.input_hwc
    shape = (batch, *(hw if options.with_preprocessing else (height, width)), channels)
    images = jax.ShapeDtypeStruct(shape, jnp.uint8 if options.as_pixels else jnp.float32)
    function = as_function(weights, options.as_pixels, options.dtype, centre_view_of(weights, options))
    with portable():  # a convolution is lowered differently on each platform; this one's form would be slow elsewhere
        return bytes(jax.export.export(jax.jit(function), platforms=platforms)(images).serialize())


def stablehlo_difference(
    file: Path, weights: Weights, options: ExportOptions, images: CheckImages
) -> tuple[float, str]:
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    data, where = file.read_bytes(), f"on {here}"
    if here not in options.platforms:  # the file cannot run on this machine
        data, where = _lowered(weights, options, (here,)), f"on {here}, the same network lowered for it,"
    batches, expected = _batches(weights, options, images)
    call, worst = jax.export.deserialize(bytearray(data)).call, 0.0
    for batch, answer in zip(batches, expected, strict=True):
        worst = max(
            worst,
            compare_logits(("The StableHLO", weights.network.name), call(batch)["logits"], answer, _tolerance(options)),
        )
    return worst, where


def _batches(
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


def _tolerance(options: ExportOptions) -> float:
    exact = TOLERANCES[options.dtype]
    return max(exact, RESIZED_TOLERANCE) if options.with_preprocessing else exact


def _input_form(weights: Weights, options: ExportOptions) -> dict[str, Any]:
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
        return {"logits": logits, "probabilities": jax.nn.softmax(logits)}

    return apply
