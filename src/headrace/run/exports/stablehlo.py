"""The whole network as StableHLO, checked in JAX."""

from pathlib import Path

import jax
import jax.numpy as jnp

from headrace.core.errors import ConfigError, did_you_mean
from headrace.ops.tracing import portable
from headrace.rows.exports import PLATFORMS
from headrace.run.check_images import CheckImages
from headrace.run.exports.values import ExportOptions, Made
from headrace.run.exports.whole_network import (
    as_function,
    batches_of,
    centre_view_of,
    describe_input,
    tolerance_of,
)
from headrace.weights.onnx_file import compare_logits
from headrace.weights.weights import Weights


def make(weights: Weights, path: Path, options: ExportOptions) -> Made:
    """Return the file, for all the platforms at once."""
    unknown = [name for name in options.platforms if name not in (*PLATFORMS, "rocm")]
    if unknown:
        raise ConfigError(f"There is no platform {unknown[0]!r}.", remedy=did_you_mean(unknown[0], PLATFORMS))
    data = _lowered(weights, options, options.platforms)
    more = describe_input(weights, options) | {"platforms": list(options.platforms)}
    return Made(data=data, more=more, remark=f"for {', '.join(options.platforms)}; read it with jax.export.deserialize")


def _lowered(weights: Weights, options: ExportOptions, platforms: tuple[str, ...]) -> bytes:
    batch, *hw = jax.export.symbolic_shape("batch, height, width")
    height, width, channels = weights.network.input_hwc
    shape = (batch, *(hw if options.with_preprocessing else (height, width)), channels)
    images = jax.ShapeDtypeStruct(shape, jnp.uint8 if options.as_pixels else jnp.float32)
    function = as_function(weights, options.as_pixels, options.dtype, centre_view_of(weights, options))
    with portable():  # a convolution is lowered differently on each platform; this one's form would be slow elsewhere
        return bytes(jax.export.export(jax.jit(function), platforms=platforms)(images).serialize())


def check(file: Path, weights: Weights, options: ExportOptions, images: CheckImages) -> tuple[float, str]:
    """Run the file beside the network; where it cannot run on this machine, the same network lowered for it."""
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    data, where = file.read_bytes(), f"on {here}"
    if here not in options.platforms:
        data, where = _lowered(weights, options, (here,)), f"on {here}, the same network lowered for it,"
    batches, expected = batches_of(weights, options, images)
    call, worst = jax.export.deserialize(bytearray(data)).call, 0.0
    for batch, answer in zip(batches, expected, strict=True):
        logits = call(batch)["logits"]
        worst = max(
            worst, compare_logits(("The StableHLO", weights.network.name), logits, answer, tolerance_of(options))
        )
    return worst, where
