"""What a network costs: its parameters, FLOPs per image, and elements kept for the backward pass."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr


FLOPS_CONVENTION = "a multiply-add of a convolution or dense layer counts as 2 FLOPs, all else as 0"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Trainable parameters; forward FLOPs per image; elements per image kept for the backward pass.

    The outputs of convolutions, dense layers, activations and pools are kept; XLA fuses norms, additions and padding
    with their neighbours and does not store them. `product_elements` counts only the outputs of convolutions and dense
    layers: a pipeline stage keeps these and recomputes everything in between.
    """

    params: int = 0
    flops: int = 0
    activation_elements: int = 0
    product_elements: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        """Return the cost of two parts together."""
        return Cost(
            params=self.params + other.params,
            flops=self.flops + other.flops,
            activation_elements=self.activation_elements + other.activation_elements,
            product_elements=self.product_elements + other.product_elements,
        )


# Primitives other than products whose outputs are kept for the backward pass: activations and pools (see Cost).
_ACTIVATIONS = frozenset(
    (
        *("max", "min", "clamp", "exp", "tanh", "logistic", "erf", "log1p", "sin", "cos"),
        *("reduce_window", "reduce_window_max", "reduce_window_sum"),
    )
)


@dataclass(frozen=True)
class Counted:
    """FLOPs of convolutions and matrix products, elements of their outputs, elements of activations and pools."""

    flops: int = 0
    products: int = 0
    activations: int = 0

    def __add__(self, other: "Counted") -> "Counted":
        return Counted(self.flops + other.flops, self.products + other.products, self.activations + other.activations)

    def times(self, count: int) -> "Counted":
        """Return the counts of that many repetitions."""
        return Counted(count * self.flops, count * self.products, count * self.activations)


def count_jaxpr(jaxpr: "ClosedJaxpr | Jaxpr", batch: int) -> Counted:
    """Count the jaxpr of a function applied to `batch` images; only arrays whose first dim is the batch are kept."""
    total = Counted()
    for eqn in jaxpr.eqns:
        total += _count_equation(eqn, batch)
    return total


def _count_equation(eqn: Any, batch: int) -> Counted:
    name = eqn.primitive.name
    kept = sum(math.prod(out.aval.shape) for out in eqn.outvars if out.aval.shape[:1] == (batch,))
    if name == "dot_general":
        ((contracted, _), _) = eqn.params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
        return Counted(2 * depth * math.prod(eqn.outvars[0].aval.shape), kept)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_channels = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        # The weights of one output channel are the multiply-adds of one output value.
        return Counted(2 * math.prod(kernel) // out_channels * math.prod(eqn.outvars[0].aval.shape), kept)
    inner = [count_jaxpr(sub, batch) for sub in _inside(eqn.params)]
    if name == "cond":
        # One branch runs; the dearer one counts.
        return max(inner, key=lambda counted: counted.flops, default=Counted())
    if inner:
        total = sum(inner, Counted()).times(eqn.params.get("length", 1) if name == "scan" else 1)
        # a call without products is one activation (relu6, gelu ...), however many primitives it consists of
        return total if total.flops else Counted(activations=min(total.activations, kept))
    return Counted(activations=kept if name in _ACTIVATIONS else 0)


def _inside(params: dict[str, Any]) -> "Iterator[ClosedJaxpr | Jaxpr]":
    """Yield the jaxprs among an equation's parameters."""
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(each, "eqns"):
                yield each
