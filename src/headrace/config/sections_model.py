"""The section of the schema that describes the network.

An option that concerns some families only is unset by default, which means the family's own; model_table.py says which.
"""

# ruff: noqa: RUF009 (option() makes a dataclass field, with a fresh copy of a mapping each time)

from dataclasses import dataclass
from typing import Any

from headrace.config.field import option
from headrace.config.values import above, at_least, between, share

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
        "Whose padding, epsilon and shortcuts a network has where definitions differ, so that weights from there fit.",
        choices=DIALECTS,
    )
    norm_layer: dict[str, Any] = option(
        {"name": "batch_norm"},
        "Normalisation layer: name batch_norm, group_norm (with num_groups or channels_per_group), layer_norm or none.",
    )
    batch_norm: bool = option(False, "Batch norm, said shortly.")
    group_norm: bool = option(False, "Group norm, said shortly, with as many groups as suit the family.")
    groups: int | None = option(None, "Groups of group norm; says group norm as well.", check=at_least(1))
    group_order: str = option(
        "contiguous",
        "Which channels form a group: neighbours, or (strided) those with the same remainder by the number of groups.",
        choices=("contiguous", "strided"),
    )
    proxy_norm: bool = option(False, "Normalise activations after group or layer norm by a Gaussian proxy's moments.")
    proxy_epsilon: float = option(0.03, "Number added to the variances of the proxy.", check=above(0))
    bn_momentum: float = option(
        0.97,
        "Share of the running statistics of batch norm that stays at each step.",
        aliases=("bn_decay",),
        check=between(0, 1),
    )
    norm_epsilon: float | None = option(
        None, "Number added to variances in normalisation; unset means the model's own.", check=at_least(0)
    )
    stable_norm: bool = option(False, "Compute variances in two passes: slower and more exact.")
    dbn_replica_group_size: int = option(
        1,
        "Consecutive replicas whose micro-batches share the statistics of batch norm; 1 means each has its own.",
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
    widenet: bool = option(False, "The wide CIFAR ResNeXts: four times the channels.")
    expand_ratio: int | None = option(
        None, "How many times wider an EfficientNet block is inside; unset means 6.", check=at_least(1)
    )
    width_coefficient: float | None = option(None, "Scale of an EfficientNet's channels.", check=above(0))
    depth_coefficient: float | None = option(None, "Scale of an EfficientNet's repeats.", check=above(0))
    depth_divisor: int | None = option(
        None, "Number that an EfficientNet's channels are multiples of; unset means 8.", check=at_least(1)
    )
    dropout_rate: float | None = option(None, "Share of features dropped before the classifier.", check=share)
    block_survival_prob: float | None = option(
        None,
        "Probability, at the last block, that a residual branch is kept in training; unset means 0.8.",
        check=lambda value: "" if 0 < value <= 1 else "must be more than 0 and at most 1",
    )
    use_relu: bool = option(False, "Relu instead of swish in EfficientNets.")
    se: bool = option(True, "Squeeze-and-excite in EfficientNets.")
    top_width: int | None = option(
        None, "Channels before the classifier, 0 for none in between; unset means the network's own.", check=at_least(0)
    )
    use_bypass: bool = option(False, "Shortcuts around every second fire module of a SqueezeNet.")
