"""DenseNets, whose layers append channels to their input. Padded as in PyTorch, whatever the dialect."""

from dataclasses import dataclass

from headrace.model.build_options import BuildOptions
from headrace.model.composite import Chain, Concat, Named
from headrace.model.initial import FAN_IN_HE
from headrace.model.layers import AveragePool, Conv, Dense, GlobalAveragePool, MaxPool


@dataclass(frozen=True, kw_only=True)
class DenseNet:
    """One row of the table: the number of layers in each group."""

    units: tuple[int, ...]
    growth: int = 32
    stem: int = 64

    def blocks(self, build: BuildOptions) -> tuple[Named, ...]:
        """Return the named blocks: `group2` halves image and channels, `group2_block1` is the first layer after it."""
        conv = Conv(channels=self.stem, kernel=7, stride=2, padding=build.padding(7), initial=FAN_IN_HE)
        pool = MaxPool(window=3, stride=2, padding=build.padding(3))
        stem = Chain((("conv", conv), *build.norm_act("", "relu"), ("pool", pool)))
        blocks: list[Named] = [("stem", stem)]
        channels = self.stem
        for group, count in enumerate(self.units, start=1):
            if group > 1:
                channels //= 2
                halved = ("conv", self._conv(channels, 1, build)), ("pool", AveragePool(window=2, stride=2))
                blocks += [(f"group{group}", Chain((*build.norm_act("", "relu"), *halved)))]
            blocks += [(f"group{group}_block{i}", self._unit(build)) for i in range(1, count + 1)]
            channels += count * self.growth
        blocks += [("top", Chain(build.norm_act("", "relu"))), ("avg_pool", GlobalAveragePool())]
        return *blocks, ("predictions", Dense(features=build.num_classes, logits=True))

    def _unit(self, build: BuildOptions) -> Concat:
        layers = (
            *build.norm_act("1_", "1_relu"),
            ("1_conv", self._conv(4 * self.growth, 1, build)),
            *build.norm_act("2_", "2_relu"),
            ("2_conv", self._conv(self.growth, 3, build)),
        )
        # The input first: the weights of other libraries expect the channels in this order.
        return Concat(layers=(("input", Chain()), ("new", Chain(layers))))

    @staticmethod
    def _conv(channels: int, kernel: int, build: BuildOptions) -> Conv:
        return Conv(channels=channels, kernel=kernel, padding=build.padding(kernel), initial=FAN_IN_HE)

    def aliases(self, build: BuildOptions) -> tuple[tuple[str, str], ...]:
        """Return other names of split points: PyTorch's modules."""
        named = [(f"features/transition{group - 1}", f"group{group}") for group in range(2, len(self.units) + 1)]
        for group, count in enumerate(self.units, start=1):
            there = f"features/denseblock{group}/denselayer"
            named += [(f"{there}{i}", f"group{group}_block{i}") for i in range(1, count + 1)]
        return tuple(named)


DENSENETS: dict[str, DenseNet] = {
    "densenet121": DenseNet(units=(6, 12, 24, 16)),
    "densenet169": DenseNet(units=(6, 12, 32, 32)),
    "densenet201": DenseNet(units=(6, 12, 48, 32)),
}
