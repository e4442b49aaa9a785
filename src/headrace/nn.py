"""Layers, blocks and networks for custom models: what `headrace.custom_network` and `headrace.Model` are given.

A layer is a frozen value with `shape`, `init`, `apply` and `cost` (`Layer` says what each does). A class of your own
with these four methods can stand wherever one of these can.
"""

from headrace.model.context import Cost, Ctx
from headrace.model.layers import (
    AveragePool,
    Chain,
    Concat,
    Conv,
    Dense,
    Flatten,
    GlobalAveragePool,
    Layer,
    MaxPool,
    Normal,
    Relu,
    Residual,
    ResizeByAverage,
    SubsampleShortcut,
    VarianceScaling,
    WithoutParameters,
    ZeroPad,
)
from headrace.model.network import Network
from headrace.model.norm import Activation, Dropout, DropPath, LayerNorm, LayerScale, Norm, NormSpec, SqueezeExcite

__all__ = [
    "Activation",
    "AveragePool",
    "Chain",
    "Concat",
    "Conv",
    "Cost",
    "Ctx",
    "Dense",
    "DropPath",
    "Dropout",
    "Flatten",
    "GlobalAveragePool",
    "Layer",
    "LayerNorm",
    "LayerScale",
    "MaxPool",
    "Network",
    "Norm",
    "NormSpec",
    "Normal",
    "Relu",
    "Residual",
    "ResizeByAverage",
    "SqueezeExcite",
    "SubsampleShortcut",
    "VarianceScaling",
    "WithoutParameters",
    "ZeroPad",
]
