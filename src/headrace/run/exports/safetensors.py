"""Weights under Headrace's own names, as safetensors."""

from pathlib import Path

from headrace.core.tensor_file import write_safetensors
from headrace.run.exports.loaded_again import in_type
from headrace.run.exports.loaded_again import weights_difference as check
from headrace.run.exports.values import ExportOptions, Made
from headrace.weights.weights import Weights, flat_weights

__all__ = ["check", "make"]


def make(weights: Weights, path: Path, options: ExportOptions) -> Made:
    """Return the file."""
    arrays = in_type(flat_weights(*weights.raw), options.dtype)
    data = write_safetensors(arrays, weights.describe())
    return Made(data=data, more={"names": "headrace"}, remark=f"{len(arrays)} tensors")
