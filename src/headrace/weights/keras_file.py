"""Read Keras' `.h5` files of versions 2 and 3, weights alone or whole models, with h5py (extra `keras`)."""

from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import CheckpointError, ConfigError


def read_keras_file(path: Path) -> dict[str, np.ndarray]:
    """Return {"layer/tensor": array}, such as `conv1_conv/kernel`."""
    try:
        import h5py
    except ImportError as error:
        raise ConfigError(
            f"Keras' file {path} needs the package h5py to be read.", remedy="pip install 'headrace[keras]'"
        ) from error
    try:
        with h5py.File(path) as file:
            root: Any = file.get("model_weights", file)
            return _counted_layers(root["layers"]) if "layers" in root else _named_layers(root)
    except (OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as Keras' weights: {error}.") from error


# Keras 3 counts the tensors of a layer, in this order; its groups are named after the layer's class.
_BY_CLASS = (
    ("batch_normalization", ("gamma", "beta", "moving_mean", "moving_variance")),
    ("depthwise_conv2d", ("depthwise_kernel", "bias")),
    ("conv2d", ("kernel", "bias")),
    ("dense", ("kernel", "bias")),
)


def _counted_layers(root: Any) -> dict[str, np.ndarray]:
    """Read the weights alone, as Keras 3 writes them (`FILE.weights.h5`)."""
    arrays = {}
    for group in root:
        tensors = next((names for kind, names in _BY_CLASS if group.startswith(kind)), ())
        layer = _text(root[group]["vars"].attrs.get("name", group)) if "vars" in root[group] else group
        for number, tensor in enumerate(tensors):
            if str(number) in root[group]["vars"]:
                arrays[f"{layer}/{tensor}"] = np.asarray(root[group]["vars"][str(number)])
    return arrays


def _named_layers(root: Any) -> dict[str, np.ndarray]:
    """Read the weights of Keras 2, or a whole model of either version."""
    if "layer_names" not in root.attrs:
        raise ValueError("it names neither layers nor their tensors; save with model.save_weights('FILE.weights.h5')")
    arrays = {}
    for layer in (_text(name) for name in root.attrs["layer_names"]):
        for weight in (_text(name) for name in root[layer].attrs["weight_names"]):
            tensor = weight.rsplit("/", 1)[-1].split(":")[0]
            array = np.asarray(root[layer][weight])
            if tensor == "kernel" and array.ndim == 4 and array.shape[3] == 1 < array.shape[2]:
                tensor = "depthwise_kernel"  # as Keras 2 named it
            arrays[f"{layer}/{tensor}"] = array
    return arrays


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
