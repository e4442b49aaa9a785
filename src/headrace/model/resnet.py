"""ResNets and ResNeXts for ImageNet (v1.5) and for CIFAR images.

A residual unit is two blocks: the unit through its addition, and the relu after it, where pipelines are cut.
A layer's name after its block's name is the reference's: `conv2_block1` + `1_conv`.
"""

from dataclasses import dataclass, replace
from typing import Literal

from headrace.core.errors import ConfigError
from headrace.model.build_options import BuildOptions
from headrace.model.composites import Chain, Named, Residual, SubsampleShortcut
from headrace.model.layers import GLOROT_UNIFORM, Conv, Dense, GlobalAveragePool, MaxPool, Relu


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a unit stands: its group, its width, its stride, and whether it is the first of its group."""

    group: int
    width: int
    stride: int
    first: bool


@dataclass(frozen=True, kw_only=True)
class ResNet:
    """One row of the table: units in each group, channels of the first, and what a unit is."""

    units: tuple[int, ...]
    unit: Literal["basic", "bottleneck"] = "bottleneck"
    stem: Literal["imagenet", "cifar"] = "imagenet"
    cardinality: int = 1  # groups of the 3x3 convolution in a bottleneck; above 1 it is a ResNeXt

    @property
    def is_cifar_basic(self) -> bool:
        """Say whether it has the CIFAR ResNets' units, and the names of their layers."""
        return self.stem == "cifar" and self.unit == "basic"

    def blocks(self, build: BuildOptions) -> tuple[Named, ...]:
        """Return the named blocks."""
        self._refuse_foreign(build)
        width = 64 if self.stem == "imagenet" or build.options.widenet else 16
        blocks = list(_imagenet_stem(build) if self.stem == "imagenet" else _cifar_stem(width, build))
        for group, count in enumerate(self.units):
            for i in range(count):
                first = i == 0
                place = Place(group=group, width=width << group, stride=2 if group and first else 1, first=first)
                name = f"conv{group + 2}_block{i + 1}"
                blocks += [(name, self._unit(place, build)), (f"{name}_{self.relu}", Relu())]
        head = "fc_layer" if self.is_cifar_basic else "predictions"
        return *blocks, ("avg_pool", GlobalAveragePool()), (head, Dense(features=build.num_classes, logits=True))

    @property
    def relu(self) -> str:
        """The last word of the name of the relu after a unit."""
        return "post_addition_relu" if self.is_cifar_basic else "out"

    def aliases(self, build: BuildOptions) -> tuple[tuple[str, str], ...]:
        """Return the names of split points in other dialects: both of TensorFlow 1, and PyTorch's modules."""
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

    def _unit(self, place: Place, build: BuildOptions) -> Residual:
        if self.unit == "bottleneck":
            return _bottleneck_unit(self._inner(place, build), place, build)
        return _cifar_unit(place, build) if self.is_cifar_basic else _basic_unit(place, build)

    def _inner(self, place: Place, build: BuildOptions) -> Conv:
        """Return the 3x3 convolution of a bottleneck."""
        stride = 1 if build.dialect.strides_first else place.stride
        if self.cardinality == 1:
            return build.conv(place.width, stride=stride)
        groups = build.options.convolution_groups or self.cardinality
        width = groups * (build.options.group_dim or 4) << place.group
        return replace(build.conv(width, stride=stride), groups=groups)

    def _refuse_foreign(self, build: BuildOptions) -> None:
        """Refuse options that other rows of the family have."""
        if build.options.widenet and self.stem == "imagenet":
            raise ConfigError(
                f"widenet is on for {build.variant.name}.",
                rule="Only the ResNeXts for CIFAR images come wide.",
                remedy="Leave widenet out, or choose a network such as cifar_resnext29.",
            )
        if build.options.shortcut.startswith("pad") and self.unit == "bottleneck":
            raise ConfigError(
                f"shortcut is {build.options.shortcut} for {build.variant.name}.",
                rule="Bottleneck units have a 1x1 convolution on a shortcut that changes shape.",
                remedy="Leave shortcut out, or choose a network with basic units, such as cifar_resnet56.",
            )


