"""The section of the schema that describes the network, and the networks by name: family, size, image size, options."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.config.field import COMMAND_LINE, Facts, Remark, Rule, idle, option
from headrace.core.errors import ConfigError, nearest
from headrace.rows.values import PLACE, above, at_least, between, factors_by_pattern, fraction, regular_expressions

# The networks by name, without what they are made of: family, size, image size, and the options each family has.
#
# `--model resnet --model-size 50`, `--model resnet50` and `--model ResNet-50` name the same. Where ImageNet and CIFAR
# both have a size (ResNet-14), small images take the CIFAR network; `cifar_resnet14` and `cifar_resnet` always do.


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
    "block_survival_prob": ("resnet", "resnext", "seresnet", "seresnext", "efficientnet", "convnext"),
    "activation": ("resnet", "resnext", "seresnet", "seresnext"),
    "use_relu": ("efficientnet",),
    "se": ("efficientnet",),
    "top_width": ("efficientnet", "mobilenet"),
    "use_bypass": ("squeezenet",),
    "shortcut": ("resnet",),
    "model_dialect": (
        *("resnet", "resnext", "seresnet", "seresnext", "efficientnet", "mobilenet", "convnext", "regnet", "densenet"),
        "vgg",
    ),
}

# what says the norm of a network
NORM_OPTIONS = (
    "norm_layer",
    "batch_norm",
    "group_norm",
    "groups",
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
        Variant(name=f"cifar_{family}{size}", family=family, size=size, image_size=32, num_classes=10) for size in sizes
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
    *_cifar("fastnet", ("",)),
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


def _exact(name: str, size: str | None) -> Variant:
    variant = _by_name(name)
    if variant is None:
        guess = nearest(name, [*VARIANTS, *FAMILIES])
        remedy = f"Did you mean {guess}?" if guess else "`headrace models` lists all networks."
        raise ConfigError(f"There is no model named {name!r}.", remedy=remedy)
    if size is not None and _plain(size) not in _size_spellings(variant):
        raise ConfigError(
            f"model_name {name} and model_size {size} name different networks.",
            rule=f"{variant.name} says its size itself.",
            remedy=f"Leave one of them out, or write --model {variant.family} --model-size {size}.",
        )
    return variant


def variant_of(model: "Model") -> Variant | None:
    """Return the network of a model section, or None where the name is not in the table."""
    try:
        return find_variant(model.model_name, model.model_size)
    except ConfigError:
        return None


def family_of(name: str) -> str | None:
    """Return the family that a name belongs to, or None."""
    exact = _by_name(name)
    return exact.family if exact else _family(name)


def norm_choice(model: "Model") -> dict[str, Any]:
    """Return the norm as a `norm_layer` mapping, whichever of the options says it."""
    variant = variant_of(model)
    if variant and variant.norm != "any":
        return {"name": variant.norm}
    if not (model.group_norm or model.groups is not None):
        return dict(model.norm_layer)
    family, small = (variant.family, variant.is_small) if variant else ("resnet", False)
    return {"name": "group_norm", "num_groups": model.groups or FAMILIES[family].groups[small]}


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


# The section of the schema that describes the network.
#
# An option that concerns some families only is unset by default, which means the family's own; VARIANTS says
# which.


# ruff: noqa: RUF009 (option() makes a dataclass field, with a fresh copy of a mapping each time)


DIALECTS = ("reference", "torchvision", "timm", "keras")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network."""

    model_name: str = option(
        "cifar_resnet8",
        "Network to train, or a family together with model_size; `headrace models` lists them.",
        aliases=("model",),
    )
    model_size: str | None = option(None, "Size of the network where model_name names a family: 50, B4, v3_small.")
    model_dialect: str = option(
        "reference",
        "Whose padding, epsilon and shortcuts to use where definitions of a network differ, so that its weights fit.",
        choices=DIALECTS,
        chosen="that of the weights, else reference",
    )
    norm_layer: dict[str, Any] = option(
        {"name": "batch_norm"},
        "Normalisation layer: name batch_norm, group_norm (with num_groups or channels_per_group), layer_norm or none.",
    )
    batch_norm: bool = option(False, "Use batch norm; short for norm_layer.")
    group_norm: bool = option(
        False, "Use group norm with the number of groups that suits the family; short for norm_layer."
    )
    groups: int | None = option(
        None, "Use group norm with this number of groups; short for norm_layer.", check=at_least(1)
    )
    group_order: str = option(
        "contiguous",
        "Which channels form a group: neighbours, or (strided) those with the same index modulo the number of groups.",
        choices=("contiguous", "strided"),
    )
    proxy_norm: bool = option(False, "Normalise activations after group or layer norm by a Gaussian proxy's moments.")
    proxy_epsilon: float = option(0.03, "Epsilon added to the variances of the proxy.", check=above(0))
    bn_momentum: float = option(
        0.97,
        "Fraction of batch norm's running statistics that is kept at each step.",
        aliases=("bn_decay",),
        check=between(0, 1),
    )
    norm_epsilon: float | None = option(
        None, "Epsilon added to variances in normalisation; unset means the model's own.", check=at_least(0)
    )
    stable_norm: bool = option(False, "Compute variances in two passes: slower but more accurate.")
    dbn_replica_group_size: int = option(
        1,
        "Number of consecutive replicas that share batch-norm statistics; 1 means each has its own.",
        aliases=("bn_span",),
        check=at_least(1),
    )
    shortcut: str = option(
        "auto",
        "Shortcut of a basic ResNet unit that changes shape: zero channels at the end or on both sides, or a 1x1 "
        "convolution.",
        choices=("auto", "pad-end", "pad-both", "projection"),
    )
    convolution_groups: int | None = option(
        None, "Groups of a ResNeXt's 3x3 convolutions, its cardinality; unset means 32.", check=at_least(1)
    )
    group_dim: int | None = option(
        None, "Channels of a convolution's group; unset means 4 for ResNeXt, 1 for EfficientNet.", check=at_least(1)
    )
    widenet: bool = option(False, "Use the wide CIFAR ResNeXts, with four times the channels.")
    expand_ratio: int | None = option(
        None, "Expansion ratio inside EfficientNet blocks; unset means 6.", check=at_least(1)
    )
    width_coefficient: float | None = option(None, "Factor on an EfficientNet's channels.", check=above(0))
    depth_coefficient: float | None = option(None, "Factor on the number of an EfficientNet's blocks.", check=above(0))
    depth_divisor: int | None = option(
        None, "Round an EfficientNet's channels to multiples of this; unset means 8.", check=at_least(1)
    )
    dropout_rate: float | None = option(None, "Fraction of features dropped before the classifier.", check=fraction)
    block_survival_prob: float | None = option(
        None,
        "Probability, at the last block, that a residual branch is kept in training (stochastic depth); unset means "
        "the network's own.",
        check=lambda value: "" if 0 < value <= 1 else "must be more than 0 and at most 1",
    )
    activation: str | None = option(
        None,
        "Activation function of a ResNet; unset means relu.",
        choices=("relu", "swish", "mish", "gelu", "hard_swish"),
        synonyms=(("silu", "swish"),),
    )
    use_relu: bool = option(False, "Use ReLU instead of swish in EfficientNets.")
    se: bool = option(True, "Use squeeze-and-excite in EfficientNets.")
    top_width: int | None = option(
        None,
        "Channels of the layer before the classifier, 0 for no such layer; unset means the network's own.",
        check=at_least(0),
    )
    use_bypass: bool = option(False, "Add shortcuts around every second fire module of a SqueezeNet.")


