"""ConvNeXts."""

from dataclasses import dataclass
from typing import Literal

from headrace.rows.network import Family, NetworkRow


@dataclass(frozen=True, kw_only=True)
class ConvNeXtRow(NetworkRow):
    """One ConvNeXt: units and channels of each group, and the chance of the last unit to be kept."""

    family: str = "convnext"
    norm: Literal["any", "layer_norm", "none"] = "layer_norm"
    torch_only: bool = True
    epsilons: tuple[tuple[str, float], ...] = (("torchvision", 1e-6), ("timm", 1e-6))
    units: tuple[int, ...]
    widths: tuple[int, ...]
    survival: float


def _row(size: str, num_units: int, width: int, survival: float) -> ConvNeXtRow:
    return ConvNeXtRow(
        name=f"convnext_{size}",
        size=size,
        other_sizes=(size[0],),
        units=(3, 3, num_units, 3),
        widths=tuple(width << i for i in range(4)),
        survival=survival,
    )


CONVNEXT = Family(
    name="convnext",
    module="headrace.model.families.convnext",
    sizes=("tiny", "tiny"),
    options=("block_survival_prob", "model_dialect"),
    rows=(
        _row("tiny", 9, 96, 0.9),
        _row("small", 27, 96, 0.6),
        _row("base", 27, 128, 0.5),
        _row("large", 27, 192, 0.5),
    ),
)
