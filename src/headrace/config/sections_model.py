"""The section of the schema that describes the network."""

# ruff: noqa: RUF009 (option() makes a dataclass field, with a fresh copy of a mapping each time)

from dataclasses import dataclass
from typing import Any

from headrace.config.field import option
from headrace.config.values import at_least, between


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network."""

    model_name: str = option("cifar_resnet8", "Network to train; `headrace models` lists them.", aliases=("model",))
    norm_layer: dict[str, Any] = option(
        {"name": "batch_norm"},
        "Normalisation layer: name batch_norm, group_norm (with num_groups or channels_per_group) or none.",
    )
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
