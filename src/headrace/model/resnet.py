"""ResNets and ResNeXts for ImageNet (v1.5) and CIFAR images, with squeeze-excite or deep stems; RegNets."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from headrace.core.errors import ConfigError
from headrace.model.layers import (
    GLOROT_UNIFORM,
    AveragePool,
    Chain,
    Conv,
    Dense,
    GlobalAveragePool,
    MaxPool,
    Named,
    Relu,
    Residual,
    SubsampleShortcut,
)
from headrace.model.norm import BuildOptions, DropPath, SqueezeExcite, activation_of, near_multiple

# A residual unit is two blocks: the unit up to its addition, and the relu after it, where pipelines are cut. Layers are
# named as in the reference: `conv2_block1` + `1_conv`.


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """A residual unit: its group, width and stride, and whether it is the first of its group."""

    group: int
    width: int
    stride: int
    first: bool


@dataclass(frozen=True, kw_only=True)
class ResNet:
    """One row of the table: the number of units in each group, and the kind of unit and stem."""

    units: tuple[int, ...]
    unit: Literal["basic", "bottleneck"] = "bottleneck"
    stem: Literal["imagenet", "deep", "cifar"] = "imagenet"  # deep is D, where average pools halve the shortcuts too
    cardinality: int = 1  # groups of the 3x3 convolution in a bottleneck; above 1 it is a ResNeXt
    squeezes: bool = False

    @property
    def is_cifar_basic(self) -> bool:
        """Return whether it has the units of CIFAR ResNets, which name their layers differently."""
        return self.stem == "cifar" and self.unit == "basic"

    def blocks(self, build: BuildOptions) -> tuple[Named, ...]:
        self._check_options(build)
        width = 64 if self.stem != "cifar" or build.options.widenet else 16
        blocks = list(_cifar_stem(width, build) if self.stem == "cifar" else _imagenet_stem(self.stem == "deep", build))
        dropped = 1 - (1.0 if build.options.block_survival_prob is None else build.options.block_survival_prob)
        for group, count in enumerate(self.units):
            for i in range(count):
                first = i == 0
                unit = UnitSpec(group=group, width=width << group, stride=2 if group and first else 1, first=first)
                name = f"conv{group + 2}_block{i + 1}"
                # 0 at the first unit, 1 at the last
                depth = (sum(self.units[:group]) + i) / max(sum(self.units) - 1, 1)
                residual = _with_drop(self._unit(unit, build), 1 - dropped * depth)
                blocks += [(name, residual), (f"{name}_{self.relu}", activation_of(build.activation))]
        head = "fc_layer" if self.is_cifar_basic else "predictions"
        return *blocks, ("avg_pool", GlobalAveragePool()), (head, Dense(features=build.num_classes, logits=True))

    @property
    def relu(self) -> str:
        """The suffix in the name of the relu after a unit."""
        return "post_addition_relu" if self.is_cifar_basic else "out"

    def aliases(self, build: BuildOptions) -> tuple[tuple[str, str], ...]:
        """Return other names of split points: both conventions of the TensorFlow 1 code, and PyTorch's modules."""
        named = [("b0", "conv1"), ("stage0", "conv1"), ("reduce_mean", "avg_pool"), ("pool1_pad", "pool1")]
        named += [("fc1", "fc_layer"), ("fc1", "predictions"), ("avgpool", "avg_pool")]
        named += [("fc", "fc_layer"), ("fc", "predictions"), ("pool1_pool", "pool1"), ("maxpool", "pool1")]
        for group, count in enumerate(self.units, start=1):
            for i in range(count):
                unit = f"conv{group + 1}_block{i + 1}"
                for theirs in (f"b{group}/{i}", f"stage{group}/unit{i + 1}"):
                    named += [(theirs, unit), (f"{theirs}/relu", f"{unit}_{self.relu}")]
                named += [(f"layer{group}/{i}", unit), (f"layer{group}/{i}/conv1", unit)]
                for k in (2, 3):
                    named += [(f"layer{group}/{i}/conv{k}", f"{unit}/{k}_conv")]
                named += [(f"layer{group}/{i}/conv2", f"{unit}/layer2_conv")]
        return tuple(named)

    def _unit(self, unit: UnitSpec, build: BuildOptions) -> Residual:
        if self.unit == "bottleneck":
            found = _bottleneck_unit(self._inner(unit, build), unit, build)
        else:
            found = _cifar_unit(unit, build) if self.is_cifar_basic else _basic_unit(unit, build)
        if self.squeezes:
            channels = unit.width * (4 if self.unit == "bottleneck" else 1)
            squeeze = SqueezeExcite(width=near_multiple(channels / 16, least=0.0), activation="relu")
            found = replace(found, body=Chain((*found.body.layers, ("se", squeeze))))
        if self.stem == "deep" and unit.stride > 1:
            (name, conv), *rest = found.shortcut.layers
            assert isinstance(conv, Conv)
            halved = ("0_pool", AveragePool(window=2, stride=2, padding="SAME")), (name, replace(conv, stride=1))
            found = replace(found, shortcut=Chain((*halved, *rest)))
        return found

    def _inner(self, unit: UnitSpec, build: BuildOptions) -> Conv:
        """Return the 3x3 convolution of a bottleneck."""
        stride = 1 if build.dialect.strides_first else unit.stride
        if self.cardinality == 1:
            return build.conv(unit.width, stride=stride)
        groups = build.options.convolution_groups or self.cardinality
        width = groups * (build.options.group_dim or 4) << unit.group
        return replace(build.conv(width, stride=stride), groups=groups)

    def _check_options(self, build: BuildOptions) -> None:
        """Raise ConfigError for options that only other rows of the family support."""
        if build.options.widenet and self.stem != "cifar":
            raise ConfigError(
                f"widenet is on for {build.variant.name}.",
                rule="Only the ResNeXts for CIFAR images have a wide variant.",
                remedy="Omit widenet, or choose a network such as cifar_resnext29.",
            )
        if build.options.shortcut.startswith("pad") and self.unit == "bottleneck":
            raise ConfigError(
                f"shortcut is {build.options.shortcut} for {build.variant.name}.",
                rule="In bottleneck units, a shortcut that changes the shape is a 1x1 convolution.",
                remedy="Omit shortcut, or choose a network with basic units, such as cifar_resnet56.",
            )


