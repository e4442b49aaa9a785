"""Exports of weights alone."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from headrace.core.tensor_file import write_safetensors
from headrace.run.check_images import CheckImages, network_input
from headrace.run.export_values import TOLERANCES, ExportOptions, Made
from headrace.run.trained_model import TrainedModel
from headrace.weights.convert import export_names, flat_weights, load_into
from headrace.weights.onnx_file import compare_logits
from headrace.weights.torch_file import write_torch_file
from headrace.weights.weight_file import read_file


def safetensors_file(model: TrainedModel, path: Path, options: ExportOptions) -> Made:
    arrays = _typed(flat_weights(model.params, model.stats), options.dtype)
    data = write_safetensors(arrays, model.describe())
    return Made(data=data, more={"names": "headrace"}, remark=f"{len(arrays)} tensors")


def torch_names_file(model: TrainedModel, path: Path, options: ExportOptions) -> Made:
    dialect = model.config.model.model_dialect
    scheme, found = export_names(model.params, model.stats, options.names, model.step, dialect)
    arrays = _typed(found, options.dtype)
    as_torch = path.suffix in (".pth", ".pt")
    data = write_torch_file(arrays) if as_torch else write_safetensors(arrays, model.describe())
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


def weights_difference(
    file: Path, model: TrainedModel, options: ExportOptions, images: CheckImages
) -> tuple[float, str]:
    """Load the file into the network as --init-from would, every tensor of it, and compare what it computes."""
    loaded = load_into(model.network, (model.params, model.stats), read_file(file), min_share=1.0)
    inputs = network_input(images.views(model), model)
    program = jax.jit(lambda params, stats, x: model.network.apply(params, stats, x, model.context())[0])
    found, expected = (program(each.params, each.stats, inputs) for each in (loaded, model))
    return compare_logits(
        ("The file", model.network.name), found, expected, TOLERANCES[options.dtype]
    ), "by loading it again"
