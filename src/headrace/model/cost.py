"""What a layer costs per image, from shapes alone."""

from dataclasses import dataclass

FLOPS_CONVENTION = "a multiply-add of a convolution or dense layer counts as 2 FLOPs, all else as 0"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Trainable parameters; forward FLOPs per image; elements per image kept for the backward pass.

    Kept are the outputs of convolutions, dense layers, activations and pools; norms, adds and padding are computed
    together with their neighbours and not stored. `product_elements` are the outputs of convolutions and dense layers
    alone: what a pipeline stage keeps, which computes everything between them again.
    """

    params: int = 0
    flops: int = 0
    activation_elements: int = 0
    product_elements: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        """Add up the costs of two parts."""
        return Cost(
            params=self.params + other.params,
            flops=self.flops + other.flops,
            activation_elements=self.activation_elements + other.activation_elements,
            product_elements=self.product_elements + other.product_elements,
        )
