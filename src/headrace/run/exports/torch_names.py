"""Weights under the names of PyTorch's libraries, as a file of torch or as safetensors."""

from pathlib import Path

from headrace.core.tensor_file import write_safetensors
from headrace.run.exports.loaded_again import in_type
from headrace.run.exports.loaded_again import weights_difference as check
from headrace.run.exports.values import ExportOptions, Made
from headrace.weights.convert import export_names
from headrace.weights.torch_file import write_torch_file
from headrace.weights.weights import Weights

__all__ = ["check", "make"]


def make(weights: Weights, path: Path, options: ExportOptions) -> Made:
    """Return the file: one of torch where the suffix says so."""
    dialect = weights.config.model.model_dialect
    scheme, state_dict = export_names(weights.params, weights.stats, options.names, weights.step, dialect)
    arrays = in_type(state_dict, options.dtype)
    as_torch = path.suffix in (".pth", ".pt")
    data = write_torch_file(arrays) if as_torch else write_safetensors(arrays, weights.describe())
    remark = f"{len(arrays)} tensors under the names of {scheme}"
    if dialect in ("reference", "keras") and scheme in ("torchvision", "timm"):
        remark += (
            f"; padding, epsilon and shortcuts are those of {dialect}: trained with --model-dialect {scheme}, a "
            "network loads there strictly and computes the same"
        )
    return Made(data=data, more={"names": scheme}, remark=remark)
