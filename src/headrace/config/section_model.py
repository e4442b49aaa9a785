"""The section of the schema that describes the network.

An option that concerns some families only is unset by default, which means the family's own; NETWORKS says which.
"""

from dataclasses import dataclass
from typing import Any

from headrace.config.field import COMMAND_LINE, Facts, Remark, Rule, conflict, idle, option
from headrace.config.networks import NORM_OPTIONS, find_variant
from headrace.core.errors import ConfigError
from headrace.rows.network import NetworkRow
from headrace.rows.networks import FAMILIES, OPTION_FAMILIES
from headrace.rows.values import PLACE, above, at_least, between, factors_by_pattern, fraction, regular_expressions

# ruff: noqa: RUF009 (option() makes a dataclass field, with a fresh copy of a mapping each time)


def variant_of(model: "ModelSection") -> NetworkRow | None:
    """Return the network of a model section, or None where the name is not in the table."""
    try:
        return find_variant(model.model_name)
    except ConfigError:
        return None


def norm_choice(model: "ModelSection") -> dict[str, Any]:
    """Return the norm of the network: the only one that it has, or `norm_layer` with the family's number of groups."""
    variant = variant_of(model)
    if variant and variant.norm != "any":
        return {"name": variant.norm}
    if model.norm_layer != {"name": "group_norm"}:
        return dict(model.norm_layer)
    family, small = (variant.family, variant.is_small) if variant else ("resnet", False)
    return {"name": "group_norm", "num_groups": FAMILIES[family].groups[small]}


DIALECTS = ("reference", "torchvision", "timm", "keras")


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The network."""

    model_name: str = option(
        "cifar_resnet8",
        "Network to train, or a family together with model_size; `headrace models` lists them.",
        aliases=("model",),
    )
    model_dialect: str = option(
        "reference",
        "Whose padding, epsilon and shortcuts to use where definitions of a network differ, so that its weights fit.",
        choices=DIALECTS,
        chosen="that of the weights, else reference",
    )
    norm_layer: dict[str, Any] = option(
        {"name": "batch_norm"},
        "Normalisation layer: name batch_norm, group_norm (with num_groups or channels_per_group; with neither, the "
        "number of groups that suits the family), layer_norm or none.",
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
    bn_momentum_start: float | None = option(
        None,
        "Fraction kept at the first steps; it rises with the steps so far, as 1 - 60 / steps, to bn_momentum. Unset "
        "means bn_momentum from the start.",
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
        "Shortcut of a ResNet unit that changes shape: a 1x1 convolution (projection), the mean of 2x2 pixels before "
        "it (pool), or, in basic units, zero channels at the end or on both sides.",
        choices=("auto", "pad-end", "pad-both", "projection", "pool"),
    )
    stem: str | None = option(
        None,
        "First layers of a ResNet: a 7x7 convolution (imagenet) or three 3x3 ones (deep), each with stride 2 and a "
        "pool, or one 3x3 at full size (cifar); unset means the network's own.",
        choices=("imagenet", "deep", "cifar"),
    )
    downsample: str = option(
        "stride",
        "How ResNet units and stems halve an image: every second pixel of a convolution (stride), blurred by 1 2 1 "
        "before (blur), or the blurred maximum of 2x2 pixels before the unit (max-blur).",
        choices=("stride", "blur", "max-blur"),
    )
    zero_init_residual: bool | None = option(
        None,
        "Start every ResNet unit as its shortcut, with 0 as the scale of its last norm; unset means bottleneck units "
        "without a convolution in the shortcut.",
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
        "Activation function of a ResNet (unset means relu) or a FastNet (gelu).",
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
    return getattr(facts.config.model, name) != getattr(ModelSection(), name)


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
    if facts.asked("norm_layer"):  # also the default
        return "norm_layer"
    names = (*NORM_OPTIONS, "stable_norm")
    return next((name for name in names if name not in allowed and _differs(facts, name)), "")


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
    Rule(
        broken=lambda facts: (facts.config.model.bn_momentum_start or 0) > facts.config.model.bn_momentum,
        problem=lambda facts: f"{facts.describe('bn_momentum_start')} is above {facts.describe('bn_momentum')}.",
        rule="The share rises from the start's to bn_momentum.",
        remedy="Lower bn_momentum_start, or leave it out.",
    ),
    Rule(
        broken=lambda facts: (
            _differs(facts, "bn_momentum_start")
            and facts.asked("bn_momentum_start")
            and _norm_name(facts) not in ("batch_norm", "custom_batch_norm")
        ),
        problem=lambda facts: f"{facts.describe('bn_momentum_start')} with {_norm_name(facts)}.",
        rule="Only batch norm has running statistics.",
        remedy="Leave bn_momentum_start out.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class WeightsSection:
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
    whiten_images: int = option(
        0,
        "Make the filters of the first convolution from patches of this many training images, so that its outputs are "
        "uncorrelated (freeze can keep them so); 0 draws them.",
        check=at_least(0),
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
    layer_decay: float = option(
        1.0,
        "Factor on the learning rate of each layer (a block with a matrix of weights) beside that of the next: 0.75 "
        "trains the last at the full rate, the one before at 0.75 of it, then 0.56; 1 is off.",
        check=lambda value: "" if 0 < value <= 1 else "must be more than 0 and at most 1",
    )


def _names_nothing(name: str) -> Rule:
    """Refuse an option that was typed without a value: the run would train all weights."""
    return Rule(
        broken=lambda facts: facts.origins.get(name) == COMMAND_LINE and not getattr(facts.config.weights, name),
        problem=lambda facts: f"--{name.replace('_', '-')} has no value.",
        rule="It names the weights that it is about; without it all weights are trained.",
        remedy=f"Give one, such as --{name.replace('_', '-')} {'backbone' if name == 'freeze' else 'predictions'}.",
    )


WEIGHT_RULES = (
    *(_names_nothing(name) for name in ("freeze", "variable_filter")),
    conflict(
        "whiten_images",
        "weights",
        lambda facts: facts.config.weights.whiten_images and facts.config.weights.weights is not None,
        "Weights that are given have filters already.",
    ),
)


def _no_weights(facts: Facts) -> bool:
    return facts.config.weights.weights is None and not facts.has_weights


WEIGHT_NOTES = tuple(
    idle(name, "without weights", lambda facts, name=name: facts.given(name) and _no_weights(facts))
    for name in ("init_ema", "init_min_loaded")
)
# Of a new run: one that is resumed has its weights from a checkpoint.
WEIGHTS_AT_START = tuple(
    Remark(
        when=lambda facts, name=name: (
            bool(getattr(facts.config.weights, name)) and _no_weights(facts) and not facts.config.weights.whiten_images
        ),
        text=lambda facts, name=name: f"{facts.describe(name)} keeps random weights as they are: no weights are given.",
        option=name,
        remedy=f"Name the weights to start from with --weights, or leave {name} out.",
    )
    for name in ("freeze", "variable_filter")
)
