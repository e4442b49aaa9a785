"""Find a network by what people call it.

`--model resnet --model-size 50`, `--model resnet50` and `--model ResNet-50` name the same. Where ImageNet and CIFAR
both have a size (ResNet-14), small images take the CIFAR network; `cifar_resnet14` and `cifar_resnet` always do.
"""

import re

from headrace.core.errors import ConfigError, nearest
from headrace.rows.network import SMALL_IMAGE, NetworkRow
from headrace.rows.networks import FAMILIES, NETWORKS

# what says the norm of a network
NORM_OPTIONS = (
    "norm_layer",
    "group_order",
    "norm_epsilon",
    "proxy_norm",
    "proxy_epsilon",
)


def find_variant(name: str, size: str | None = None, image_size: int | None = None) -> NetworkRow:
    """Return the network that a name, or a family and a size, means; refuse what is unknown or contradicts itself."""
    family = _family(name)
    if family is None:
        return _exact(name, size)
    rows = [row for row in FAMILIES[family].rows if row.is_small or not _plain(name).startswith("cifar")]
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


def _exact(name: str, size: str | None) -> NetworkRow:
    variant = _by_name(name)
    if variant is None:
        guess = nearest(name, [*NETWORKS, *FAMILIES])
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


def _by_name(name: str) -> NetworkRow | None:
    return _BY_PLAIN_NAME.get(_plain(name))


def _family(name: str) -> str | None:
    return _FAMILY_BY_PLAIN_NAME.get(_plain(name).removeprefix("cifar"))


def _size_spellings(row: NetworkRow) -> set[str]:
    """Return the size as people write it: EfficientNet's B4 is also 4, ConvNeXt's tiny T, ResNeXt's 56 also 56b."""
    return set(map(_plain, (row.size, *row.other_sizes)))


def _plain(name: str) -> str:
    # between digits it is a decimal point: regnet_x_1_6gf is not regnet_x_16gf
    pointed = re.sub(r"(?<=\d)[_-](?=\d)", ".", str(name).lower())
    return pointed.replace("-", "").replace("_", "").replace(" ", "")


_BY_PLAIN_NAME = {_plain(name): row for row in NETWORKS.values() for name in (row.name, *row.other_names)}
_FAMILY_BY_PLAIN_NAME = {_plain(family): family for family in FAMILIES}