def _conv_norm(name: str, conv: Conv, build: BuildOptions, gamma: float = 1.0) -> tuple[Named, Named]:
    """Return a convolution and its norm, named after the reference."""
    return (f"{name}_conv", conv), build.norm_named(f"{name}_", gamma)


def _conv_norm_relu(name: str, conv: Conv, build: BuildOptions) -> tuple[Named, ...]:
    return (f"{name}_conv", conv), *build.norm_act(f"{name}_", f"{name}_relu")


def _projection(place: Place, channels: int, build: BuildOptions) -> Chain:
    return Chain(_conv_norm("0", build.conv(channels, kernel=1, stride=place.stride), build) if place.first else ())


def _basic_unit(place: Place, build: BuildOptions) -> Residual:
    body = (
        *_conv_norm_relu("1", build.conv(place.width, stride=place.stride), build),
        *_conv_norm("2", build.conv(place.width), build),
    )
    chosen = build.options.shortcut
    if chosen in ("pad-end", "pad-both"):
        return Residual(body=Chain(body), shortcut=_padded(place, chosen == "pad-both"))
    first = place.first and (place.group > 0 or build.dialect.projects_first_group)
    return Residual(body=Chain(body), shortcut=_projection(replace(place, first=first), place.width, build))


def _bottleneck_unit(inner: Conv, place: Place, build: BuildOptions) -> Residual:
    """Return a unit; with an identity shortcut it starts as the identity (last gamma 0)."""
    stride = place.stride if build.dialect.strides_first else 1
    body = (
        *_conv_norm_relu("1", build.conv(inner.channels, kernel=1, stride=stride), build),
        *_conv_norm_relu("2", inner, build),
        *_conv_norm("3", build.conv(4 * place.width, kernel=1), build, 1.0 if place.first else 0.0),
    )
    return Residual(body=Chain(body), shortcut=_projection(place, 4 * place.width, build))


def _cifar_unit(place: Place, build: BuildOptions) -> Residual:
    conv1, *rest = _conv_norm_relu("layer1", build.conv(place.width, stride=place.stride), build)
    halves = place.stride > 1
    body = (
        ("layer1_conv_ds" if halves else "layer1_conv", conv1[1]),
        *rest,
        *_conv_norm("layer2", build.conv(place.width), build),
    )
    chosen = build.dialect.shortcut if build.options.shortcut == "auto" else build.options.shortcut
    if chosen == "projection":
        conv = build.conv(place.width, kernel=1, stride=place.stride)
        shortcut = Chain(_conv_norm("shortcut", conv, build) if halves else ())
    else:
        shortcut = _padded(place, chosen == "pad-both")
    return Residual(body=Chain(body), shortcut=shortcut)


def _padded(place: Place, both_sides: bool) -> Chain:
    """Return the shortcut without parameters (option A); the identity where nothing is halved."""
    if place.stride == 1:
        return Chain()
    return Chain((("shortcut", SubsampleShortcut(channels=place.width, both_sides=both_sides)),))


def _imagenet_stem(build: BuildOptions) -> tuple[Named, ...]:
    """Return a 7x7/2 convolution and a 3x3/2 max pool, padded alike on all sides.

    The reference pads the pool with zeros: the same as pixels that never win, since no value after the relu is below 0.
    """
    conv = Conv(channels=64, kernel=7, stride=2, padding=build.padding(7, symmetric=True), initial=GLOROT_UNIFORM)
    pool = MaxPool(window=3, stride=2, padding=build.padding(3, symmetric=True))
    return ("conv1", Chain((("conv", conv), *build.norm_act("", "relu")))), ("pool1", Chain((("pool", pool),)))


def _cifar_stem(width: int, build: BuildOptions) -> tuple[Named, ...]:
    return (("conv1", Chain((("conv", build.conv(width)), *build.norm_act("", "relu")))),)


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
        f"cifar_resnet{size}": ResNet(units=units, unit="basic", stem="cifar") for size, units in cifar_basic.items()
    }
    for size, units in cifar_bottleneck.items():
        twin = "b" if size in cifar_basic else ""  # ResNet-56 has a twin with basic units
        rows[f"cifar_resnet{size}{twin}"] = ResNet(units=units, stem="cifar")
        rows[f"cifar_resnext{size}"] = ResNet(units=units, stem="cifar", cardinality=32)
    return rows


RESNETS: dict[str, ResNet] = _table()
