"""DenseNets."""

from dataclasses import dataclass

from headrace.rows.network import Family, NetworkRow


@dataclass(frozen=True, kw_only=True)
class DenseNetRow(NetworkRow):
    """One DenseNet: the number of layers in each group."""

    family: str = "densenet"
    torch_only: bool = True
    units: tuple[int, ...]
    growth: int = 32
    stem: int = 64


DENSENET = Family(
    name="densenet",
    module="headrace.model.families.densenet",
    sizes=("121", "121"),
    options=("model_dialect",),
    rows=(
        DenseNetRow(name="densenet121", size="121", units=(6, 12, 24, 16)),
        DenseNetRow(name="densenet169", size="169", units=(6, 12, 32, 32)),
        DenseNetRow(name="densenet201", size="201", units=(6, 12, 48, 32)),
    ),
)
