"""Activations by name."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jax import Array

from headrace import ops
from headrace.model.context import Ctx
from headrace.model.cost import Cost
from headrace.model.layers import Layer, Relu, Shape, Tree, WithoutParameters

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "relu": ops.relu,
    "relu6": ops.relu6,
    "swish": ops.swish,
    "mish": ops.mish,
    "gelu": ops.gelu,
    "hard_swish": ops.hard_swish,
    "sigmoid": ops.sigmoid,
    "hard_sigmoid": ops.hard_sigmoid,
}


@dataclass(frozen=True)
class Activation(WithoutParameters):
    """An activation function, by its name in ACTIVATIONS."""

    kind: str = "relu"

    def __post_init__(self) -> None:
        assert self.kind in ACTIVATIONS, self.kind

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        return ACTIVATIONS[self.kind](x), {}

    def fusible_activation(self) -> str | None:
        """Return the name of the activation: the CPU kernels may apply it with the convolution before it."""
        return self.kind

    def cost(self, hwc: Shape) -> Cost:
        return Cost(activation_elements=math.prod(hwc))


def activation_of(kind: str) -> Layer:
    """Return the layer of an activation by its name."""
    return Relu() if kind == "relu" else Activation(kind)
