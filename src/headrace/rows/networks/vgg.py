"""VGGs with batch norm."""

from dataclasses import dataclass

from headrace.rows.network import Family, NetworkRow


@dataclass(frozen=True, kw_only=True)
class VggRow(NetworkRow):
    """One VGG: the number of convolutions in each group."""

    family: str = "vgg"
    torch_only: bool = True
    units: tuple[int, ...]
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)
    hidden: int = 4096


VGGS = (
    VggRow(name="vgg11_bn", size="11", units=(1, 1, 2, 2, 2)),
    VggRow(name="vgg13_bn", size="13", units=(2, 2, 2, 2, 2)),
    VggRow(name="vgg16_bn", size="16", units=(2, 2, 3, 3, 3)),
    VggRow(name="vgg19_bn", size="19", units=(2, 2, 4, 4, 4)),
)
VGG = Family(
    name="vgg",
    module="headrace.model.families.vgg",
    sizes=("11", "11"),
    options=("dropout_rate", "model_dialect"),
    rows=VGGS,
)
