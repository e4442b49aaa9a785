"""ResNets: the ImageNet ones (v1.5, a projection in the first unit of every group) and the CIFAR ones (depth 6n+2).

A residual unit is two blocks: the unit through its addition, and the relu after it, where pipelines are cut.
A layer's name after its block's name is the reference's: `conv2_block1` + `1_conv`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.model.composites import Chain, Named, Residual, SubsampleShortcut
from headrace.model.initial import GLOROT_UNIFORM
from headrace.model.layers import Conv, Dense, GlobalAveragePool, MaxPool, Relu
from headrace.model.norm import Norm, NormSpec


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a unit stands: its group's width, its stride, and whether it is the first of its group."""

    width: int
    stride: int
    first: bool


@dataclass(frozen=True, kw_only=True)
class Style:
    """What the units of a ResNet look like, and the names around them."""

    unit: Callable[[Place, NormSpec], Residual]
    stem: Callable[[int, NormSpec], tuple[Named, ...]]
    relu: str
    head: str


@dataclass(frozen=True, kw_only=True)
class ResNet:
    """One row of the table: units in each group, width of each group."""

    style: Style
    units: tuple[int, ...]
    widths: tuple[int, ...]
    image_size: int
    num_classes: int

    def blocks(self, norm: NormSpec, num_classes: int) -> tuple[Named, ...]:
        """Return the named blocks."""
        blocks = list(self.style.stem(self.widths[0], norm))
        for group, (count, width) in enumerate(zip(self.units, self.widths, strict=True)):
            for i in range(count):
                name = f"conv{group + 2}_block{i + 1}"
                place = Place(width=width, stride=2 if group > 0 and i == 0 else 1, first=i == 0)
                blocks += [(name, self.style.unit(place, norm)), (f"{name}_{self.style.relu}", Relu())]
        return *blocks, ("avg_pool", GlobalAveragePool()), (self.style.head, Dense(features=num_classes, logits=True))


def _conv_norm(name: str, conv: Conv, norm: NormSpec, gamma: float = 1.0) -> tuple[Named, Named]:
    """Return a convolution and its norm, named after the reference."""
    return (f"{name}_conv", conv), (f"{name}_{norm.suffix}", Norm(spec=norm, gamma=gamma))


def _projection(place: Place, channels: int, norm: NormSpec) -> Chain:
    return Chain(_conv_norm("0", Conv(channels=channels, kernel=1, stride=place.stride), norm) if place.first else ())


def _basic_unit(place: Place, norm: NormSpec) -> Residual:
    body = (
        *_conv_norm("1", Conv(channels=place.width, stride=place.stride), norm),
        ("1_relu", Relu()),
        *_conv_norm("2", Conv(channels=place.width), norm),
    )
    return Residual(body=Chain(body), shortcut=_projection(place, place.width, norm))


def _bottleneck_unit(place: Place, norm: NormSpec) -> Residual:
    """Stride on the 3x3 (v1.5); units with an identity shortcut start as the identity (last gamma 0)."""
    body = (
        *_conv_norm("1", Conv(channels=place.width, kernel=1), norm),
        ("1_relu", Relu()),
        *_conv_norm("2", Conv(channels=place.width, stride=place.stride), norm),
        ("2_relu", Relu()),
        *_conv_norm("3", Conv(channels=4 * place.width, kernel=1), norm, 1.0 if place.first else 0.0),
    )
    return Residual(body=Chain(body), shortcut=_projection(place, 4 * place.width, norm))


def _cifar_unit(place: Place, norm: NormSpec) -> Residual:
    (conv, conv1), norm1 = _conv_norm("layer1", Conv(channels=place.width, stride=place.stride), norm)
    halves = place.stride > 1
    body = (
        (f"{conv}_ds" if halves else conv, conv1),
        norm1,
        ("layer1_relu", Relu()),
        *_conv_norm("layer2", Conv(channels=place.width), norm),
    )
    shortcut = Chain((("shortcut", SubsampleShortcut(channels=place.width)),)) if halves else Chain()
    return Residual(body=Chain(body), shortcut=shortcut)


def _imagenet_stem(width: int, norm: NormSpec) -> tuple[Named, ...]:
    """Return a 7x7/2 convolution and a 3x3/2 max pool, padded alike on all sides.

    The reference pads the pool with zeros: the same as pixels that never win, since no value after the relu is below 0.
    """
    conv = Conv(channels=width, kernel=7, stride=2, padding=((3, 3), (3, 3)), initial=GLOROT_UNIFORM)
    norm1 = (norm.suffix, Norm(spec=norm))
    pool = MaxPool(window=3, stride=2, padding=((1, 1), (1, 1)))
    return ("conv1", Chain((("conv", conv), norm1, ("relu", Relu())))), ("pool1", Chain((("pool", pool),)))


def _cifar_stem(width: int, norm: NormSpec) -> tuple[Named, ...]:
    return (("conv1", Chain((("conv", Conv(channels=width)), (norm.suffix, Norm(spec=norm)), ("relu", Relu())))),)


_BASIC = Style(unit=_basic_unit, stem=_imagenet_stem, relu="out", head="predictions")
_BOTTLENECK = Style(unit=_bottleneck_unit, stem=_imagenet_stem, relu="out", head="predictions")
_CIFAR = Style(unit=_cifar_unit, stem=_cifar_stem, relu="post_addition_relu", head="fc_layer")


def _imagenet(style: Style, *units: int) -> ResNet:
    return ResNet(style=style, units=units, widths=(64, 128, 256, 512), image_size=224, num_classes=1000)


def _cifar(n: int) -> ResNet:
    return ResNet(style=_CIFAR, units=(n, n, n), widths=(16, 32, 64), image_size=32, num_classes=10)


RESNETS: dict[str, ResNet] = {
    "cifar_resnet8": _cifar(1),
    "cifar_resnet20": _cifar(3),
    "cifar_resnet32": _cifar(5),
    "cifar_resnet44": _cifar(7),
    "cifar_resnet56": _cifar(9),
    "resnet18": _imagenet(_BASIC, 2, 2, 2, 2),
    "resnet34": _imagenet(_BASIC, 3, 4, 6, 3),
    "resnet50": _imagenet(_BOTTLENECK, 3, 4, 6, 3),
}
