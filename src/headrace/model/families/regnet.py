"""RegNetX and RegNetY: bottlenecks of one width with grouped 3x3 convolutions, in groups whose widths follow a line.

The widths of all units lie on a line, rounded to powers of a factor; units of equal width form a group. Y has
squeeze-excite after the 3x3 convolution. Padded as in PyTorch, whatever the dialect.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

from headrace.model.build_options import BuildOptions, near_multiple
from headrace.model.composite import Chain, Named, Residual
from headrace.model.families.resnet import conv_norm, conv_norm_relu
from headrace.model.gates import SqueezeExcite
from headrace.model.layers import Dense, GlobalAveragePool, Relu

_STEM, _SE_RATIO = 32, 0.25  # of all RegNets in the paper


@dataclass(frozen=True)
class RegNet:
    """One row of the table: units, width of the first, increase per unit, factor between widths, width of a group."""

    depth: int
    first: int
    slope: float
    factor: float
    group_width: int
    squeezes: bool = False

    def shapes(self, half_up: bool) -> list[tuple[int, int, int]]:
        """Return (units, width, channels of a convolution's group) of each group of units.

        Widths are rounded to whole groups, as Python rounds or (torchvision's `half_up`) as other channels are rounded.
        """
        widths = []
        for i in range(self.depth):
            power = round(math.log((self.first + self.slope * i) / self.first) / math.log(self.factor))
            widths.append(round(self.first * self.factor**power / 8) * 8)
        shapes = []
        for width, count in Counter(widths).items():
            size = min(self.group_width, width)
            shapes.append((count, near_multiple(width, size) if half_up else round(width / size) * size, size))
        return shapes

    def blocks(self, build: BuildOptions) -> tuple[Named, ...]:
        """Return the named blocks; as in a ResNet, the relu after a unit's addition is a block."""
        stem = Chain((("conv", build.conv(_STEM, stride=2)), *build.norm_act("", "relu")))
        blocks, inputs = [("stem", stem)], _STEM
        shapes = self.shapes(half_up=build.options.model_dialect == "torchvision")
        for group, (count, width, size) in enumerate(shapes, start=1):
            for i in range(1, count + 1):
                name = f"group{group}_block{i}"
                unit = self._unit(inputs, width, size, 2 if i == 1 else 1, build)
                blocks += [(name, unit), (f"{name}_out", Relu())]
                inputs = width
        head = Dense(features=build.num_classes, logits=True)
        return *blocks, ("avg_pool", GlobalAveragePool()), ("predictions", head)

    def _unit(self, inputs: int, width: int, size: int, stride: int, build: BuildOptions) -> Residual:
        inner = replace(build.conv(width, stride=stride), groups=width // size)
        body = [*conv_norm_relu("1", build.conv(width, kernel=1), build), *conv_norm_relu("2", inner, build)]
        if self.squeezes:
            body += [("se", SqueezeExcite(width=round(inputs * _SE_RATIO), activation="relu"))]
        body += conv_norm("3", build.conv(width, kernel=1), build, gamma=float(stride > 1))
        shortcut = conv_norm("0", build.conv(width, kernel=1, stride=stride), build) if stride > 1 else ()
        return Residual(body=Chain(tuple(body)), shortcut=Chain(shortcut))

    def aliases(self, build: BuildOptions) -> tuple[tuple[str, str], ...]:
        """Return other names of split points: timm's modules."""
        counts = [count for count, *_ in self.shapes(half_up=False)]
        units = [(group, i) for group, count in enumerate(counts, start=1) for i in range(1, count + 1)]
        return tuple((f"s{group}/b{i}", f"group{group}_block{i}") for group, i in units)


REGNETS: dict[str, RegNet] = {
    "regnet_x_200mf": RegNet(13, 24, 36.44, 2.49, 8),
    "regnet_x_400mf": RegNet(22, 24, 24.48, 2.54, 16),
    "regnet_x_600mf": RegNet(16, 48, 36.97, 2.24, 24),
    "regnet_x_800mf": RegNet(16, 56, 35.73, 2.28, 16),
    "regnet_x_1_6gf": RegNet(18, 80, 34.01, 2.25, 24),
    "regnet_x_3_2gf": RegNet(25, 88, 26.31, 2.25, 48),
    "regnet_x_4gf": RegNet(23, 96, 38.65, 2.43, 40),
    "regnet_x_6_4gf": RegNet(17, 184, 60.83, 2.07, 56),
    "regnet_x_8gf": RegNet(23, 80, 49.56, 2.88, 120),
    "regnet_x_12gf": RegNet(19, 168, 73.36, 2.37, 112),
    "regnet_x_16gf": RegNet(22, 216, 55.59, 2.1, 128),
    "regnet_x_32gf": RegNet(23, 320, 69.86, 2.0, 168),
    "regnet_y_200mf": RegNet(13, 24, 36.44, 2.49, 8, squeezes=True),
    "regnet_y_400mf": RegNet(16, 48, 27.89, 2.09, 8, squeezes=True),
    "regnet_y_600mf": RegNet(15, 48, 32.54, 2.32, 16, squeezes=True),
    "regnet_y_800mf": RegNet(14, 56, 38.84, 2.4, 16, squeezes=True),
    "regnet_y_1_6gf": RegNet(27, 48, 20.71, 2.65, 24, squeezes=True),
    "regnet_y_3_2gf": RegNet(21, 80, 42.63, 2.66, 24, squeezes=True),
    "regnet_y_4gf": RegNet(22, 96, 31.41, 2.24, 64, squeezes=True),
    "regnet_y_6_4gf": RegNet(25, 112, 33.22, 2.27, 72, squeezes=True),
    "regnet_y_8gf": RegNet(17, 192, 76.82, 2.19, 56, squeezes=True),
    "regnet_y_12gf": RegNet(19, 168, 73.36, 2.37, 112, squeezes=True),
    "regnet_y_16gf": RegNet(18, 200, 106.23, 2.48, 112, squeezes=True),
    "regnet_y_32gf": RegNet(20, 232, 115.89, 2.53, 232, squeezes=True),
}
