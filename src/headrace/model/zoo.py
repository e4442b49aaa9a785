"""All networks by name, built according to the model options."""

import importlib

from headrace.config.networks import find_variant
from headrace.config.schema import ModelSection
from headrace.config.section_model import norm_choice
from headrace.model.build_options import DIALECTS, BuildOptions
from headrace.model.network import Network
from headrace.model.norm import make_norm_spec
from headrace.rows.networks import FAMILIES, NETWORKS


def model_names() -> tuple[str, ...]:
    """Return the names of all networks."""
    return tuple(NETWORKS)


def build_network(model: ModelSection, num_classes: int, image_hwc: tuple[int, int, int]) -> Network:
    """Build the network that the model options (`config.model`) select."""
    row = find_variant(model.model_name, image_size=image_hwc[0])
    library = "timm" if row.torch_only and model.model_dialect != "torchvision" else model.model_dialect
    dialect = DIALECTS[library]
    epsilon = dict(row.epsilons).get(library, dialect.epsilon) if model.norm_epsilon is None else model.norm_epsilon
    norm = make_norm_spec(
        norm_choice(model),
        epsilon=epsilon,
        group_order=model.group_order,
        proxy_epsilon=model.proxy_epsilon if model.proxy_norm else None,
    )
    build = BuildOptions(name=row.name, norm=norm, dialect=dialect, options=model, num_classes=num_classes)
    family = importlib.import_module(FAMILIES[row.family].module)
    return Network(
        name=row.name,
        blocks=family.blocks(row, build),
        input_hwc=image_hwc,
        num_classes=num_classes,
        aliases=family.aliases(row, build) if hasattr(family, "aliases") else (),
    )
