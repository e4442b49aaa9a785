"""All networks by name."""

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.core.errors import ConfigError, did_you_mean
from headrace.model.composites import Named
from headrace.model.network import Network
from headrace.model.norm import NormSpec, make_norm_spec
from headrace.model.resnet import RESNETS
from headrace.model.toy import TOYS


class Row(Protocol):
    """A row of a family's table: the image size and classes it was made for, and its blocks."""

    @property
    def image_size(self) -> int: ...
    @property
    def num_classes(self) -> int: ...
    def blocks(self, norm: NormSpec, num_classes: int) -> tuple[Named, ...]: ...


class ModelOptions(Protocol):
    """What of the model section of the configuration shapes a network."""

    @property
    def model_name(self) -> str: ...
    @property
    def norm_layer(self) -> Mapping[str, Any]: ...
    @property
    def norm_epsilon(self) -> float | None: ...


_ROWS: Mapping[str, Row] = {**TOYS, **RESNETS}


def model_names() -> tuple[str, ...]:
    """Return the names of all networks."""
    return tuple(_ROWS)


def model_row(name: str) -> Row:
    """Return the row of a network; an unknown name is refused with the nearest."""
    if name not in _ROWS:
        raise ConfigError(f"There is no model named {name!r}.", remedy=did_you_mean(name, _ROWS))
    return _ROWS[name]


def build_network(model: ModelOptions, num_classes: int, image_hwc: tuple[int, int, int]) -> Network:
    """Build the network that the model section of the configuration names."""
    norm = make_norm_spec(model.norm_layer, model.norm_epsilon)
    blocks = model_row(model.model_name).blocks(norm, num_classes)
    return Network(name=model.model_name, blocks=blocks, input_hwc=image_hwc, num_classes=num_classes)