def _with_drop(unit: Residual, survival: float) -> Residual:
    """Return a unit whose branch is dropped at random in training (stochastic depth)."""
    if survival == 1:
        return unit
    return replace(unit, body=Chain((*unit.body.layers, ("drop", DropPath(survival)))))


def conv_norm(name: str, conv: Conv, build: BuildOptions, gamma: float = 1.0) -> tuple[Named, Named]:
    """Return a convolution and its norm, named as in the reference."""
    return (f"{name}_conv", conv), build.norm_named(f"{name}_", gamma)


def conv_norm_relu(name: str, conv: Conv, build: BuildOptions) -> tuple[Named, ...]:
    return (f"{name}_conv", conv), *build.norm_act(f"{name}_", f"{name}_relu", build.activation)


def _projection(unit: UnitSpec, channels: int, build: BuildOptions) -> Chain:
    return Chain(conv_norm("0", build.conv(channels, kernel=1, stride=unit.stride), build) if unit.first else ())


def _basic_unit(unit: UnitSpec, build: BuildOptions) -> Residual:
    body = (
        *conv_norm_relu("1", build.conv(unit.width, stride=unit.stride), build),
        *conv_norm("2", build.conv(unit.width), build),
    )
    chosen = build.options.shortcut
    if chosen in ("pad-end", "pad-both"):
        return Residual(body=Chain(body), shortcut=_padded(unit, chosen == "pad-both"))
    first = unit.first and (unit.group > 0 or build.dialect.projects_first_group)
    return Residual(body=Chain(body), shortcut=_projection(replace(unit, first=first), unit.width, build))


def _bottleneck_unit(inner: Conv, unit: UnitSpec, build: BuildOptions) -> Residual:
    """Return a unit; with an identity shortcut it starts as the identity (its last gamma is 0)."""
    stride = unit.stride if build.dialect.strides_first else 1
    body = (
        *conv_norm_relu("1", build.conv(inner.channels, kernel=1, stride=stride), build),
        *conv_norm_relu("2", inner, build),
        *conv_norm("3", build.conv(4 * unit.width, kernel=1), build, 1.0 if unit.first else 0.0),
    )
    return Residual(body=Chain(body), shortcut=_projection(unit, 4 * unit.width, build))


