"""MobileNet-V2 and V3, padded equally on all sides as in PyTorch, except in the Keras dialect."""

from dataclasses import replace

from headrace.model.activations import Activation
from headrace.model.build_options import BuildOptions, near_multiple
from headrace.model.composite import Chain, Named
from headrace.model.families.efficientnet import Inverted, classifier, conv_block
from headrace.model.gates import SqueezeExcite
from headrace.model.layers import Dense, GlobalAveragePool
from headrace.rows.networks.mobilenet import MobileNetRow


def blocks(row: MobileNetRow, build: BuildOptions) -> tuple[Named, ...]:
    build = replace(build, dialect=replace(build.dialect, symmetric=build.dialect.symmetric_mobilenets))
    top, hidden = _widths(row, build)
    blocks: list[Named] = [("stem", conv_block(row.stem, 3, 2, row.activation, build))]
    blocks += [(f"block{i}", block.layer(build)) for i, block in enumerate(_inverted(row), start=1)]
    blocks += [("top", conv_block(top, 1, 1, row.activation, build))] if top else []
    blocks += [("avg_pool", GlobalAveragePool())]
    if hidden:
        layers = (("dense", Dense(features=hidden)), ("activation", Activation(row.activation)))
        blocks += [("hidden", Chain(layers))]
    return *blocks, *classifier(build.dropout(0.2), build)


def aliases(row: MobileNetRow, build: BuildOptions) -> tuple[tuple[str, str], ...]:
    """Return other names of split points: torchvision's modules."""
    named = [(f"features/{i}", f"block{i}") for i in range(1, len(row.bottlenecks) + 1)]
    return *named, ("features/0", "stem"), (f"features/{len(row.bottlenecks) + 1}", "top")


def _widths(row: MobileNetRow, build: BuildOptions) -> tuple[int, int]:
    """Return the channels of the last convolution and of the hidden layer; `top_width` sets the last of them."""
    top_width = build.options.top_width
    if not row.hidden:
        return (row.top if top_width is None else top_width), 0
    # The hidden layer of the reference's small V3 is as wide as the large one's; other libraries use 1024.
    default = 1280 if build.options.model_dialect == "reference" else row.hidden
    return row.top, default if top_width is None else top_width


def _inverted(row: MobileNetRow) -> list[Inverted]:
    blocks, inputs = [], row.stem
    for spec in row.bottlenecks:
        width = near_multiple(spec.inner / 4)
        squeeze = SqueezeExcite(width=width, activation="relu", gate="hard_sigmoid") if spec.squeezes else None
        blocks.append(
            Inverted(
                inputs=inputs,
                inner=spec.inner,
                outputs=spec.outputs,
                kernel=spec.kernel,
                stride=spec.stride,
                activation=spec.activation,
                squeeze=squeeze,
            )
        )
        inputs = spec.outputs
    return blocks
