"""Read Keras' `.h5` files, weights alone or whole models, with h5py (extra `keras`)."""

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
            return _layers(root)
    except (OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as Keras' weights: {error}.") from error


def _layers(root: Any) -> dict[str, np.ndarray]:
    if "layer_names" not in root.attrs:
        raise ValueError("it does not name its layers; save with model.save_weights('FILE.h5') of Keras 2")
    arrays = {}
    for layer in (_text(name) for name in root.attrs["layer_names"]):
        for weight in (_text(name) for name in root[layer].attrs["weight_names"]):
            tensor = weight.rsplit("/", 1)[-1].split(":")[0]
            arrays[f"{layer}/{tensor}"] = np.asarray(root[layer][weight])
    return arrays


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
