"""Toy networks: two small convolutions, for tests and first steps."""

from dataclasses import dataclass

from headrace.model.composites import Chain, Named
from headrace.model.initial import GLOROT_UNIFORM
from headrace.model.layers import Conv, Dense, Flatten, MaxPool, Relu
from headrace.model.norm import Norm, NormSpec


@dataclass(frozen=True, kw_only=True)
class Toy:
    """One row of the table: with or without a norm after each pool."""

    norm: bool
    image_size: int = 32
    num_classes: int = 10

    def blocks(self, norm: NormSpec, num_classes: int) -> tuple[Named, ...]:
        """Return the named blocks."""
        blocks: list[Named] = []
        for i, (kernel, channels) in enumerate(((3, 4), (1, 8))):
            conv = Conv(channels=channels, kernel=kernel, padding="VALID", bias=True, initial=GLOROT_UNIFORM)
            blocks += [(f"conv2d_{i}", Chain((("conv", conv), ("relu", Relu()))))]
            blocks += [(f"max_pool_{i}", MaxPool(window=5, stride=5))]
            blocks += [(f"{norm.suffix}_{i}", Norm(spec=norm))] if self.norm else []
        return *blocks, ("flatten", Flatten()), ("dense", Dense(features=num_classes, logits=True))


TOYS: dict[str, Toy] = {"toy_model": Toy(norm=False), "toy_model_bn": Toy(norm=True)}
