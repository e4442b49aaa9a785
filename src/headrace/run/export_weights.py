"""Exports of weights alone."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from headrace.core.tensor_file import write_safetensors
from headrace.run.check_images import CheckImages, network_input
from headrace.run.export_values import TOLERANCES, ExportOptions, Made
from headrace.weights.convert import export_names, load_into
from headrace.weights.onnx_file import compare_logits
from headrace.weights.torch_file import write_torch_file
from headrace.weights.weight_file import read_file
from headrace.weights.weights import Weights, flat_weights


def safetensors_file(weights: Weights, path: Path, options: ExportOptions) -> Made:
    arrays = _typed(flat_weights(*weights.raw), options.dtype)
    data = write_safetensors(arrays, weights.describe())
    return Made(data=data, more={"names": "headrace"}, remark=f"{len(arrays)} tensors")


def torch_names_file(weights: Weights, path: Path, options: ExportOptions) -> Made:
    dialect = weights.config.model.model_dialect
    scheme, found = export_names(weights.params, weights.stats, options.names, weights.step, dialect)
    arrays = _typed(found, options.dtype)
    as_torch = path.suffix in (".pth", ".pt")
    data = write_torch_file(arrays) if as_torch else write_safetensors(arrays, weights.describe())
    remark = f"{len(arrays)} tensors under the names of {scheme}"
    if dialect in ("reference", "keras") and scheme in ("torchvision", "timm"):
        remark += (
            f"; padding, epsilon and shortcuts are those of {dialect}: trained with --model-dialect {scheme}, a "
            "network loads there strictly and computes the same"
        )
    return Made(data=data, more={"names": scheme}, remark=remark)


def _typed(arrays: dict[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """Return the arrays with floating-point ones in this type."""
    host = {name: np.asarray(array) for name, array in arrays.items()}
    return {name: array.astype(dtype) if array.dtype.kind == "f" else array for name, array in host.items()}


def weights_difference(file: Path, weights: Weights, options: ExportOptions, images: CheckImages) -> tuple[float, str]:
    """Load the file into the network as --init-from would, every tensor of it, and compare what it computes."""
    loaded = load_into(weights.network, weights.raw, read_file(file), min_share=1.0)
    inputs = network_input(images.views(weights.form), weights.form)
    program = jax.jit(lambda params, stats, x: weights.network.apply(params, stats, x, weights.context())[0])
    found, expected = (program(each.params, each.stats, inputs) for each in (loaded, weights))
    return compare_logits(
        ("The file", weights.network.name), found, expected, TOLERANCES[options.dtype]
    ), "by loading it again"
