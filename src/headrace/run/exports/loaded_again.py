"""Exports of weights alone are checked by loading them again."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from headrace.run.check_images import CheckImages, network_input
from headrace.run.exports.values import TOLERANCES, ExportOptions
from headrace.weights.convert import load_into
from headrace.weights.onnx_file import compare_logits
from headrace.weights.weight_file import read_file
from headrace.weights.weights import Weights


def in_type(arrays: dict[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """Return the arrays with floating-point ones in this type."""
    host = {name: np.asarray(array) for name, array in arrays.items()}
    return {name: array.astype(dtype) if array.dtype.kind == "f" else array for name, array in host.items()}


def weights_difference(file: Path, weights: Weights, options: ExportOptions, images: CheckImages) -> tuple[float, str]:
    """Load the file into the network as --init-from would, every tensor of it, and compare what it computes."""
    loaded = load_into(weights.network, weights.raw, read_file(file), min_share=1.0)
    inputs = network_input(images.views(weights.form), weights.form)
    program = jax.jit(lambda params, stats, x: weights.network.apply(params, stats, x, weights.context())[0])
    again, expected = (program(each.params, each.stats, inputs) for each in (loaded, weights))
    return compare_logits(
        ("The file", weights.network.name), again, expected, TOLERANCES[options.dtype]
    ), "by loading it again"
