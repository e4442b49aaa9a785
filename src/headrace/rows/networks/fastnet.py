"""FastNet, a small wide network for 32x32 images."""

from dataclasses import dataclass

from headrace.rows.network import Family, NetworkRow


@dataclass(frozen=True, kw_only=True)
class FastNetRow(NetworkRow):
    """One FastNet: the channels of each group, and whether its second half is a residual of two."""

    family: str = "fastnet"
    widths: tuple[int, ...]
    residual: bool = False


FASTNET = Family(
    name="fastnet",
    module="headrace.model.families.fastnet",
    options=("activation",),
    rows=(
        FastNetRow(name="cifar_fastnet", image_size=32, num_classes=10, widths=(64, 256, 256)),
        FastNetRow(
            name="cifar_fastnet_large",
            size="large",
            image_size=32,
            num_classes=10,
            widths=(128, 384, 512),
            residual=True,
        ),
    ),
)
