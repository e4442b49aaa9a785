"""EfficientNets (one table of block groups, scaled by width and depth), and the inverted bottleneck of MobileNets too.

Layers are named as in Keras: `block2a` + `expand_conv`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from string import ascii_lowercase

from headrace.model.build_options import BuildOptions
from headrace.model.gates import Dropout, DropPath, SqueezeExcite
from headrace.model.layers import FAN_IN_HE, FAN_OUT_HE, Chain, Conv, Dense, GlobalAveragePool, Layer, Named, Residual


@dataclass(frozen=True, kw_only=True)
class Inverted:
    """An inverted bottleneck: expand, convolve depthwise, squeeze-and-excite, project."""

    inputs: int
    inner: int
    outputs: int
    kernel: int = 3
    stride: int = 1
    activation: str = "swish"
    group_dim: int = 1
    squeeze: SqueezeExcite | None = None
    survival: float = 1.0
    symmetric: bool = False  # padded as in PyTorch, whatever the dialect

    @property
    def skips(self) -> bool:
        """Return whether the block has a shortcut."""
        return self.stride == 1 and self.inputs == self.outputs

    def layer(self, build: BuildOptions) -> Layer:
        """Return the block."""
        layers: list[Named] = []
        if self.inner != self.inputs:
            layers += [("expand_conv", self.one(self.inner))]
            layers += build.norm_act("expand_", "expand_activation", self.activation)
        layers += [("dwconv", self._depthwise(build)), *build.norm_act("", "activation", self.activation)]
        layers += [("se", self.squeeze)] if self.squeeze else []
        layers += [("project_conv", self.one(self.outputs)), build.norm_named("project_")]
        if not self.skips:
            return Chain(tuple(layers))
        layers += [("drop", DropPath(self.survival))] if self.survival < 1 else []
        return Residual(body=Chain(tuple(layers)))

    @staticmethod
    def one(channels: int) -> Conv:
        """Return a 1x1 convolution."""
        return Conv(channels=channels, kernel=1, initial=FAN_OUT_HE)

    def _depthwise(self, build: BuildOptions) -> Conv:
        padding = build.padding(self.kernel, symmetric=self.symmetric)
        conv = Conv(channels=self.inner, kernel=self.kernel, stride=self.stride, padding=padding)
        return replace(conv, groups=groups_of(self.inner, self.group_dim), initial=FAN_IN_HE)


def conv_block(channels: int, kernel: int, stride: int, activation: str, build: BuildOptions) -> Chain:
    """Return a convolution, a norm and an activation: the stem or the top of a network."""
    conv = Conv(channels=channels, kernel=kernel, stride=stride, padding=build.padding(kernel), initial=FAN_OUT_HE)
    return Chain((("conv", conv), *build.norm_act("", "activation", activation)))


def groups_of(channels: int, group_dim: int) -> int:
    """Return the number of groups of `group_dim` channels, or of the nearest size that divides the channels."""
    wanted = max(channels // group_dim, 1)
    divisors = (groups for groups in range(1, channels + 1) if channels % groups == 0)
    return wanted if channels % wanted == 0 else min(divisors, key=lambda groups: abs(channels / groups - group_dim))


def near_multiple(channels: float, divisor: int = 8) -> int:
    """Round channels to a multiple of the divisor, at least the divisor and at most 10 % down."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded


# (kernel, repeats, channels in, channels out, expanded, stride) of each group, before scaling
_GROUPS = (
    (3, 1, 32, 16, False, 1),
    (3, 2, 16, 24, True, 2),
    (5, 2, 24, 40, True, 2),
    (3, 3, 40, 80, True, 2),
    (5, 3, 80, 112, True, 1),
    (5, 4, 112, 192, True, 2),
    (3, 1, 192, 320, True, 1),
)
_STEM_CHANNELS, _TOP_CHANNELS, _EXPAND_RATIO, _SE_RATIO, _SURVIVAL = 32, 1280, 6, 0.25, 0.8
# names of a block's parts in the TensorFlow 1 code and in timm -> the layer each begins with
_PARTS = (("b", "dwconv"), ("SE", "se"), ("c", "project_conv"))
_TIMM_PARTS = (("conv_dw", "dwconv"), ("se", "se"), ("conv_pwl", "project_conv"))


