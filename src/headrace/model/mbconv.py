"""The inverted bottleneck of EfficientNets and MobileNets: expand, convolve depthwise, squeeze-excite, project.

Layers are named as Keras names them after the block: `block2a` + `expand_conv`.
"""

from dataclasses import dataclass, replace

from headrace.model.composites import Chain, Named, Residual
from headrace.model.gates import DropPath, SqueezeExcite
from headrace.model.initial import FAN_IN_HE, FAN_OUT_HE
from headrace.model.layers import Conv, Layer
from headrace.model.style import Style


@dataclass(frozen=True, kw_only=True)
class Inverted:
    """One block: channels in, inside and out, its window and stride, and what stands in it."""

    inputs: int
    inner: int
    outputs: int
    kernel: int = 3
    stride: int = 1
    activation: str = "swish"
    group_dim: int = 1
    squeeze: SqueezeExcite | None = None
    survival: float = 1.0
    symmetric: bool = False  # padded as PyTorch does, whatever the dialect

    @property
    def skips(self) -> bool:
        """Say whether the block has a shortcut."""
        return self.stride == 1 and self.inputs == self.outputs

    def layer(self, style: Style) -> Layer:
        """Return the block."""
        layers: list[Named] = []
        if self.inner != self.inputs:
            layers += [("expand_conv", self.one(self.inner))]
            layers += style.norm_act("expand_", "expand_activation", self.activation)
        layers += [("dwconv", self._depthwise(style)), *style.norm_act("", "activation", self.activation)]
        layers += [("se", self.squeeze)] if self.squeeze else []
        layers += [("project_conv", self.one(self.outputs)), style.norm_named("project_")]
        if not self.skips:
            return Chain(tuple(layers))
        layers += [("drop", DropPath(self.survival))] if self.survival < 1 else []
        return Residual(body=Chain(tuple(layers)))

    @staticmethod
    def one(channels: int) -> Conv:
        """Return a 1x1 convolution."""
        return Conv(channels=channels, kernel=1, initial=FAN_OUT_HE)

    def _depthwise(self, style: Style) -> Conv:
        padding = style.padding(self.kernel, symmetric=self.symmetric)
        conv = Conv(channels=self.inner, kernel=self.kernel, stride=self.stride, padding=padding)
        return replace(conv, groups=groups_of(self.inner, self.group_dim), initial=FAN_IN_HE)


def conv_block(channels: int, kernel: int, stride: int, activation: str, style: Style) -> Chain:
    """Return a convolution, a norm and an activation: the first and the last of a network. Padded by the dialect."""
    conv = Conv(channels=channels, kernel=kernel, stride=stride, padding=style.padding(kernel), initial=FAN_OUT_HE)
    return Chain((("conv", conv), *style.norm_act("", "activation", activation)))


def groups_of(channels: int, group_dim: int) -> int:
    """Return into how many groups of about `group_dim` channels to divide all: where it does not go, the nearest."""
    wanted = max(channels // group_dim, 1)
    divisors = (groups for groups in range(1, channels + 1) if channels % groups == 0)
    return wanted if channels % wanted == 0 else min(divisors, key=lambda groups: abs(channels / groups - group_dim))


def near_multiple(channels: float, divisor: int = 8) -> int:
    """Round channels to a multiple, never below the divisor nor by more than 10 % down."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded
