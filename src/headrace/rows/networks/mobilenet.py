"""MobileNet-V2 and V3."""

from dataclasses import dataclass, replace

from headrace.rows.network import Family, NetworkRow


@dataclass(frozen=True, kw_only=True)
class BottleneckSpec:
    """One block: kernel, channels inside and out, squeeze-excite, activation, stride."""

    kernel: int
    inner: int
    outputs: int
    squeezes: bool
    activation: str
    stride: int


@dataclass(frozen=True, kw_only=True)
class MobileNetRow(NetworkRow):
    """One MobileNet: stem, bottlenecks, last convolution, and the hidden layer after the pool (0 for none)."""

    family: str = "mobilenet"
    epsilons: tuple[tuple[str, float], ...] = (("reference", 1e-5), ("keras", 1e-3))
    stem: int
    bottlenecks: tuple[BottleneckSpec, ...]
    top: int
    hidden: int
    activation: str


def _v2() -> MobileNetRow:
    # (expansion, channels out, repeats, stride) of each group
    groups = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    found, inputs = [], 32
    for expansion, outputs, repeats, stride in groups:
        for i in range(repeats):
            spec = BottleneckSpec(
                kernel=3, inner=inputs * expansion, outputs=outputs, squeezes=False, activation="relu6", stride=1
            )
            found.append(replace(spec, stride=1 if i else stride))
            inputs = outputs
    return MobileNetRow(
        name="mobilenet_v2",
        size="v2",
        stem=32,
        bottlenecks=tuple(found),
        top=1280,
        hidden=0,
        activation="relu6",
    )


def _v3(size: str, table: str, top: int, hidden: int, other_names: tuple[str, ...] = ()) -> MobileNetRow:
    """Return a V3 from lines as printed in the paper: kernel, inner, output, SE, relu or h-swish, stride."""
    found = []
    for line in table.split(","):
        kernel, inner, outputs, squeezes, activation, stride = line.split()
        found.append(
            BottleneckSpec(
                kernel=int(kernel),
                inner=int(inner),
                outputs=int(outputs),
                squeezes=squeezes == "SE",
                activation="relu" if activation == "RE" else "hard_swish",
                stride=int(stride),
            )
        )
    return MobileNetRow(
        name=f"mobilenet_v3_{size}",
        size=f"v3_{size}",
        other_names=other_names,
        stem=16,
        bottlenecks=tuple(found),
        top=top,
        hidden=hidden,
        activation="hard_swish",
        epsilons=(("reference", 1e-5), ("torchvision", 1e-3), ("keras", 1e-3)),
    )


_SMALL = """3 16 16 SE RE 2, 3 72 24 - RE 2, 3 88 24 - RE 1, 5 96 40 SE HS 2, 5 240 40 SE HS 1, 5 240 40 SE HS 1,
5 120 48 SE HS 1, 5 144 48 SE HS 1, 5 288 96 SE HS 2, 5 576 96 SE HS 1, 5 576 96 SE HS 1"""
_LARGE = """3 16 16 - RE 1, 3 64 24 - RE 2, 3 72 24 - RE 1, 5 72 40 SE RE 2, 5 120 40 SE RE 1, 5 120 40 SE RE 1,
3 240 80 - HS 2, 3 200 80 - HS 1, 3 184 80 - HS 1, 3 184 80 - HS 1, 3 480 112 SE HS 1, 3 672 112 SE HS 1,
5 672 160 SE HS 2, 5 960 160 SE HS 1, 5 960 160 SE HS 1"""

MOBILENET = Family(
    name="mobilenet",
    module="headrace.model.families.mobilenet",
    sizes=("v2", "v2"),
    groups=(8, 8),
    options=("dropout_rate", "top_width", "model_dialect"),
    rows=(
        _v2(),
        _v3("small", _SMALL, top=576, hidden=1024),
        _v3("large", _LARGE, top=960, hidden=1280, other_names=("mobilenetv3",)),
    ),
)
