"""FastNet: a small wide network for 32x32 images, made to learn CIFAR-10 in seconds.

A 2x2 stem that whitens patches, three groups of two 3x3 convolutions with a max pool between them, one linear layer;
no shortcuts. The large one has a third convolution in each group, with a shortcut around the last two. Convolutions
start as identities, so that the untrained network passes its input on. The ideas are those of Page's "How to train your
ResNet" and of Jordan's "94 % on CIFAR-10 in 3.29 seconds".
"""

from dataclasses import dataclass
from functools import reduce

import numpy as np

from headrace.model.activations import Activation
from headrace.model.build_options import BuildOptions
from headrace.model.composite import Chain, Named, Residual
from headrace.model.initial import VarianceScaling
from headrace.model.layers import Conv, Dense, Flatten, MaxPool
from headrace.model.whitening import whitening_filters
from headrace.rows.networks.fastnet import FastNetRow

_DRAWN = VarianceScaling(scale=1 / 3, distribution="uniform")  # PyTorch's default
_HEAD = VarianceScaling(scale=1 / 3 / 81, distribution="uniform")  # a ninth of it: logits start small


@dataclass(frozen=True)
class Whitening:
    """Filters that decorrelate patches of natural images: each component of a patch, scaled to variance 1, and its
    negative; channels beyond those are drawn.

    The components are those of a covariance in which correlation falls by a factor for each pixel down, right and from
    one colour to the next. On 2x2 patches of CIFAR-10 the filters' variances are then 0.3 to 1.5.
    """

    down: float = 0.91
    right: float = 0.93
    color: float = 0.9

    def covariance(self, window: tuple[int, int], channels: int) -> np.ndarray:
        """Return the covariance of the values of a patch, in the order of a kernel: rows, columns, channels."""
        sizes = zip((self.down, self.right, self.color), (*window, channels), strict=True)
        return reduce(np.kron, (rate ** np.abs(np.subtract.outer(np.arange(n), np.arange(n))) for rate, n in sizes))

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Return float32 weights [height, width, channels in, channels out]."""
        covariance = self.covariance((shape[0], shape[1]), shape[2])
        filters = whitening_filters(covariance, (shape[0], shape[1], shape[2]))[..., : shape[3]]
        kernel = _DRAWN.sample(rng, shape)
        kernel[..., : filters.shape[3]] = filters
        return kernel


@dataclass(frozen=True)
class Identity:
    """Filters that pass a channel on, one for each channel in; the other filters are drawn."""

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Return float32 weights [height, width, channels in, channels out]."""
        kernel, passed = _DRAWN.sample(rng, shape), min(shape[2:])
        kernel[..., :passed] = 0
        kernel[shape[0] // 2, shape[1] // 2, range(passed), range(passed)] = 1
        return kernel


def blocks(row: FastNetRow, build: BuildOptions) -> tuple[Named, ...]:
    kind = build.options.activation or "gelu"
    stem = Conv(channels=24, kernel=2, padding="VALID", bias=True, initial=Whitening())
    named: list[Named] = [("stem", Chain((("conv", stem), ("activation", Activation(kind)))))]
    for number, width in enumerate(row.widths, start=1):
        conv = Conv(channels=width, initial=Identity())
        first = (("1_conv", conv), ("1_pool", MaxPool(window=2, stride=2)), *_act("1", kind, build))
        second = (("2_conv", conv), *_act("2", kind, build))
        if row.residual:
            body = Chain((*second, ("3_conv", conv), build.norm_named("3_")))
            second = (("residual", Residual(body=body)), ("3_activation", Activation(kind)))
        named += [(f"group{number}_1", Chain(first)), (f"group{number}_2", Chain(second))]
    head = Dense(features=build.num_classes, logits=True, initial=_HEAD)
    return *named, ("max_pool", MaxPool(window=3, stride=3)), ("flatten", Flatten()), ("predictions", head)


def _act(number: str, kind: str, build: BuildOptions) -> tuple[Named, Named]:
    return build.norm_act(f"{number}_", f"{number}_activation", kind)
