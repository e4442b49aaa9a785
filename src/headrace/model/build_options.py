"""What all blocks of a network share: the norm, the dialect and the model options."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.config.schema import ModelSection
from headrace.model.activations import activation_of
from headrace.model.composite import Named
from headrace.model.layers import Conv
from headrace.model.norm import DEFAULT_EPSILON, Norm, NormSpec, ProxyActivation
from headrace.ops.pool import Padding


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How definitions of the same network differ between libraries.

    Symmetric padding is PyTorch's: equal on all sides, even where a stride leaves a pixel over. Otherwise it is SAME.
    """

    symmetric: bool
    projects_first_group: bool  # ResNet-10, 18, 34: 1x1 convolution on the first shortcut, although shapes match
    shortcut: Literal["pad-end", "pad-both"]  # of CIFAR ResNets
    epsilon: float  # of norms; rows say where a network has another
    strides_first: bool = False  # the first 1x1 convolution of a bottleneck has the stride, not the 3x3 one
    symmetric_mobilenets: bool = True


DIALECTS: Mapping[str, Dialect] = {
    "reference": Dialect(
        symmetric=False,
        projects_first_group=True,
        shortcut="pad-end",
        epsilon=DEFAULT_EPSILON,
    ),
    "torchvision": Dialect(
        symmetric=True,
        projects_first_group=False,
        shortcut="pad-both",
        epsilon=1e-5,
    ),
    "timm": Dialect(symmetric=True, projects_first_group=False, shortcut="pad-both", epsilon=1e-5),
    "keras": Dialect(
        symmetric=False,
        projects_first_group=True,
        shortcut="pad-end",
        epsilon=DEFAULT_EPSILON,
        strides_first=True,
        symmetric_mobilenets=False,
    ),
}


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The choices for a whole network, and the layers they determine."""

    name: str  # of the network
    norm: NormSpec
    dialect: Dialect
    options: ModelSection
    num_classes: int

    def padding(self, kernel: int, *, symmetric: bool = False) -> Padding:
        if not (symmetric or self.dialect.symmetric):
            return "SAME"
        half = kernel // 2
        return (half, half), (half, half)

    def conv(self, channels: int, kernel: int = 3, stride: int = 1) -> Conv:
        """Return a convolution without bias."""
        return Conv(channels=channels, kernel=kernel, stride=stride, padding=self.padding(kernel))

    def dropout(self, usual: float) -> float:
        """Return the rate of dropout before the classifier: the option's, or the network's own."""
        return usual if self.options.dropout_rate is None else self.options.dropout_rate

    @property
    def activation(self) -> str:
        """The activation of a ResNet: the option's, or ReLU."""
        return self.options.activation or "relu"

    def norm_named(self, name: str, gamma: float = 1.0) -> Named:
        """Return a norm whose name ends in its kind: `1_` becomes `1_bn` or `1_gn`."""
        return f"{name}{self.norm.suffix}", Norm(spec=self.norm, gamma=gamma)

    def norm_act(self, norm: str, activation: str, kind: str = "relu") -> tuple[Named, Named]:
        """Return a norm and the activation after it, with their names; with proxy norm if enabled."""
        name, layer = self.norm_named(norm)
        if self.norm.proxy_epsilon is not None and self.norm.kind != "none":
            proxy = ProxyActivation(kind=kind, epsilon=self.norm.proxy_epsilon)
            return (name, Norm(spec=self.norm, learnt=False)), (activation, proxy)
        return (name, layer), (activation, activation_of(kind))


def near_multiple(channels: float, divisor: int = 8, least: float = 0.9) -> int:
    """Round channels to a multiple of the divisor, at least the divisor and at least 0.9 of the channels."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < least * channels else rounded