def _cifar_unit(unit: UnitSpec, build: BuildOptions) -> Residual:
    conv1, *rest = conv_norm_relu("layer1", build.conv(unit.width, stride=unit.stride), build)
    halves = unit.stride > 1
    body = (
        ("layer1_conv_ds" if halves else "layer1_conv", conv1[1]),
        *rest,
        *conv_norm("layer2", build.conv(unit.width), build),
    )
    chosen = build.dialect.shortcut if build.options.shortcut == "auto" else build.options.shortcut
    if chosen == "projection":
        conv = build.conv(unit.width, kernel=1, stride=unit.stride)
        shortcut = Chain(conv_norm("shortcut", conv, build) if halves else ())
    else:
        shortcut = _padded(unit, chosen == "pad-both")
    return Residual(body=Chain(body), shortcut=shortcut)


def _padded(unit: UnitSpec, both_sides: bool) -> Chain:
    """Return the shortcut without parameters (option A); the identity if the stride is 1."""
    if unit.stride == 1:
        return Chain()
    return Chain((("shortcut", SubsampleShortcut(channels=unit.width, both_sides=both_sides)),))


def _imagenet_stem(deep: bool, build: BuildOptions) -> tuple[Named, ...]:
    """Return a 7x7/2 convolution, or three 3x3 ones, and a 3x3/2 max pool, padded equally on all sides.

    The reference pads the pool with zeros, which is equivalent to ignoring padding as the relu leaves no negatives.
    """
    conv = Conv(channels=64, kernel=7, stride=2, padding=build.padding(7, symmetric=True), initial=GLOROT_UNIFORM)
    layers = (("conv", conv), *build.norm_act("", "relu", build.activation))
    if deep:
        convs = enumerate((build.conv(32, stride=2), build.conv(32), build.conv(64)), start=1)
        layers = tuple(layer for number, conv in convs for layer in conv_norm_relu(str(number), conv, build))
    pool = MaxPool(window=3, stride=2, padding=build.padding(3, symmetric=True))
    return ("conv1", Chain(layers)), ("pool1", Chain((("pool", pool),)))


def _cifar_stem(width: int, build: BuildOptions) -> tuple[Named, ...]:
    return (("conv1", Chain((("conv", build.conv(width)), *build.norm_act("", "relu", build.activation)))),)


def _table() -> dict[str, ResNet]:
    """Return all rows by name."""
    basic = {"10": (1, 1, 1, 1), "18": (2, 2, 2, 2), "34": (3, 4, 6, 3)}
    bottleneck = {
        "14": (1, 1, 1, 1),
        "26": (2, 2, 2, 2),
        "50": (3, 4, 6, 3),
        "101": (3, 4, 23, 3),
        "152": (3, 8, 36, 3),
    }
    cifar_basic = {str(6 * n + 2): (n, n, n) for n in (1, 2, 3, 5, 7, 9, 18)}
    cifar_bottleneck = {str(9 * n + 2): (n, n, n) for n in (1, 3, 4, 5, 6, 7)}
    rows = {f"resnet{size}": ResNet(units=units, unit="basic") for size, units in basic.items()}
    rows |= {f"resnet{size}": ResNet(units=units) for size, units in bottleneck.items()}
    rows |= {f"resnext{size}": ResNet(units=units, cardinality=32) for size, units in bottleneck.items()}
    rows |= {
        f"resnet{size}d": replace(rows[f"resnet{size}"], stem="deep") for size in ("18", "26", "34", "50", "101", "152")
    }
    for name in (*(f"resnet{size}" for size in ("18", "34", "50", "101", "152")), "resnext50", "resnext101"):
        rows[f"se{name}"] = replace(rows[name], squeezes=True)
    rows |= {
        f"cifar_resnet{size}": ResNet(units=units, unit="basic", stem="cifar") for size, units in cifar_basic.items()
    }
    for size, units in cifar_bottleneck.items():
        twin = "b" if size in cifar_basic else ""  # there is a ResNet-56 with basic units too
        rows[f"cifar_resnet{size}{twin}"] = ResNet(units=units, stem="cifar")
        rows[f"cifar_resnext{size}"] = ResNet(units=units, stem="cifar", cardinality=32)
    return rows


RESNETS: dict[str, ResNet] = _table()


# RegNetX and RegNetY: bottlenecks of one width with grouped 3x3 convolutions, in groups whose widths follow a line.
#
# The widths of all units lie on a line, rounded to powers of a factor; units of equal width form a group. Y has
# squeeze-excite after the 3x3 convolution. Padded as in PyTorch, whatever the dialect.


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
