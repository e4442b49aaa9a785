"""Layers, blocks and networks for custom models: what `headrace.custom_network` and `headrace.Model` are given.

A layer is a frozen value with `shape`, `init`, `apply` and `cost` (`Layer` says what each does). A class of your own
with these four methods can stand wherever one of these can.
"""

from headrace.model.activations import Activation
from headrace.model.composite import Chain, Concat, Residual, SubsampleShortcut
from headrace.model.context import Ctx
from headrace.model.cost import Cost
from headrace.model.gates import Dropout, DropPath, LayerScale, SqueezeExcite
from headrace.model.initial import Normal, VarianceScaling
from headrace.model.layers import (
    AveragePool,
    BlurPool,
    Conv,
    Dense,
    Flatten,
    GlobalAveragePool,
    Layer,
    MaxPool,
    Relu,
    ResizeByAverage,
    WithoutParameters,
    ZeroPad,
)
from headrace.model.network import Network
from headrace.model.norm import LayerNorm, Norm, NormSpec

__all__ = [
    "Activation",
    "AveragePool",
    "BlurPool",
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
