"""RegNetX and RegNetY: bottlenecks of one width with grouped 3x3 convolutions, in groups whose widths follow a line.

The widths of all units lie on a line, rounded to powers of a factor; units of equal width form a group. Y has
squeeze-excite after the 3x3 convolution. Padded as in PyTorch, whatever the dialect.
"""

import math
from collections import Counter
from dataclasses import replace

from headrace.model.build_options import BuildOptions, near_multiple
from headrace.model.composite import Chain, Named, Residual
from headrace.model.families.resnet import conv_norm, conv_norm_relu
from headrace.model.gates import SqueezeExcite
from headrace.model.layers import Dense, GlobalAveragePool, Relu
from headrace.rows.networks.regnet import RegNetRow

_STEM, _SE_RATIO = 32, 0.25  # of all RegNets in the paper


def shapes_of(row: RegNetRow, half_up: bool) -> list[tuple[int, int, int]]:
    """Return (units, width, channels of a convolution's group) of each group of units.

    Widths are rounded to whole groups, as Python rounds or (torchvision's `half_up`) as other channels are rounded.
    """
    widths = []
    for i in range(row.depth):
        power = round(math.log((row.first + row.slope * i) / row.first) / math.log(row.factor))
        widths.append(round(row.first * row.factor**power / 8) * 8)
    shapes = []
    for width, count in Counter(widths).items():
        size = min(row.group_width, width)
        shapes.append((count, near_multiple(width, size) if half_up else round(width / size) * size, size))
    return shapes


def blocks(row: RegNetRow, build: BuildOptions) -> tuple[Named, ...]:
    """Return the named blocks; as in a ResNet, the relu after a unit's addition is a block."""
    stem = Chain((("conv", build.conv(_STEM, stride=2)), *build.norm_act("", "relu")))
    blocks, inputs = [("stem", stem)], _STEM
    shapes = shapes_of(row, half_up=build.options.model_dialect == "torchvision")
    for group, (count, width, size) in enumerate(shapes, start=1):
        for i in range(1, count + 1):
            name = f"group{group}_block{i}"
            unit = _unit(row, inputs, width, size, 2 if i == 1 else 1, build)
            blocks += [(name, unit), (f"{name}_out", Relu())]
            inputs = width
    head = Dense(features=build.num_classes, logits=True)
    return *blocks, ("avg_pool", GlobalAveragePool()), ("predictions", head)


def _unit(row: RegNetRow, inputs: int, width: int, size: int, stride: int, build: BuildOptions) -> Residual:
    inner = replace(build.conv(width, stride=stride), groups=width // size)
    body = [*conv_norm_relu("1", build.conv(width, kernel=1), build), *conv_norm_relu("2", inner, build)]
    if row.squeezes:
        body += [("se", SqueezeExcite(width=round(inputs * _SE_RATIO), activation="relu"))]
    body += conv_norm("3", build.conv(width, kernel=1), build, gamma=float(stride > 1))
    shortcut = conv_norm("0", build.conv(width, kernel=1, stride=stride), build) if stride > 1 else ()
    return Residual(body=Chain(tuple(body)), shortcut=Chain(shortcut))


def aliases(row: RegNetRow, build: BuildOptions) -> tuple[tuple[str, str], ...]:
    """Return other names of split points: timm's modules."""
    counts = [count for count, *_ in shapes_of(row, half_up=False)]
    units = [(group, i) for group, count in enumerate(counts, start=1) for i in range(1, count + 1)]
    return tuple((f"s{group}/b{i}", f"group{group}_block{i}") for group, i in units)
