"""DenseNets, whose layers append channels to their input. Padded as in PyTorch, whatever the dialect."""

from headrace.model.build_options import BuildOptions
from headrace.model.composite import Chain, Concat, Named
from headrace.model.initial import FAN_IN_HE
from headrace.model.layers import AveragePool, Conv, Dense, GlobalAveragePool, MaxPool
from headrace.rows.networks.densenet import DenseNetRow


def blocks(row: DenseNetRow, build: BuildOptions) -> tuple[Named, ...]:
    """Return the named blocks: `group2` halves image and channels, `group2_block1` is the first layer after it."""
    conv = Conv(channels=row.stem, kernel=7, stride=2, padding=build.padding(7), initial=FAN_IN_HE)
    pool = MaxPool(window=3, stride=2, padding=build.padding(3))
    stem = Chain((("conv", conv), *build.norm_act("", "relu"), ("pool", pool)))
    blocks: list[Named] = [("stem", stem)]
    channels = row.stem
    for group, count in enumerate(row.units, start=1):
        if group > 1:
            channels //= 2
            halved = ("conv", _conv(channels, 1, build)), ("pool", AveragePool(window=2, stride=2))
            blocks += [(f"group{group}", Chain((*build.norm_act("", "relu"), *halved)))]
        blocks += [(f"group{group}_block{i}", _unit(row, build)) for i in range(1, count + 1)]
        channels += count * row.growth
    blocks += [("top", Chain(build.norm_act("", "relu"))), ("avg_pool", GlobalAveragePool())]
    return *blocks, ("predictions", Dense(features=build.num_classes, logits=True))


def _unit(row: DenseNetRow, build: BuildOptions) -> Concat:
    layers = (
        *build.norm_act("1_", "1_relu"),
        ("1_conv", _conv(4 * row.growth, 1, build)),
        *build.norm_act("2_", "2_relu"),
        ("2_conv", _conv(row.growth, 3, build)),
    )
    # The input first: the weights of other libraries expect the channels in this order.
    return Concat(layers=(("input", Chain()), ("new", Chain(layers))))


def _conv(channels: int, kernel: int, build: BuildOptions) -> Conv:
    return Conv(channels=channels, kernel=kernel, padding=build.padding(kernel), initial=FAN_IN_HE)


def aliases(row: DenseNetRow, build: BuildOptions) -> tuple[tuple[str, str], ...]:
    """Return other names of split points: PyTorch's modules."""
    named = [(f"features/transition{group - 1}", f"group{group}") for group in range(2, len(row.units) + 1)]
    for group, count in enumerate(row.units, start=1):
        there = f"features/denseblock{group}/denselayer"
        named += [(f"{there}{i}", f"group{group}_block{i}") for i in range(1, count + 1)]
    return tuple(named)
