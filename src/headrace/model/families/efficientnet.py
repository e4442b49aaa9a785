"""EfficientNets, V2 and Lite: tables of block groups, scaled by width and depth. The block of MobileNets too.

Layers are named as in Keras: `block2a` + `expand_conv`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from string import ascii_lowercase

from headrace.model.build_options import BuildOptions, near_multiple
from headrace.model.composite import Chain, Named, Residual
from headrace.model.gates import Dropout, DropPath, SqueezeExcite
from headrace.model.initial import FAN_IN_HE, FAN_OUT_HE
from headrace.model.layers import Conv, Dense, GlobalAveragePool, Layer
from headrace.rows.networks.efficientnet import EfficientNetRow, Group


@dataclass(frozen=True, kw_only=True)
class Inverted:
    """An inverted bottleneck: expand, convolve depthwise, squeeze-and-excite, project.

    In a `fused` one a single convolution expands and convolves, and without expansion it projects as well.
    """

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
    fused: bool = False

    @property
    def skips(self) -> bool:
        """Return whether the block has a shortcut."""
        return self.stride == 1 and self.inputs == self.outputs

    def layer(self, build: BuildOptions) -> Layer:
        layers: list[Named] = []
        expands = self.inner != self.inputs
        if expands:
            layers += [("expand_conv", self._full(self.inner, build) if self.fused else self.one(self.inner))]
            layers += build.norm_act("expand_", "expand_activation", self.activation)
        if not self.fused:
            layers += [("dwconv", self._depthwise(build)), *build.norm_act("", "activation", self.activation)]
        layers += [("se", self.squeeze)] if self.squeeze else []
        if self.fused and not expands:
            layers += [("project_conv", self._full(self.outputs, build))]
            layers += build.norm_act("project_", "project_activation", self.activation)
        else:
            layers += [("project_conv", self.one(self.outputs)), build.norm_named("project_")]
        if not self.skips:
            return Chain(tuple(layers))
        layers += [("drop", DropPath(self.survival))] if self.survival < 1 else []
        return Residual(body=Chain(tuple(layers)))

    @staticmethod
    def one(channels: int) -> Conv:
        """Return a 1x1 convolution."""
        return Conv(channels=channels, kernel=1, initial=FAN_OUT_HE)

    def _full(self, channels: int, build: BuildOptions) -> Conv:
        """Return a convolution with the block's window and stride."""
        padding = build.padding(self.kernel, symmetric=self.symmetric)
        return Conv(channels=channels, kernel=self.kernel, stride=self.stride, padding=padding, initial=FAN_OUT_HE)

    def _depthwise(self, build: BuildOptions) -> Conv:
        groups = groups_of(self.inner, self.group_dim)
        return replace(self._full(self.inner, build), groups=groups, initial=FAN_IN_HE)


def conv_block(channels: int, kernel: int, stride: int, activation: str, build: BuildOptions) -> Chain:
    """Return a convolution, a norm and an activation: the stem or the top of a network."""
    conv = Conv(channels=channels, kernel=kernel, stride=stride, padding=build.padding(kernel), initial=FAN_OUT_HE)
    return Chain((("conv", conv), *build.norm_act("", "activation", activation)))


def classifier(rate: float, build: BuildOptions) -> tuple[Named, ...]:
    drop: tuple[Named, ...] = (("top_dropout", Dropout(rate)),) if rate else ()
    return *drop, ("predictions", Dense(features=build.num_classes, logits=True))


