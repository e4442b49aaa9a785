"""RegNetX and RegNetY, by their FLOPs."""

from dataclasses import dataclass

from headrace.rows.network import Family, NetworkRow


@dataclass(frozen=True, kw_only=True)
class RegNetRow(NetworkRow):
    """One RegNet: units, width of the first, increase per unit, factor between widths, width of a group."""

    family: str = "regnet"
    torch_only: bool = True
    depth: int
    first: int
    slope: float
    factor: float
    group_width: int
    squeezes: bool = False


def _row(kind: str, size: str, number: str, *shape: float) -> RegNetRow:
    """Return a row; timm names it by the number."""
    depth, first, slope, factor, group_width = shape
    return RegNetRow(
        name=f"regnet_{kind}_{size}",
        size=f"{kind}_{size}",
        other_names=(f"regnet{kind}{number}",),
        depth=int(depth),
        first=int(first),
        slope=slope,
        factor=factor,
        group_width=int(group_width),
        squeezes=kind == "y",
    )


REGNET = Family(
    name="regnet",
    module="headrace.model.families.regnet",
    sizes=("y_400mf", "y_400mf"),
    groups=(8, 8),
    options=("model_dialect",),
    rows=(
        _row("x", "200mf", "002", 13, 24, 36.44, 2.49, 8),
        _row("x", "400mf", "004", 22, 24, 24.48, 2.54, 16),
        _row("x", "600mf", "006", 16, 48, 36.97, 2.24, 24),
        _row("x", "800mf", "008", 16, 56, 35.73, 2.28, 16),
        _row("x", "1_6gf", "016", 18, 80, 34.01, 2.25, 24),
        _row("x", "3_2gf", "032", 25, 88, 26.31, 2.25, 48),
        _row("x", "4gf", "040", 23, 96, 38.65, 2.43, 40),
        _row("x", "6_4gf", "064", 17, 184, 60.83, 2.07, 56),
        _row("x", "8gf", "080", 23, 80, 49.56, 2.88, 120),
        _row("x", "12gf", "120", 19, 168, 73.36, 2.37, 112),
        _row("x", "16gf", "160", 22, 216, 55.59, 2.1, 128),
        _row("x", "32gf", "320", 23, 320, 69.86, 2.0, 168),
        _row("y", "200mf", "002", 13, 24, 36.44, 2.49, 8),
        _row("y", "400mf", "004", 16, 48, 27.89, 2.09, 8),
        _row("y", "600mf", "006", 15, 48, 32.54, 2.32, 16),
        _row("y", "800mf", "008", 14, 56, 38.84, 2.4, 16),
        _row("y", "1_6gf", "016", 27, 48, 20.71, 2.65, 24),
        _row("y", "3_2gf", "032", 21, 80, 42.63, 2.66, 24),
        _row("y", "4gf", "040", 22, 96, 31.41, 2.24, 64),
        _row("y", "6_4gf", "064", 25, 112, 33.22, 2.27, 72),
        _row("y", "8gf", "080", 17, 192, 76.82, 2.19, 56),
        _row("y", "12gf", "120", 19, 168, 73.36, 2.37, 112),
        _row("y", "16gf", "160", 18, 200, 106.23, 2.48, 112),
        _row("y", "32gf", "320", 20, 232, 115.89, 2.53, 232),
    ),
)