def _differs(facts: Facts, name: str) -> bool:
    return getattr(facts.config.model, name) != getattr(Model(), name)


def _foreign(facts: Facts, option: str) -> bool:
    variant = variant_of(facts.config.model)
    return variant is not None and _differs(facts, option) and variant.family not in OPTION_FAMILIES[option]


def _family_rule(option: str) -> Rule:
    families = " and ".join(OPTION_FAMILIES[option])
    return Rule(
        broken=lambda facts: _foreign(facts, option),
        problem=lambda facts: f"{facts.describe(option)} does not concern {facts.describe('model_name')}.",
        rule=f"{option} is for {families}.",
        remedy=f"Leave {option} out, or choose a network of that family.",
    )


def _needless_norm(facts: Facts) -> str:
    """Return the norm option given for a network whose norm cannot be chosen, if any."""
    variant = variant_of(facts.config.model)
    if variant is None or variant.norm == "any":
        return ""
    allowed = ("norm_epsilon",) if variant.norm != "none" else ()
    names = (*NORM_OPTIONS, "stable_norm")
    return next((name for name in names if name not in allowed and _differs(facts, name)), "")


def _contradicting_norms(facts: Facts) -> str:
    """Return the two options that say different norms, if any."""
    model = facts.config.model
    group = "groups" if model.groups is not None else "group_norm" if model.group_norm else ""
    if model.batch_norm and group:
        return f"{facts.describe('batch_norm')} and {facts.describe(group)}"
    said = model.norm_layer["name"].removeprefix("custom_")
    if _differs(facts, "norm_layer") and (group or (model.batch_norm and said != "batch_norm")):
        return f"{facts.describe('norm_layer')} and {facts.describe(group or 'batch_norm')}"
    return ""


def _norm_name(facts: Facts) -> str:
    return norm_choice(facts.config.model)["name"]


