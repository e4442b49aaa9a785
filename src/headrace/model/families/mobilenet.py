"""MobileNet-V2 and V3, padded equally on all sides as in PyTorch, except in the Keras dialect."""

from dataclasses import dataclass, replace

from headrace.model.activations import Activation
from headrace.model.build_options import BuildOptions, near_multiple
from headrace.model.composite import Chain, Named
from headrace.model.families.efficientnet import Inverted, classifier, conv_block
from headrace.model.gates import SqueezeExcite
from headrace.model.layers import Dense, GlobalAveragePool


@dataclass(frozen=True, kw_only=True)
class Row:
    """One block: kernel, channels inside and out, squeeze-excite, activation, stride."""

    kernel: int
    inner: int
    outputs: int
    squeezes: bool
    activation: str
    stride: int


@dataclass(frozen=True, kw_only=True)
class MobileNet:
    """One network: stem, blocks, last convolution, and the hidden layer after the pool (0 for none)."""

    stem: int
    rows: tuple[Row, ...]
    top: int
    hidden: int
    activation: str

    def blocks(self, build: BuildOptions) -> tuple[Named, ...]:
        build = replace(build, dialect=replace(build.dialect, symmetric=build.dialect.symmetric_mobilenets))
        top, hidden = self._widths(build)
        blocks: list[Named] = [("stem", conv_block(self.stem, 3, 2, self.activation, build))]
        blocks += [(f"block{i}", block.layer(build)) for i, block in enumerate(self._inverted(), start=1)]
        blocks += [("top", conv_block(top, 1, 1, self.activation, build))] if top else []
        blocks += [("avg_pool", GlobalAveragePool())]
        if hidden:
            layers = (("dense", Dense(features=hidden)), ("activation", Activation(self.activation)))
            blocks += [("hidden", Chain(layers))]
        return *blocks, *classifier(build.dropout(0.2), build)

    def aliases(self, build: BuildOptions) -> tuple[tuple[str, str], ...]:
        """Return other names of split points: torchvision's modules."""
        named = [(f"features/{i}", f"block{i}") for i in range(1, len(self.rows) + 1)]
        return *named, ("features/0", "stem"), (f"features/{len(self.rows) + 1}", "top")

    def _widths(self, build: BuildOptions) -> tuple[int, int]:
        """Return the channels of the last convolution and of the hidden layer; `top_width` sets the last of them."""
        top_width = build.options.top_width
        if not self.hidden:
            return (self.top if top_width is None else top_width), 0
        # The hidden layer of the reference's small V3 is as wide as the large one's; other libraries use 1024.
        default = 1280 if build.options.model_dialect == "reference" else self.hidden
        return self.top, default if top_width is None else top_width

    def _inverted(self) -> list[Inverted]:
        blocks, inputs = [], self.stem
        for row in self.rows:
            width = near_multiple(row.inner / 4)
            squeeze = SqueezeExcite(width=width, activation="relu", gate="hard_sigmoid") if row.squeezes else None
            blocks.append(
                Inverted(
                    inputs=inputs,
                    inner=row.inner,
                    outputs=row.outputs,
                    kernel=row.kernel,
                    stride=row.stride,
                    activation=row.activation,
                    squeeze=squeeze,
                )
            )
            inputs = row.outputs
        return blocks


def _v2() -> MobileNet:
    # (expansion, channels out, repeats, stride) of each group
    groups = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    rows, inputs = [], 32
    for expansion, outputs, repeats, stride in groups:
        for i in range(repeats):
            row = Row(kernel=3, inner=inputs * expansion, outputs=outputs, squeezes=False, activation="relu6", stride=1)
            rows.append(replace(row, stride=1 if i else stride))
            inputs = outputs
    return MobileNet(stem=32, rows=tuple(rows), top=1280, hidden=0, activation="relu6")


def _v3(rows: str, top: int, hidden: int) -> MobileNet:
    """Return a V3 from rows as printed in the paper: kernel, inner, output, SE, relu or h-swish, stride."""
    table = []
    for line in rows.split(","):
        kernel, inner, outputs, squeezes, activation, stride = line.split()
        table.append(
            Row(
                kernel=int(kernel),
                inner=int(inner),
                outputs=int(outputs),
                squeezes=squeezes == "SE",
                activation="relu" if activation == "RE" else "hard_swish",
                stride=int(stride),
            )
        )
    return MobileNet(stem=16, rows=tuple(table), top=top, hidden=hidden, activation="hard_swish")


_SMALL = """3 16 16 SE RE 2, 3 72 24 - RE 2, 3 88 24 - RE 1, 5 96 40 SE HS 2, 5 240 40 SE HS 1, 5 240 40 SE HS 1,
5 120 48 SE HS 1, 5 144 48 SE HS 1, 5 288 96 SE HS 2, 5 576 96 SE HS 1, 5 576 96 SE HS 1"""
_LARGE = """3 16 16 - RE 1, 3 64 24 - RE 2, 3 72 24 - RE 1, 5 72 40 SE RE 2, 5 120 40 SE RE 1, 5 120 40 SE RE 1,
3 240 80 - HS 2, 3 200 80 - HS 1, 3 184 80 - HS 1, 3 184 80 - HS 1, 3 480 112 SE HS 1, 3 672 112 SE HS 1,
5 672 160 SE HS 2, 5 960 160 SE HS 1, 5 960 160 SE HS 1"""

MOBILENETS: dict[str, MobileNet] = {
    "mobilenet_v2": _v2(),
    "mobilenet_v3_small": _v3(_SMALL, top=576, hidden=1024),
    "mobilenet_v3_large": _v3(_LARGE, top=960, hidden=1280),
}
