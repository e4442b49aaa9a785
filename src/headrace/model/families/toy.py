"""Toy networks, for tests and first steps."""

from headrace.model.build_options import BuildOptions
from headrace.model.composite import Chain, Named
from headrace.model.initial import GLOROT_UNIFORM
from headrace.model.layers import Conv, Dense, Flatten, MaxPool, Relu
from headrace.rows.network import NetworkRow


def blocks(row: NetworkRow, build: BuildOptions) -> tuple[Named, ...]:
    blocks: list[Named] = []
    for i, (kernel, channels) in enumerate(((3, 4), (1, 8))):
        conv = Conv(channels=channels, kernel=kernel, padding="VALID", bias=True, initial=GLOROT_UNIFORM)
        blocks += [(f"conv2d_{i}", Chain((("conv", conv), ("relu", Relu()))))]
        blocks += [(f"max_pool_{i}", MaxPool(window=5, stride=5))]
        if row.norm != "none":
            suffix, layer = build.norm_named("")
            blocks += [(f"{suffix}_{i}", layer)]
    return *blocks, ("flatten", Flatten()), ("dense", Dense(features=build.num_classes, logits=True))
