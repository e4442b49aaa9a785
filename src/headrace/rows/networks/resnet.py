"""ResNets and ResNeXts for ImageNet and CIFAR images, with squeeze-excite or deep stems."""

from dataclasses import dataclass
from typing import Any, Literal

from headrace.rows.network import Family, NetworkRow


@dataclass(frozen=True, kw_only=True)
class ResNetRow(NetworkRow):
    """One ResNet: the number of units in each group, and the kind of unit and stem."""

    units: tuple[int, ...]
    unit: Literal["basic", "bottleneck"] = "bottleneck"
    stem: Literal["imagenet", "deep", "cifar"] = "imagenet"  # deep is D, where average pools halve the shortcuts too
    cardinality: int = 1  # groups of the 3x3 convolution in a bottleneck; above 1 it is a ResNeXt
    squeezes: bool = False

    @property
    def is_cifar_basic(self) -> bool:
        """Return whether it has the units of CIFAR ResNets, which name their layers differently."""
        return self.stem == "cifar" and self.unit == "basic"


def _cifar(family: str, size: str, num_units: int, **more: Any) -> ResNetRow:
    """Return a row for CIFAR images: three groups of as many units."""
    units = (num_units,) * 3
    small = {"image_size": 32, "num_classes": 10, "stem": "cifar", **more}
    return ResNetRow(name=f"cifar_{family}{size}", family=family, size=size, units=units, **small)


def _row(family: str, size: str, *units: int, **more: Any) -> ResNetRow:
    return ResNetRow(name=f"{family}{size}", family=family, size=size, units=units, **more)


_MODULE = "headrace.model.families.resnet"
_OPTIONS = (
    *("block_survival_prob", "activation", "shortcut", "stem", "downsample", "zero_init_residual"),
    "model_dialect",
)
_DEEP = {"stem": "deep", "torch_only": True}
_SQUEEZES = {"squeezes": True, "torch_only": True}

RESNET = Family(
    name="resnet",
    module=_MODULE,
    sizes=("18", "20"),
    options=_OPTIONS,
    rows=(
        _cifar("resnet", "8", 1, unit="basic"),
        _cifar("resnet", "14", 2, unit="basic"),
        _cifar("resnet", "20", 3, unit="basic"),
        _cifar("resnet", "32", 5, unit="basic"),
        _cifar("resnet", "44", 7, unit="basic"),
        _cifar("resnet", "56", 9, unit="basic"),
        _cifar("resnet", "110", 18, unit="basic"),
        _cifar("resnet", "11", 1),
        _cifar("resnet", "29", 3),
        _cifar("resnet", "38", 4),
        _cifar("resnet", "47", 5),
        _cifar("resnet", "56b", 6),
        _cifar("resnet", "65", 7),
        _row("resnet", "10", 1, 1, 1, 1, unit="basic"),
        _row("resnet", "14", 1, 1, 1, 1),
        _row("resnet", "18", 2, 2, 2, 2, unit="basic"),
        _row("resnet", "26", 2, 2, 2, 2),
        _row("resnet", "34", 3, 4, 6, 3, unit="basic"),
        _row("resnet", "50", 3, 4, 6, 3),
        _row("resnet", "101", 3, 4, 23, 3),
        _row("resnet", "152", 3, 8, 36, 3),
        _row("resnet", "200", 3, 24, 36, 3),
        _row("resnet", "18d", 2, 2, 2, 2, unit="basic", **_DEEP),
        _row("resnet", "26d", 2, 2, 2, 2, **_DEEP),
        _row("resnet", "34d", 3, 4, 6, 3, unit="basic", **_DEEP),
        _row("resnet", "50d", 3, 4, 6, 3, **_DEEP),
        _row("resnet", "101d", 3, 4, 23, 3, **_DEEP),
        _row("resnet", "152d", 3, 8, 36, 3, **_DEEP),
    ),
)
RESNEXT = Family(
    name="resnext",
    module=_MODULE,
    sizes=("14", "11"),
    options=(*_OPTIONS, "convolution_groups", "group_dim", "widenet"),
    rows=(
        _cifar("resnext", "11", 1, cardinality=32),
        _cifar("resnext", "29", 3, cardinality=32),
        _cifar("resnext", "38", 4, cardinality=32),
        _cifar("resnext", "47", 5, cardinality=32),
        _cifar("resnext", "56", 6, cardinality=32, other_sizes=("56b",)),
        _cifar("resnext", "65", 7, cardinality=32),
        _row("resnext", "14", 1, 1, 1, 1, cardinality=32),
        _row("resnext", "26", 2, 2, 2, 2, cardinality=32),
        _row("resnext", "50", 3, 4, 6, 3, cardinality=32),
        _row("resnext", "101", 3, 4, 23, 3, cardinality=32),
        _row("resnext", "152", 3, 8, 36, 3, cardinality=32),
    ),
)
SERESNET = Family(
    name="seresnet",
    module=_MODULE,
    sizes=("50", "50"),
    options=_OPTIONS,
    rows=(
        _row("seresnet", "18", 2, 2, 2, 2, unit="basic", **_SQUEEZES),
        _row("seresnet", "34", 3, 4, 6, 3, unit="basic", **_SQUEEZES),
        _row("seresnet", "50", 3, 4, 6, 3, **_SQUEEZES),
        _row("seresnet", "101", 3, 4, 23, 3, **_SQUEEZES),
        _row("seresnet", "152", 3, 8, 36, 3, **_SQUEEZES),
    ),
)
SERESNEXT = Family(
    name="seresnext",
    module=_MODULE,
    sizes=("50", "50"),
    options=(*_OPTIONS, "convolution_groups", "group_dim"),
    rows=(
        _row("seresnext", "50", 3, 4, 6, 3, cardinality=32, **_SQUEEZES),
        _row("seresnext", "101", 3, 4, 23, 3, cardinality=32, **_SQUEEZES),
    ),
)
