"""VGGs with batch norm. Padded as in PyTorch, whatever the dialect."""

from headrace.model.build_options import BuildOptions
from headrace.model.composite import Chain, Named
from headrace.model.gates import Dropout
from headrace.model.initial import FAN_OUT_HE, Normal
from headrace.model.layers import Conv, Dense, Flatten, MaxPool, Relu, ResizeByAverage
from headrace.rows.networks.vgg import VggRow


def blocks(row: VggRow, build: BuildOptions) -> tuple[Named, ...]:
    """Return the named blocks: a convolution each, and a pool after each group."""
    blocks: list[Named] = []
    for group, (count, width) in enumerate(zip(row.units, row.widths, strict=True), start=1):
        conv = Conv(channels=width, padding=build.padding(3), bias=True, initial=FAN_OUT_HE)
        layers = Chain((("conv", conv), *build.norm_act("", "relu")))
        blocks += [(f"group{group}_conv{i}", layers) for i in range(1, count + 1)]
        blocks += [(f"group{group}_pool", MaxPool(window=2, stride=2))]
    # The dense layers take 7x7 pixels, whatever the size of the images.
    blocks += [("resize", ResizeByAverage(7)), ("flatten", Flatten())]
    rate = build.dropout(0.5)
    for name in ("fc1", "fc2"):
        dense = Dense(features=row.hidden, initial=Normal(0.01))
        drop: tuple[Named, ...] = (("drop", Dropout(rate)),) if rate else ()
        blocks += [(name, Chain((("dense", dense), ("relu", Relu()), *drop)))]
    return *blocks, ("predictions", Dense(features=build.num_classes, logits=True, initial=Normal(0.01)))


def places(row: VggRow) -> dict[str, int]:
    """Return the position of every convolution in PyTorch's sequence of convolutions, norms, relus and pools."""
    found, place = {}, 0
    for group, count in enumerate(row.units, start=1):
        for i in range(1, count + 1):
            found[f"group{group}_conv{i}"] = place
            # A convolution, its norm and its relu; after a group, the pool.
            place += 3
        place += 1
    return found


def aliases(row: VggRow, build: BuildOptions) -> tuple[tuple[str, str], ...]:
    """Return other names of split points: PyTorch's modules."""
    return tuple((f"features/{place}", name) for name, place in places(row).items())
