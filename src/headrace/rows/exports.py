"""The formats of `headrace export`, a row each. How one is written and checked is in the module that its row names."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.core.errors import ConfigError, did_you_mean

PLATFORMS = ("cpu", "cuda", "tpu")
DTYPES = ("float32", "float16")
TORCH_NAMES = ("torchvision", "timm", "common", "common-fc", "efficientnet_pytorch")  # a test compares weights/


@dataclass(frozen=True, kw_only=True)
class Export:
    """One format.

    `module` has `make`(weights, path, options), the bytes, and `check`(file, weights, options, images), the largest
    difference of logits and by what it was found.
    """

    name: str
    says: str  # what a file holds, for people
    loaded_with: str  # what reads it elsewhere
    suffixes: tuple[str, ...]  # each stands for the format where none is named; files get the first by default
    holds: Literal["weights", "network"]
    module: str
    takes: frozenset[str] = frozenset()  # the options that have a meaning for it and not for every format
    needs: tuple[str, ...] = ()  # modules of the extra that has the name of the format

    def refuse_missing(self) -> None:
        """Raise ConfigError if a module that it needs is not installed."""
        for module in self.needs:
            if importlib.util.find_spec(module) is None:
                raise ConfigError(
                    f"--format {self.name} needs the package {module}, which is not installed.",
                    remedy=f"pip install 'headrace[{self.name}]', or choose another format.",
                )


_OF_NETWORKS = frozenset(("input", "with_preprocessing"))

EXPORTS: Mapping[str, Export] = {
    row.name: row
    for row in (
        Export(
            name="torch-names",
            says="weights under the names of the network's dialect, of `--names timm` or of the common CIFAR ResNets, "
            "as `.pth` or `.safetensors`, by the suffix of `--out`",
            loaded_with="`model.load_state_dict(torch.load(FILE), strict=True)`, for networks trained with "
            "`--model-dialect`",
            suffixes=(".torch.safetensors", ".pth", ".pt"),
            holds="weights",
            module="headrace.run.exports.torch_names",
            takes=frozenset(("names",)),
        ),
        Export(
            name="onnx",
            says="the network with normalisation and softmax; `images` [batch, H, W, C], any batch",
            loaded_with="onnxruntime 1.14 or newer; outputs `logits` and `probabilities`",
            suffixes=(".onnx",),
            holds="network",
            module="headrace.run.exports.onnx",
            takes=_OF_NETWORKS,
            needs=("onnx", "onnxruntime"),
        ),
        Export(
            name="stablehlo",
            says="the same, for CPU, CUDA and TPU at once (`--platforms`)",
            loaded_with='`jax.export.deserialize(bytearray(data)).call(images)["probabilities"]`',
            suffixes=(".stablehlo",),
            holds="network",
            module="headrace.run.exports.stablehlo",
            takes=_OF_NETWORKS | {"platforms"},
        ),
        Export(
            name="safetensors",
            says="weights under Headrace's names",
            loaded_with="`--weights`, or any safetensors reader",
            suffixes=(".safetensors",),
            holds="weights",
            module="headrace.run.exports.safetensors",
        ),
    )
}


def find_export(name: str) -> Export:
    """Return a format by its name."""
    if name not in EXPORTS:
        raise ConfigError(f"There is no format {name!r}.", remedy=did_you_mean(name, EXPORTS))
    return EXPORTS[name]


def taken_by(option: str) -> str:
    """Return the formats for which an option has a meaning, for people."""
    return " and ".join(row.name for row in EXPORTS.values() if option in row.takes)


def format_of(path: Path) -> str:
    """Return the format that the name of a file stands for."""
    of_suffix = {suffix: row.name for row in EXPORTS.values() for suffix in row.suffixes}
    fitting = [suffix for suffix in of_suffix if path.name.endswith(suffix)]
    if not fitting:
        raise ConfigError(
            f"The format of {path.name} is not known.",
            rule=f"It follows from the suffix ({', '.join(of_suffix)}), or is given: {', '.join(EXPORTS)}.",
            remedy="Give the format: --format onnx, in Python format='onnx'.",
        )
    return of_suffix[max(fitting, key=len)]
