"""The networks by name. A new one is a row in its family's file; a new family is a file, and its name in this tuple.

Rows are read without JAX. The blocks of a family are in the module that it names.
"""

from collections.abc import Mapping

from headrace.rows.network import Family, NetworkRow
from headrace.rows.networks.convnext import CONVNEXT
from headrace.rows.networks.densenet import DENSENET
from headrace.rows.networks.efficientnet import EFFICIENTNET
from headrace.rows.networks.fastnet import FASTNET
from headrace.rows.networks.mobilenet import MOBILENET
from headrace.rows.networks.regnet import REGNET
from headrace.rows.networks.resnet import RESNET, RESNEXT, SERESNET, SERESNEXT
from headrace.rows.networks.squeezenet import SQUEEZENET
from headrace.rows.networks.toy import TOY
from headrace.rows.networks.vgg import VGG

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        *(TOY, RESNET, RESNEXT, SERESNET, SERESNEXT, EFFICIENTNET, MOBILENET, SQUEEZENET, FASTNET, CONVNEXT, REGNET),
        *(DENSENET, VGG),
    )
}
NETWORKS: Mapping[str, NetworkRow] = {row.name: row for family in FAMILIES.values() for row in family.rows}
# option -> the families it concerns
OPTION_FAMILIES: Mapping[str, tuple[str, ...]] = {
    option: tuple(name for name, family in FAMILIES.items() if option in family.options)
    for option in dict.fromkeys(option for family in FAMILIES.values() for option in family.options)
}
