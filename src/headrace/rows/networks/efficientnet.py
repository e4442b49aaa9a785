"""EfficientNets: V1, V2, Lite, and one for CIFAR images."""

from dataclasses import dataclass

from headrace.rows.network import Family, NetworkRow


@dataclass(frozen=True)
class Group:
    """Blocks of one shape, before scaling; the first has the stride."""

    kernel: int
    repeats: int
    inputs: int
    outputs: int
    expansion: int
    stride: int
    fused: bool = False


_GROUPS = (
    Group(3, 1, 32, 16, 1, 1),
    Group(3, 2, 16, 24, 6, 2),
    Group(5, 2, 24, 40, 6, 2),
    Group(3, 3, 40, 80, 6, 2),
    Group(5, 3, 80, 112, 6, 1),
    Group(5, 4, 112, 192, 6, 2),
    Group(3, 1, 192, 320, 6, 1),
)
# V2: (repeats, channels out) of each group; the first three are fused
_V2_SHAPES = ((1, 1), (4, 2), (4, 2), (4, 2), (6, 1), (6, 2), (6, 1))  # expansion, stride
_V2 = {
    "b": (32, ((1, 16), (2, 32), (2, 48), (3, 96), (5, 112), (8, 192))),
    "s": (24, ((2, 24), (4, 48), (4, 64), (6, 128), (9, 160), (15, 256))),
    "m": (24, ((3, 24), (5, 48), (5, 80), (7, 160), (14, 176), (18, 304), (5, 512))),
    "l": (32, ((4, 32), (7, 64), (7, 96), (10, 192), (19, 224), (25, 384), (7, 640))),
}


_USUAL = (("reference", 1e-3), ("keras", 1e-3))  # epsilons
_EVERYWHERE = (*_USUAL, ("torchvision", 1e-3))


@dataclass(frozen=True, kw_only=True)
class EfficientNetRow(NetworkRow):
    """One EfficientNet: width and depth relative to its groups, and dropout before the classifier."""

    family: str = "efficientnet"
    epsilons: tuple[tuple[str, float], ...] = _USUAL
    width: float
    depth: float
    dropout_rate: float
    groups: tuple[Group, ...] = _GROUPS
    small_images: bool = False  # no stride in the stem and the second group
    least: float = 0.9  # fraction of a scaled number of channels that rounding must leave
    lite: bool = False  # relu6, no squeeze-excite, and neither the stem, the top nor the ends' repeats are scaled


def _v2_groups(size: str) -> tuple[Group, ...]:
    inputs, rows = _V2[size]
    groups = []
    for i, ((repeats, outputs), (expansion, stride)) in enumerate(zip(rows, _V2_SHAPES, strict=False)):
        groups.append(Group(3, repeats, inputs, outputs, expansion, stride, fused=i < 3))
        inputs = outputs
    return tuple(groups)


_V2_B = _v2_groups("b")


def _b(number: int, image: int, width: float, depth: float, dropout_rate: float) -> EfficientNetRow:
    size = f"b{number}"
    return EfficientNetRow(
        name=f"efficientnet_{size}",
        size=size,
        other_sizes=(str(number),),
        image_size=image,
        width=width,
        depth=depth,
        dropout_rate=dropout_rate,
        epsilons=_EVERYWHERE if number >= 5 else _USUAL,
    )


def _v2(size: str, image: int, dropout_rate: float) -> EfficientNetRow:
    return EfficientNetRow(
        name=f"efficientnet_v2_{size}",
        size=f"v2_{size}",
        image_size=image,
        width=1.0,
        depth=1.0,
        dropout_rate=dropout_rate,
        groups=_v2_groups(size),
        epsilons=_EVERYWHERE,
    )


def _v2_b(number: int, image: int, width: float, depth: float) -> EfficientNetRow:
    return EfficientNetRow(
        name=f"efficientnet_v2_b{number}",
        size=f"v2_b{number}",
        image_size=image,
        width=width,
        depth=depth,
        dropout_rate=0.2,
        groups=_V2_B,
        least=0.0,
        epsilons=_EVERYWHERE,
    )


def _lite(number: int, image: int, width: float, depth: float, dropout_rate: float) -> EfficientNetRow:
    return EfficientNetRow(
        name=f"efficientnet_lite{number}",
        size=f"lite{number}",
        image_size=image,
        width=width,
        depth=depth,
        dropout_rate=dropout_rate,
        lite=True,
    )


EFFICIENTNET = Family(
    name="efficientnet",
    module="headrace.model.families.efficientnet",
    sizes=("b0", "cifar"),
    groups=(4, 4),
    options=(
        *("group_dim", "expand_ratio", "width_coefficient", "depth_coefficient", "depth_divisor", "dropout_rate"),
        *("block_survival_prob", "use_relu", "se", "top_width", "model_dialect"),
    ),
    rows=(
        EfficientNetRow(
            name="efficientnet_cifar",
            size="cifar",
            image_size=32,
            num_classes=10,
            width=0.5,
            depth=1.0,
            dropout_rate=0.0,
            small_images=True,
        ),
        _b(0, 224, 1.0, 1.0, 0.2),
        _b(1, 240, 1.0, 1.1, 0.2),
        _b(2, 260, 1.1, 1.2, 0.3),
        _b(3, 300, 1.2, 1.4, 0.3),
        _b(4, 380, 1.4, 1.8, 0.4),
        _b(5, 456, 1.6, 2.2, 0.4),
        _b(6, 528, 1.8, 2.6, 0.5),
        _b(7, 600, 2.0, 3.1, 0.5),
        _v2("s", 384, 0.2),
        _v2("m", 480, 0.3),
        _v2("l", 480, 0.4),
        _v2_b(0, 224, 1.0, 1.0),
        _v2_b(1, 240, 1.0, 1.1),
        _v2_b(2, 260, 1.1, 1.2),
        _v2_b(3, 300, 1.2, 1.4),
        _lite(0, 224, 1.0, 1.0, 0.2),
        _lite(1, 240, 1.0, 1.1, 0.2),
        _lite(2, 260, 1.1, 1.2, 0.3),
        _lite(3, 280, 1.2, 1.4, 0.3),
        _lite(4, 300, 1.4, 1.8, 0.3),
    ),
)
