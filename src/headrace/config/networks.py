"""The networks by name, without what they are made of: family, size, image size, and the options each family has.

`--model resnet --model-size 50`, `--model resnet50` and `--model ResNet-50` name the same. Where ImageNet and CIFAR
both have a size (ResNet-14), small images take the CIFAR network; `cifar_resnet14` and `cifar_resnet` always do.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.core.errors import ConfigError, nearest

SMALL_IMAGE = 64  # pixels: up to here a family's CIFAR networks come first


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One network: its name, the family and size that also name it, and the images and classes it was made for."""

    name: str
    family: str
    size: str = ""
    image_size: int = 224
    num_classes: int = 1000
    norm: Literal["any", "layer_norm", "none"] = "any"  # what an option may choose, or the only one it has
    torch_only: bool = False  # defined by PyTorch's libraries alone: theirs in every dialect

    @property
    def is_small(self) -> bool:
        """Say whether it was made for small images."""
        return self.image_size <= SMALL_IMAGE


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family: its size where none is named (for large and for small images), and its default number of groups."""

    sizes: tuple[str, str]
    groups: tuple[int, int] = (32, 16)


FAMILIES: Mapping[str, Family] = {
    "resnet": Family(sizes=("18", "20")),
    "resnext": Family(sizes=("14", "11")),
    "efficientnet": Family(sizes=("b0", "cifar"), groups=(4, 4)),
    "mobilenet": Family(sizes=("v2", "v2"), groups=(8, 8)),
    "squeezenet": Family(sizes=("", "")),
    "seresnet": Family(sizes=("50", "50")),
    "seresnext": Family(sizes=("50", "50")),
    "convnext": Family(sizes=("tiny", "tiny")),
    "regnet": Family(sizes=("y_400mf", "y_400mf"), groups=(8, 8)),
    "densenet": Family(sizes=("121", "121")),
    "vgg": Family(sizes=("11", "11")),
    "fastnet": Family(sizes=("", "")),
    "toy_model": Family(sizes=("", ""), groups=(4, 4)),
}

_RESIDUAL = ("resnet", "resnext", "seresnet", "seresnext")
# option -> the families it concerns
OPTION_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "convolution_groups": ("resnext", "seresnext"),
    "group_dim": ("resnext", "seresnext", "efficientnet"),
    "widenet": ("resnext",),
    "expand_ratio": ("efficientnet",),
    "width_coefficient": ("efficientnet",),
    "depth_coefficient": ("efficientnet",),
    "depth_divisor": ("efficientnet",),
    "dropout_rate": ("efficientnet", "mobilenet", "squeezenet", "vgg"),
    "block_survival_prob": (*_RESIDUAL, "efficientnet", "convnext"),
    "activation": (*_RESIDUAL, "fastnet"),
    "use_relu": ("efficientnet",),
    "se": ("efficientnet",),
    "top_width": ("efficientnet", "mobilenet"),
    "use_bypass": ("squeezenet",),
    "shortcut": _RESIDUAL,
    "stem": _RESIDUAL,
    "downsample": _RESIDUAL,
    "zero_init_residual": _RESIDUAL,
    "model_dialect": (*_RESIDUAL, "efficientnet", "mobilenet", "convnext", "regnet", "densenet", "vgg"),
}

# what says the norm of a network
NORM_OPTIONS = (
    "norm_layer",
    "group_order",
    "norm_epsilon",
    "proxy_norm",
    "proxy_epsilon",
)

_EFFICIENTNET_IMAGES = {
    **{f"b{i}": image for i, image in enumerate((224, 240, 260, 300, 380, 456, 528, 600))},
    **{"v2_s": 384, "v2_m": 480, "v2_l": 480},
    **{f"v2_b{i}": image for i, image in enumerate((224, 240, 260, 300))},
    **{f"lite{i}": image for i, image in enumerate((224, 240, 260, 280, 300))},
}
_ALIASES: dict[str, str] = {
    "mobilenetv3": "mobilenet_v3_large",
    "squeezenet10": "squeezenet",
    "squeezenet1.0": "squeezenet",
}  # spelled as by _plain


def _cifar(family: str, sizes: Iterable[str]) -> list[Variant]:
    return [
        Variant(name=f"cifar_{family}{size}", family=family, size=size.strip("_"), image_size=32, num_classes=10)
        for size in sizes
    ]


def _imagenet(family: str, sizes: Iterable[str]) -> list[Variant]:
    return [Variant(name=f"{family}{size}", family=family, size=size) for size in sizes]


def _torch(family: str, sizes: Iterable[str], ending: str = "") -> list[Variant]:
    return [
        Variant(name=f"{family}{size}{ending}", family=family, size=size.strip("_"), torch_only=True) for size in sizes
    ]


# by their FLOPs, and the numbers that timm gives them
_REGNET_SIZES = {
    **{"200mf": "002", "400mf": "004", "600mf": "006", "800mf": "008", "1_6gf": "016", "3_2gf": "032"},
    **{"4gf": "040", "6_4gf": "064", "8gf": "080", "12gf": "120", "16gf": "160", "32gf": "320"},
}
_ALIASES |= {
    f"regnet{kind}{number}": f"regnet_{kind}_{size}" for kind in "xy" for size, number in _REGNET_SIZES.items()
}
_ROWS = (
    Variant(name="toy_model", family="toy_model", image_size=32, num_classes=10, norm="none"),
    Variant(name="toy_model_bn", family="toy_model", size="bn", image_size=32, num_classes=10),
    *_cifar("resnet", ("8", "14", "20", "32", "44", "56", "110")),
    *_cifar("resnet", ("11", "29", "38", "47", "56b", "65")),
    *_cifar("resnext", ("11", "29", "38", "47", "56", "65")),
    *_imagenet("resnet", ("10", "14", "18", "26", "34", "50", "101", "152")),
    *_imagenet("resnext", ("14", "26", "50", "101", "152")),
    *_torch("resnet", ("18d", "26d", "34d", "50d", "101d", "152d")),
    *_torch("seresnet", ("18", "34", "50", "101", "152")),
    *_torch("seresnext", ("50", "101")),
    Variant(name="efficientnet_cifar", family="efficientnet", size="cifar", image_size=32, num_classes=10),
    *(
        Variant(name=f"efficientnet_{size}", family="efficientnet", size=size, image_size=image)
        for size, image in _EFFICIENTNET_IMAGES.items()
    ),
    *(Variant(name=f"mobilenet_{size}", family="mobilenet", size=size) for size in ("v2", "v3_small", "v3_large")),
    Variant(name="squeezenet", family="squeezenet", norm="none"),
    *_cifar("fastnet", ("", "_large")),
    *(
        Variant(name=f"convnext_{size}", family="convnext", size=size, norm="layer_norm", torch_only=True)
        for size in ("tiny", "small", "base", "large")
    ),
    *_torch("regnet", (f"_{kind}_{size}" for kind in "xy" for size in _REGNET_SIZES)),
    *_torch("densenet", ("121", "169", "201")),
    *_torch("vgg", ("11", "13", "16", "19"), "_bn"),
)
VARIANTS: Mapping[str, Variant] = {row.name: row for row in _ROWS}


def find_variant(name: str, size: str | None = None, image_size: int | None = None) -> Variant:
    """Return the network that a name, or a family and a size, means; refuse what is unknown or contradicts itself."""
    family = _family(name)
    if family is None:
        return _exact(name, size)
    rows = [row for row in _ROWS if row.family == family and (row.is_small or not _plain(name).startswith("cifar"))]
    small = all(row.is_small for row in rows) or (image_size is not None and image_size <= SMALL_IMAGE)
    wanted = _plain(FAMILIES[family].sizes[small] if size is None else size)
    found = [row for row in rows if wanted in _size_spellings(row)]
    if not found:
        sizes = ", ".join(dict.fromkeys(row.size for row in rows if row.size))
        rule = f"{family} has the sizes {sizes}." if sizes else f"{family} has one size."
        raise ConfigError(f"{family} has no size {size!r}.", rule=rule, remedy="`headrace models` lists all networks.")
    return min(found, key=lambda row: row.is_small != small)


# Beginnings of the names of networks that people look for, and that are none of ours.
_TRANSFORMERS = ("vit", "deit", "swin", "beit", "cait", "eva02", "xcit", "pvt_", "dinov2", "mixer", "coatnet", "maxvit")


def _exact(name: str, size: str | None) -> Variant:
    variant = _by_name(name)
    if variant is None:
        guess = nearest(name, [*VARIANTS, *FAMILIES])
        remedy = f"Did you mean {guess}?" if guess else "`headrace models` lists all networks."
        if any(word in name.lower() for word in _TRANSFORMERS):
            rule, remedy = (
                "Networks here are convolutional: there are no transformers.",
                "`headrace models` lists them.",
            )
            raise ConfigError(f"There is no model named {name!r}.", rule=rule, remedy=remedy)
        raise ConfigError(f"There is no model named {name!r}.", remedy=remedy)
    if size is not None and _plain(size) not in _size_spellings(variant):
        raise ConfigError(
            f"model_name {name} and model_size {size} name different networks.",
            rule=f"{variant.name} says its size itself.",
            remedy=f"Leave one of them out, or write --model {variant.family} --model-size {size}.",
        )
    return variant


def family_of(name: str) -> str | None:
    """Return the family that a name belongs to, or None."""
    exact = _by_name(name)
    return exact.family if exact else _family(name)


def _by_name(name: str) -> Variant | None:
    plain = _plain(name)
    return _BY_PLAIN_NAME.get(_plain(_ALIASES.get(plain, plain)))


def _family(name: str) -> str | None:
    return _FAMILY_BY_PLAIN_NAME.get(_plain(name).removeprefix("cifar"))


def _size_spellings(row: Variant) -> set[str]:
    """Return the size as people write it: EfficientNet's B4 is also 4, ConvNeXt's tiny T, ResNeXt's 56 also 56b."""
    size = _plain(row.size)
    more = {"56b"} if row.name == "cifar_resnext56" else {size[0]} if row.family == "convnext" else set[str]()
    return {size, size.removeprefix("b") or size} | more


def _plain(name: str) -> str:
    # between digits it is a decimal point: regnet_x_1_6gf is not regnet_x_16gf
    pointed = re.sub(r"(?<=\d)[_-](?=\d)", ".", str(name).lower())
    return pointed.replace("-", "").replace("_", "").replace(" ", "")


_BY_PLAIN_NAME = {_plain(row.name): row for row in _ROWS}
_FAMILY_BY_PLAIN_NAME = {_plain(family): family for family in FAMILIES}
