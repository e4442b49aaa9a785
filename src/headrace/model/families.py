"""All networks by name: the rows of the families' tables, built as the model section of the configuration says."""

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.config.model_table import VARIANTS, Variant, find_variant, norm_choice
from headrace.model.composites import Named
from headrace.model.efficientnet import EFFICIENTNETS
from headrace.model.mobilenet import MOBILENETS
from headrace.model.network import Network
from headrace.model.norm import NormSpec, make_norm_spec
from headrace.model.resnet import RESNETS
from headrace.model.squeezenet import SQUEEZENETS
from headrace.model.style import DIALECTS, Style, own_epsilon
from headrace.model.toy import TOYS


class Row(Protocol):
    """A row of a family's table: the blocks of a network, and other names of its split points."""

    def blocks(self, style: Style) -> tuple[Named, ...]: ...
    def aliases(self, style: Style) -> tuple[tuple[str, str], ...]: ...


ROWS: Mapping[str, Row] = {**TOYS, **RESNETS, **EFFICIENTNETS, **MOBILENETS, **SQUEEZENETS}


def model_names() -> tuple[str, ...]:
    """Return the names of all networks."""
    return tuple(VARIANTS)


def model_row(name: str) -> Variant:
    """Return what a network was made for; an unknown name is refused with the nearest."""
    return find_variant(name)


def build_network(model: Any, num_classes: int, image_hwc: tuple[int, int, int]) -> Network:
    """Build the network that the model section of the configuration (`config.model`) names."""
    variant = find_variant(model.model_name, model.model_size, image_hwc[0])
    dialect = DIALECTS[model.model_dialect]
    norm = _norm(model, own_epsilon(dialect, variant.name))
    style = Style(variant=variant, norm=norm, dialect=dialect, options=model, num_classes=num_classes)
    row = ROWS[variant.name]
    return Network(
        name=variant.name,
        blocks=row.blocks(style),
        input_hwc=image_hwc,
        num_classes=num_classes,
        aliases=row.aliases(style),
    )


def _norm(model: Any, epsilon: float) -> NormSpec:
    return make_norm_spec(
        norm_choice(model),
        epsilon=epsilon if model.norm_epsilon is None else model.norm_epsilon,
        group_order=model.group_order,
        proxy_epsilon=model.proxy_epsilon if model.proxy_norm else None,
    )
