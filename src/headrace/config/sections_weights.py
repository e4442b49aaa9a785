"""The section of the schema that says which weights training starts from, and which of them it changes."""

# ruff: noqa: RUF009 (option() makes a dataclass field, with a fresh copy of a mapping each time)

from dataclasses import dataclass
from typing import Any

from headrace.config.field import option
from headrace.config.values import between, factors, patterns


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights that training starts from, and which of them it changes."""

    init_from: str | None = option(
        None,
        "File of weights to start from: torch's .pth, .safetensors, Keras' .h5, a Headrace checkpoint or run.",
        aliases=("init_path",),
    )
    init_ema: bool = option(False, "Take the averaged weights (EMA) that a checkpoint holds beside the raw ones.")
    init_min_loaded: float = option(
        0.9, "Share of the network's weights, and of the file's, that must find their place.", check=between(0, 1)
    )
    freeze: tuple[str, ...] = option(
        (),
        "Regular expressions; weights whose name matches one keep their values, and batch norms of them their mode.",
        check=patterns,
    )
    variable_filter: tuple[str, ...] = option(
        (), "Texts; only weights whose name contains one of them are trained, all others are frozen."
    )
    layer_lr: dict[str, Any] = option(
        {},
        'Factors on the learning rate by regular expression, such as {"^conv1/": 0.1}; the first match counts.',
        check=factors,
    )
