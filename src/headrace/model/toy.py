"""Toy networks: two small convolutions, for tests and first steps."""

from dataclasses import dataclass

from headrace.model.composites import Chain, Named
from headrace.model.initial import GLOROT_UNIFORM
from headrace.model.layers import Conv, Dense, Flatten, MaxPool, Relu
from headrace.model.style import Style


@dataclass(frozen=True, kw_only=True)
class Toy:
    """One row of the table: with or without a norm after each pool."""

    norm: bool

    def blocks(self, style: Style) -> tuple[Named, ...]:
        """Return the named blocks."""
        blocks: list[Named] = []
        for i, (kernel, channels) in enumerate(((3, 4), (1, 8))):
            conv = Conv(channels=channels, kernel=kernel, padding="VALID", bias=True, initial=GLOROT_UNIFORM)
            blocks += [(f"conv2d_{i}", Chain((("conv", conv), ("relu", Relu()))))]
            blocks += [(f"max_pool_{i}", MaxPool(window=5, stride=5))]
            if self.norm:
                suffix, layer = style.norm_named("")
                blocks += [(f"{suffix}_{i}", layer)]
        return *blocks, ("flatten", Flatten()), ("dense", Dense(features=style.num_classes, logits=True))

    def aliases(self, style: Style) -> tuple[tuple[str, str], ...]:
        """Return no other names."""
        return ()


TOYS: dict[str, Toy] = {"toy_model": Toy(norm=False), "toy_model_bn": Toy(norm=True)}
