"""All networks by name, built according to the model options; SqueezeNet and the toy networks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.config.model_table import VARIANTS, find_variant, norm_choice
from headrace.config.schema import Model
from headrace.model.build_options import DIALECTS, BuildOptions, default_epsilon
from headrace.model.convnext import CONVNEXTS
from headrace.model.densenet_vgg import DENSENETS, VGGS
from headrace.model.efficientnet import EFFICIENTNETS
from headrace.model.fastnet import FASTNETS
from headrace.model.gates import Dropout
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
)
from headrace.model.mobilenet import MOBILENETS
from headrace.model.network import Network
from headrace.model.norm import make_norm_spec
from headrace.model.regnet import REGNETS
from headrace.model.resnet import RESNETS

# SqueezeNet 1.0: fire modules that squeeze channels by 1x1 and expand them by 1x1 and 3x3 in parallel; no norms.


_POOL = "pool"
# squeezed channels of each fire module; each branch of its expansion has four times as many
_PLAN = (16, 16, 32, _POOL, 32, 48, 48, 64, _POOL, 64)
_BYPASSED = (3, 5, 7, 9)


@dataclass(frozen=True, kw_only=True)
class SqueezeNet:
    """SqueezeNet, which has a single size."""

    def blocks(self, build: BuildOptions) -> tuple[Named, ...]:
        """Return the named blocks, numbered as in the paper: `fire2` follows `conv1`."""
        rate = 0.5 if build.options.dropout_rate is None else build.options.dropout_rate
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

    def aliases(self, build: BuildOptions) -> tuple[tuple[str, str], ...]:
        """Return no other names."""
        return ()


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
class Toy:
    """A toy network of two small convolutions, for tests and first steps; with or without norms."""

    norm: bool

    def blocks(self, build: BuildOptions) -> tuple[Named, ...]:
        """Return the named blocks."""
        blocks: list[Named] = []
        for i, (kernel, channels) in enumerate(((3, 4), (1, 8))):
            conv = Conv(channels=channels, kernel=kernel, padding="VALID", bias=True, initial=GLOROT_UNIFORM)
            blocks += [(f"conv2d_{i}", Chain((("conv", conv), ("relu", Relu()))))]
            blocks += [(f"max_pool_{i}", MaxPool(window=5, stride=5))]
            if self.norm:
                suffix, layer = build.norm_named("")
                blocks += [(f"{suffix}_{i}", layer)]
        return *blocks, ("flatten", Flatten()), ("dense", Dense(features=build.num_classes, logits=True))

    def aliases(self, build: BuildOptions) -> tuple[tuple[str, str], ...]:
        """Return no other names."""
        return ()


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