@dataclass(frozen=True, kw_only=True)
class EfficientNet:
    """One row of the table: width and depth relative to B0, and dropout before the classifier."""

    width: float
    depth: float
    dropout_rate: float
    small_images: bool = False  # no stride in the stem and the second group

    def blocks(self, build: BuildOptions) -> tuple[Named, ...]:
        """Return the named blocks."""
        options = build.options
        activation = "relu" if options.use_relu else "swish"
        rate = self.dropout_rate if options.dropout_rate is None else options.dropout_rate
        top_width = _TOP_CHANNELS if options.top_width is None else options.top_width
        stem = conv_block(self._scaled(_STEM_CHANNELS, build), 3, 1 if self.small_images else 2, activation, build)
        top = conv_block(self._scaled(top_width, build), 1, 1, activation, build) if top_width else None
        blocks: list[Named] = [("stem", stem)]
        blocks += [(name, block.layer(build)) for name, block in self.inverted(build)]
        blocks += [("top", top or Chain(build.norm_act("", "activation", activation)))]
        blocks += [("avg_pool", GlobalAveragePool())]
        blocks += [("top_dropout", Dropout(rate))] if rate else []
        return *blocks, ("predictions", Dense(features=build.num_classes, logits=True))

    def inverted(self, build: BuildOptions) -> Iterator[tuple[str, Inverted]]:
        """Return the inverted bottlenecks by name: `block2a` is the first of the second group."""
        options = build.options
        last_survival = _SURVIVAL if options.block_survival_prob is None else options.block_survival_prob
        repeats = [self._repeats(repeats, build) for _, repeats, *_ in _GROUPS]
        number = 0
        for group, (kernel, _, inputs, base, expanded, stride) in enumerate(_GROUPS):
            ratio = (options.expand_ratio or _EXPAND_RATIO) if expanded else 1
            channels, outputs = self._scaled(inputs, build), self._scaled(base, build)
            for i in range(repeats[group]):
                squeeze = SqueezeExcite(
                    width=max(1, int(channels * _SE_RATIO)), activation="relu" if options.use_relu else "swish"
                )
                yield (
                    f"block{group + 1}{_letters(i)}",
                    Inverted(
                        inputs=channels,
                        inner=channels * ratio,
                        outputs=outputs,
                        kernel=kernel,
                        stride=1 if i or (group == 1 and self.small_images) else stride,
                        activation="relu" if options.use_relu else "swish",
                        group_dim=options.group_dim or 1,
                        squeeze=squeeze if options.se else None,
                        # The deeper a block, the more often it is dropped.
                        survival=1 - (1 - last_survival) * number / sum(repeats),
                    ),
                )
                channels, number = outputs, number + 1

    def aliases(self, build: BuildOptions) -> tuple[tuple[str, str], ...]:
        """Return other names of split points: those of the TensorFlow 1 code, and timm's modules."""
        named = [("block0", "stem"), ("Top", "top"), ("conv_stem", "stem"), ("conv_head", "top")]
        for group, (_, repeats, *_) in enumerate(_GROUPS, start=1):
            for i in range(self._repeats(repeats, build)):
                block, timm = f"block{group}{_letters(i)}", f"blocks/{group - 1}/{i}"
                named += [(f"{block}/{theirs}", f"{block}/{layer}") for theirs, layer in _PARTS]
                named += [(timm, block), (f"{timm}/conv_pw", block)]
                named += [(f"{timm}/{theirs}", f"{block}/{layer}") for theirs, layer in _TIMM_PARTS]
        return tuple(named)

    def _scaled(self, channels: int, build: BuildOptions) -> int:
        width = build.options.width_coefficient or self.width
        return near_multiple(channels * width, build.options.depth_divisor or 8)

    def _repeats(self, repeats: int, build: BuildOptions) -> int:
        return math.ceil(repeats * (build.options.depth_coefficient or self.depth))


def _letters(i: int) -> str:
    """Return a, b, ... z, aa, ab ... for the position of a block in its group."""
    return ascii_lowercase[i] if i < 26 else _letters(i // 26 - 1) + ascii_lowercase[i % 26]


_B = ((1.0, 1.0, 0.2), (1.0, 1.1, 0.2), (1.1, 1.2, 0.3), (1.2, 1.4, 0.3),
      (1.4, 1.8, 0.4), (1.6, 2.2, 0.4), (1.8, 2.6, 0.5), (2.0, 3.1, 0.5))  # fmt: skip
EFFICIENTNETS: dict[str, EfficientNet] = {
    "efficientnet_cifar": EfficientNet(width=0.5, depth=1.0, dropout_rate=0.0, small_images=True),
    **{
        f"efficientnet_b{i}": EfficientNet(width=width, depth=depth, dropout_rate=rate)
        for i, (width, depth, rate) in enumerate(_B)
    },
}