def groups_of(channels: int, group_dim: int) -> int:
    """Return the number of groups of `group_dim` channels, or of the nearest size that divides the channels."""
    wanted = max(channels // group_dim, 1)
    divisors = (groups for groups in range(1, channels + 1) if channels % groups == 0)
    return wanted if channels % wanted == 0 else min(divisors, key=lambda groups: abs(channels / groups - group_dim))


_TOP_CHANNELS, _SE_RATIO, _SURVIVAL = 1280, 0.25, 0.8  # as in the paper; the first is scaled by the width
# names of a block's parts in the TensorFlow 1 code and in timm -> the layer each begins with
_PARTS = (("b", "dwconv"), ("SE", "se"), ("c", "project_conv"))
_TIMM_PARTS = (("conv_dw", "dwconv"), ("se", "se"), ("conv_pwl", "project_conv"))


def blocks(row: EfficientNetRow, build: BuildOptions) -> tuple[Named, ...]:
    options = build.options
    top_width = _TOP_CHANNELS if options.top_width is None else options.top_width
    activation = _activation(row, build)
    stem_stride = 1 if row.small_images else 2
    stem = conv_block(_inputs(row, row.groups[0], build), 3, stem_stride, activation, build)
    top_channels = top_width if row.lite else _scaled(row, top_width, build)
    top = conv_block(top_channels, 1, 1, activation, build) if top_width else None
    blocks: list[Named] = [("stem", stem)]
    blocks += [(name, block.layer(build)) for name, block in inverted(row, build)]
    blocks += [("top", top or Chain(build.norm_act("", "activation", activation)))]
    blocks += [("avg_pool", GlobalAveragePool())]
    return *blocks, *classifier(build.dropout(row.dropout_rate), build)


def inverted(row: EfficientNetRow, build: BuildOptions) -> Iterator[tuple[str, Inverted]]:
    """Return the inverted bottlenecks by name: `block2a` is the first of the second group."""
    options = build.options
    last_survival = _SURVIVAL if options.block_survival_prob is None else options.block_survival_prob
    repeats, activation = _repeats(row, build), _activation(row, build)
    number = 0
    for place, group in enumerate(row.groups):
        ratio = (options.expand_ratio or group.expansion) if group.expansion > 1 else 1
        channels, outputs = _inputs(row, group, build), _scaled(row, group.outputs, build)
        for i in range(repeats[place]):
            squeeze = SqueezeExcite(width=max(1, int(channels * _SE_RATIO)), activation=activation)
            yield (
                f"block{place + 1}{_letters(i)}",
                Inverted(
                    inputs=channels,
                    inner=channels * ratio,
                    outputs=outputs,
                    kernel=group.kernel,
                    stride=1 if i or (place == 1 and row.small_images) else group.stride,
                    activation=activation,
                    group_dim=options.group_dim or 1,
                    squeeze=squeeze if options.se and not (row.lite or group.fused) else None,
                    # The deeper a block, the more often it is dropped.
                    survival=1 - (1 - last_survival) * number / sum(repeats),
                    fused=group.fused,
                ),
            )
            channels, number = outputs, number + 1


def aliases(row: EfficientNetRow, build: BuildOptions) -> tuple[tuple[str, str], ...]:
    """Return other names of split points: those of the TensorFlow 1 code, and timm's modules."""
    named = [("block0", "stem"), ("Top", "top"), ("conv_stem", "stem"), ("conv_head", "top")]
    for group, repeats in enumerate(_repeats(row, build), start=1):
        for i in range(repeats):
            block, timm = f"block{group}{_letters(i)}", f"blocks/{group - 1}/{i}"
            named += [(f"{block}/{theirs}", f"{block}/{layer}") for theirs, layer in _PARTS]
            named += [(timm, block), (f"{timm}/conv_pw", block)]
            named += [(f"{timm}/{theirs}", f"{block}/{layer}") for theirs, layer in _TIMM_PARTS]
    return tuple(named)


def _activation(row: EfficientNetRow, build: BuildOptions) -> str:
    return "relu" if build.options.use_relu else "relu6" if row.lite else "swish"


def _inputs(row: EfficientNetRow, group: Group, build: BuildOptions) -> int:
    fixed = row.lite and group is row.groups[0]
    return group.inputs if fixed else _scaled(row, group.inputs, build)


def _scaled(row: EfficientNetRow, channels: int, build: BuildOptions) -> int:
    width = build.options.width_coefficient or row.width
    return near_multiple(channels * width, build.options.depth_divisor or 8, row.least)


def _repeats(row: EfficientNetRow, build: BuildOptions) -> list[int]:
    depth = build.options.depth_coefficient or row.depth
    ends = (0, len(row.groups) - 1) if row.lite else ()
    return [group.repeats if i in ends else math.ceil(group.repeats * depth) for i, group in enumerate(row.groups)]


def _letters(i: int) -> str:
    """Return a, b, ... z, aa, ab ... for the position of a block in its group."""
    return ascii_lowercase[i] if i < 26 else _letters(i // 26 - 1) + ascii_lowercase[i % 26]
