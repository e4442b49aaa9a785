"""All networks by name, built according to the model options; SqueezeNet, FastNet and the toy networks."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import numpy as np

from headrace.config.schema import Model
from headrace.config.section_model import VARIANTS, find_variant, norm_choice
from headrace.model.densenet_vgg import DENSENETS, VGGS
from headrace.model.efficientnet import CONVNEXTS, EFFICIENTNETS, MOBILENETS
from headrace.model.layers import (
    FAN_IN_HE,
    GLOROT_UNIFORM,
    Chain,
    Concat,
    Conv,
    Dense,
    Flatten,
    GlobalAveragePool,
    Layer,
    MaxPool,
    Named,
    Relu,
    Residual,
    VarianceScaling,
)
from headrace.model.network import Network
from headrace.model.norm import DIALECTS, Activation, BuildOptions, Dropout, default_epsilon, make_norm_spec
from headrace.model.resnet import REGNETS, RESNETS

# FastNet: a small wide network for 32x32 images, made to learn CIFAR-10 in seconds.
#
# A 2x2 stem that whitens patches, three groups of two 3x3 convolutions with a max pool between them, one linear layer;
# no shortcuts. Convolutions start as identities, so that the untrained network passes its input on. The ideas are those
# of Page's "How to train your ResNet" and of Jordan's "94 % on CIFAR-10 in 3.29 seconds".


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
        variances, components = np.linalg.eigh(self.covariance((shape[0], shape[1]), shape[2]))
        # LAPACK leaves the signs open: fixed, so that every machine starts from the same weights.
        components = components * np.sign(components[np.abs(components).argmax(0), np.arange(len(variances))])
        filters = (components / np.sqrt(variances)).reshape(*shape[:3], -1)[..., ::-1]
        filters = np.concatenate([filters, -filters], -1)[..., : shape[3]]
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


class _WithoutAliases:
    """A row whose split points have no other names."""

    def aliases(self, build: BuildOptions) -> tuple[tuple[str, str], ...]:
        """Return no other names."""
        return ()


@dataclass(frozen=True, kw_only=True)
class FastNet(_WithoutAliases):
    """One row of the table: the channels of each group."""

    widths: tuple[int, ...]
    activation: str = "gelu"

    def blocks(self, build: BuildOptions) -> tuple[Named, ...]:
        stem = Conv(channels=24, kernel=2, padding="VALID", bias=True, initial=Whitening())
        blocks: list[Named] = [("stem", Chain((("conv", stem), ("activation", Activation(self.activation)))))]
        for number, width in enumerate(self.widths, start=1):
            conv = Conv(channels=width, initial=Identity())
            first = (("1_conv", conv), ("1_pool", MaxPool(window=2, stride=2)), *self._act("1", build))
            second = (("2_conv", conv), *self._act("2", build))
            blocks += [(f"group{number}_1", Chain(first)), (f"group{number}_2", Chain(second))]
        head = Dense(features=build.num_classes, logits=True, initial=_HEAD)
        return *blocks, ("max_pool", MaxPool(window=3, stride=3)), ("flatten", Flatten()), ("predictions", head)

    def _act(self, number: str, build: BuildOptions) -> tuple[Named, Named]:
        return build.norm_act(f"{number}_", f"{number}_activation", self.activation)


FASTNETS: dict[str, FastNet] = {"cifar_fastnet": FastNet(widths=(64, 256, 256))}


# SqueezeNet 1.0: fire modules that squeeze channels by 1x1 and expand them by 1x1 and 3x3 in parallel; no norms.


_POOL = "pool"
# squeezed channels of each fire module; each branch of its expansion has four times as many
_PLAN = (16, 16, 32, _POOL, 32, 48, 48, 64, _POOL, 64)
# The paper's simple bypass: fire modules whose input and output have as many channels (numbered from 2 on).
_BYPASSED = (3, 5, 7, 9)


@dataclass(frozen=True, kw_only=True)
class SqueezeNet(_WithoutAliases):
    """SqueezeNet, which has a single size."""

    def blocks(self, build: BuildOptions) -> tuple[Named, ...]:
        """Return the named blocks, numbered as in the paper: `fire2` follows `conv1`."""
        rate = build.dropout(0.5)
        stem = Conv(channels=96, kernel=7, stride=2, padding="VALID", bias=True, initial=FAN_IN_HE)
        blocks: list[Named] = [("conv1", Chain((("conv", stem), ("relu", Relu())))), ("pool1", _pool())]
        number = 2
        for entry in _PLAN:
            if isinstance(entry, str):
                blocks.append((f"pool{number - 1}", _pool()))
            else:
                bypass = build.options.use_bypass and number in _BYPASSED
                blocks.append((f"fire{number}", _fire(entry, bypass)))
                number += 1
        blocks += [("drop9", Dropout(rate))] if rate else []
        last = Conv(channels=build.num_classes, kernel=1, bias=True, initial=GLOROT_UNIFORM)
        return *blocks, ("conv10", Chain((("conv", last), ("relu", Relu())))), ("avg_pool", GlobalAveragePool())


def _fire(squeezed: int, bypass: bool) -> Layer:
    squeeze = Conv(channels=squeezed, kernel=1, bias=True, initial=FAN_IN_HE)
    branches = Concat(
        layers=tuple(
            (f"{kernel}x{kernel}", Conv(channels=4 * squeezed, kernel=kernel, bias=True, initial=FAN_IN_HE))
            for kernel in (1, 3)
        )
    )
    layers = (("squeeze", squeeze), ("squeeze_relu", Relu()), ("expand", branches), ("expand_relu", Relu()))
    return Residual(body=Chain(layers)) if bypass else Chain(layers)


def _pool() -> MaxPool:
    """Return a 3x3/2 pool that includes the last pixel where an even size leaves one over."""
    return MaxPool(window=3, stride=2, padding=((0, 1), (0, 1)))


SQUEEZENETS: dict[str, SqueezeNet] = {"squeezenet": SqueezeNet()}


@dataclass(frozen=True, kw_only=True)
class Toy(_WithoutAliases):
    """A toy network of two small convolutions, for tests and first steps; with or without norms."""

    norm: bool

    def blocks(self, build: BuildOptions) -> tuple[Named, ...]:
        blocks: list[Named] = []
        for i, (kernel, channels) in enumerate(((3, 4), (1, 8))):
            conv = Conv(channels=channels, kernel=kernel, padding="VALID", bias=True, initial=GLOROT_UNIFORM)
            blocks += [(f"conv2d_{i}", Chain((("conv", conv), ("relu", Relu()))))]
            blocks += [(f"max_pool_{i}", MaxPool(window=5, stride=5))]
            if self.norm:
                suffix, layer = build.norm_named("")
                blocks += [(f"{suffix}_{i}", layer)]
        return *blocks, ("flatten", Flatten()), ("dense", Dense(features=build.num_classes, logits=True))


TOYS: dict[str, Toy] = {"toy_model": Toy(norm=False), "toy_model_bn": Toy(norm=True)}


class Row(Protocol):
    """A row of a family's table: makes the blocks of a network, and other names of its split points."""

    def blocks(self, build: BuildOptions) -> tuple[Named, ...]: ...
    def aliases(self, build: BuildOptions) -> tuple[tuple[str, str], ...]: ...