MODEL_RULES = (
    *(_family_rule(option) for option in OPTION_FAMILIES),
    Rule(
        broken=lambda facts: bool(_needless_norm(facts)),
        problem=lambda facts: f"{facts.describe(_needless_norm(facts))} for {facts.describe('model_name')}.",
        rule="This network has no norm layers that an option could choose.",
        remedy="Leave the option out.",
    ),
    Rule(
        broken=lambda facts: bool(_contradicting_norms(facts)),
        problem=lambda facts: f"Two norms are asked for: {_contradicting_norms(facts)}.",
        rule="A network has one kind of norm; groups says group norm.",
        remedy="Leave one of them out.",
    ),
    Rule(
        broken=lambda facts: _differs(facts, "group_order") and _norm_name(facts) != "group_norm",
        problem=lambda facts: f"{facts.describe('group_order')} without group norm.",
        rule="Only group norm has groups of channels.",
        remedy="Add --group-norm, or leave group_order out.",
    ),
    Rule(
        broken=lambda facts: facts.config.model.proxy_norm and _norm_name(facts) not in ("group_norm", "layer_norm"),
        problem=lambda facts: f"{facts.describe('proxy_norm')} with {_norm_name(facts)}.",
        rule="Proxy norm goes with norms that look at one image at a time: group_norm, layer_norm.",
        remedy="Add --group-norm, or leave proxy_norm out.",
    ),
    Rule(
        broken=lambda facts: _differs(facts, "proxy_epsilon") and not facts.config.model.proxy_norm,
        problem=lambda facts: f"{facts.describe('proxy_epsilon')} without proxy norm.",
        rule="It belongs to proxy norm.",
        remedy="Add --proxy-norm, or leave proxy_epsilon out.",
    ),
    Rule(
        broken=lambda facts: (
            facts.config.model.dbn_replica_group_size > 1
            and _norm_name(facts) not in ("batch_norm", "custom_batch_norm")
        ),
        problem=lambda facts: f"{facts.describe('dbn_replica_group_size')} with {_norm_name(facts)}.",
        rule="Only batch norm has statistics to share between replicas.",
        remedy="Leave dbn_replica_group_size out.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights that training starts from, and which of them it trains."""

    weights: str | None = option(
        None,
        "Weights to start from: a name that `headrace models --weights` lists, hf:OWNER/NAME, an address, a file "
        "(torch's .pth, .safetensors, Keras' .h5), a Headrace checkpoint or run. Their network and preprocessing come "
        "with them.",
        aliases=("init_from", "init_path"),
        kind=PLACE,
    )
    init_ema: bool = option(False, "Use the averaged weights (EMA) of a checkpoint instead of the raw ones.")
    init_min_loaded: float = option(
        0.9, "Fraction of the network's weights, and of the file's, that must match.", check=between(0, 1)
    )
    freeze: tuple[str, ...] = option(
        (),
        "Regular expressions; weights whose name matches one are frozen, and so are their batch-norm statistics. The "
        "word backbone stands for all but the last layer.",
        check=regular_expressions,
    )
    variable_filter: tuple[str, ...] = option(
        (), "Substrings; only weights whose name contains one of them are trained, all others are frozen."
    )
    layer_lr: dict[str, Any] = option(
        {},
        "Factors on the learning rate by regular expression, such as ^conv1/=0.1, or by the word backbone; the first "
        "match counts.",
        check=factors_by_pattern,
    )


def _names_nothing(name: str) -> Rule:
    """Refuse an option that was typed without a value: the run would train all weights."""
    return Rule(
        broken=lambda facts: facts.origins.get(name) == COMMAND_LINE and not getattr(facts.config.weights, name),
        problem=lambda facts: f"--{name.replace('_', '-')} has no value.",
        rule="It names the weights that it is about; without it all weights are trained.",
        remedy=f"Give one, such as --{name.replace('_', '-')} {'backbone' if name == 'freeze' else 'predictions'}.",
    )


WEIGHT_RULES = tuple(_names_nothing(name) for name in ("freeze", "variable_filter"))


def _no_weights(facts: Facts) -> bool:
    return facts.config.weights.weights is None and not facts.has_weights


WEIGHT_NOTES = tuple(
    idle(name, "without weights", lambda facts, name=name: facts.given(name) and _no_weights(facts))
    for name in ("init_ema", "init_min_loaded")
)
# Of a new run: one that is resumed has its weights from a checkpoint.
WEIGHTS_AT_START = tuple(
    Remark(
        when=lambda facts, name=name: bool(getattr(facts.config.weights, name)) and _no_weights(facts),
        text=lambda facts, name=name: f"{facts.describe(name)} keeps random weights as they are: no weights are given.",
        option=name,
        remedy=f"Name the weights to start from with --weights, or leave {name} out.",
    )
    for name in ("freeze", "variable_filter")
)
