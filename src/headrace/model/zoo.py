"""All networks by name, built according to the model options."""

from collections.abc import Mapping

from headrace.config.networks import VARIANTS, find_variant
from headrace.config.schema import Model
from headrace.config.section_model import norm_choice
from headrace.model.build_options import DIALECTS, BuildOptions, default_epsilon
from headrace.model.families.convnext import CONVNEXTS
from headrace.model.families.densenet import DENSENETS
from headrace.model.families.efficientnet import EFFICIENTNETS
from headrace.model.families.fastnet import FASTNETS
from headrace.model.families.mobilenet import MOBILENETS
from headrace.model.families.regnet import REGNETS
from headrace.model.families.resnet import RESNETS
from headrace.model.families.row import Row
from headrace.model.families.squeezenet import SQUEEZENETS
from headrace.model.families.toy import TOYS
from headrace.model.families.vgg import VGGS
from headrace.model.network import Network
from headrace.model.norm import make_norm_spec

ROWS: Mapping[str, Row] = {
    **TOYS,
    **RESNETS,
    **EFFICIENTNETS,
    **MOBILENETS,
    **SQUEEZENETS,
    **FASTNETS,
    **CONVNEXTS,
    **REGNETS,
    **DENSENETS,
    **VGGS,
}


def model_names() -> tuple[str, ...]:
    """Return the names of all networks."""
    return tuple(VARIANTS)


def build_network(model: Model, num_classes: int, image_hwc: tuple[int, int, int]) -> Network:
    """Build the network that the model options (`config.model`) select."""
    variant = find_variant(model.model_name, image_size=image_hwc[0])
    dialect = DIALECTS["timm" if variant.torch_only and model.model_dialect != "torchvision" else model.model_dialect]
    norm = make_norm_spec(
        norm_choice(model),
        epsilon=default_epsilon(dialect, variant.name) if model.norm_epsilon is None else model.norm_epsilon,
        group_order=model.group_order,
        proxy_epsilon=model.proxy_epsilon if model.proxy_norm else None,
    )
    build = BuildOptions(variant=variant, norm=norm, dialect=dialect, options=model, num_classes=num_classes)
    row = ROWS[variant.name]
    return Network(
        name=variant.name,
        blocks=row.blocks(build),
        input_hwc=image_hwc,
        num_classes=num_classes,
        aliases=row.aliases(build),
    )