ROWS: Mapping[str, Row] = {
    **TOYS,
    **RESNETS,
    **EFFICIENTNETS,
    **MOBILENETS,
    **SQUEEZENETS,
    **FASTNETS,
    **CONVNEXTS,
    **REGNETS,
    **DENSENETS,
    **VGGS,
}


def model_names() -> tuple[str, ...]:
    """Return the names of all networks."""
    return tuple(VARIANTS)


def build_network(model: Model, num_classes: int, image_hwc: tuple[int, int, int]) -> Network:
    """Build the network that the model options (`config.model`) select."""
    variant = find_variant(model.model_name, model.model_size, image_hwc[0])
    dialect = DIALECTS["timm" if variant.torch_only and model.model_dialect != "torchvision" else model.model_dialect]
    norm = make_norm_spec(
        norm_choice(model),
        epsilon=default_epsilon(dialect, variant.name) if model.norm_epsilon is None else model.norm_epsilon,
        group_order=model.group_order,
        proxy_epsilon=model.proxy_epsilon if model.proxy_norm else None,
    )
    build = BuildOptions(variant=variant, norm=norm, dialect=dialect, options=model, num_classes=num_classes)
    row = ROWS[variant.name]
    return Network(
        name=variant.name,
        blocks=row.blocks(build),
        input_hwc=image_hwc,
        num_classes=num_classes,
        aliases=row.aliases(build),
    )
