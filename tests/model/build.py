"""Short ways to a network."""

import importlib
from typing import Any

import jax

from headrace.config.load import config_from
from headrace.config.networks import find_variant
from headrace.model.activations import Activation
from headrace.model.build_options import DIALECTS, BuildOptions
from headrace.model.composite import Chain, Residual
from headrace.model.context import Ctx
from headrace.model.gates import Dropout, DropPath, SqueezeExcite
from headrace.model.layers import Conv, Dense, GlobalAveragePool
from headrace.model.network import Network
from headrace.model.norm import Norm, NormSpec
from headrace.model.zoo import build_network
from headrace.rows.network import NetworkRow
from headrace.rows.networks import FAMILIES


def network(
    name: str = "cifar_resnet8", num_classes: int = 0, image: tuple[int, int, int] | None = None, **options
) -> Network:
    """Build a network by name, at its own image size and classes unless told otherwise."""
    row = find_variant(name)
    model = config_from({"model_name": name, **options}).model
    return build_network(model, num_classes or row.num_classes, image or (row.image_size, row.image_size, 3))


def compute(layer: Any, params: Any, stats: Any, x: Any, ctx: Ctx) -> Any:
    """Apply a layer or a network as one program; without, JAX compiles one for each operation and shape."""
    return jax.jit(lambda *given: layer.apply(*given, ctx))(params, stats, x)


def row_network(
    row: NetworkRow, image: tuple[int, int, int] = (32, 32, 3), num_classes: int = 5, norm: NormSpec | None = None
) -> Network:
    """Build a network from a row that is in no table: one too small to be of use, and soon compiled."""
    build = BuildOptions(
        name=row.name,
        norm=norm or NormSpec(epsilon=1e-5),
        dialect=DIALECTS["timm"],
        options=config_from({}).model,
        num_classes=num_classes,
    )
    return Network(
        name="row",
        blocks=importlib.import_module(FAMILIES[row.family].module).blocks(row, build),
        input_hwc=image,
        num_classes=num_classes,
    )


def small_squeeze_excite(
    image: tuple[int, int, int] = (8, 8, 3),
    num_classes: int = 10,
    dropout_rate: float = 0.2,
    survival: float = 0.8,
    norm: NormSpec | None = None,
) -> Network:
    """Build a small network with depthwise convolutions, squeeze-excite, stochastic depth and dropout."""

    def body(channels: int, stride: int) -> Chain:
        spec = norm or NormSpec()
        return Chain((
            ("expand_conv", Conv(channels=2 * channels, kernel=1)),
            ("expand_bn", Norm(spec=spec)),
            ("expand_activation", Activation("swish")),
            ("dwconv", Conv(channels=2 * channels, stride=stride, groups=2 * channels)),
            ("bn", Norm(spec=spec)),
            ("activation", Activation("hard_swish")),
            ("se", SqueezeExcite(width=4)),
            ("project_conv", Conv(channels=channels, kernel=1)),
            ("project_bn", Norm(spec=spec)),
        ))  # fmt: skip

    def skip(channels: int) -> Residual:
        return Residual(body=Chain((*body(channels, 1).layers, ("drop", DropPath(survival)))))

    stem = Chain(
        (("conv", Conv(channels=8)), ("bn", Norm(spec=norm or NormSpec())), ("activation", Activation("swish")))
    )
    return Network(
        name="small_squeeze_excite",
        blocks=(
            ("stem", stem),
            ("block1a", skip(8)),
            ("block2a", body(16, 2)),
            ("block2b", skip(16)),
            ("avg_pool", GlobalAveragePool()),
            ("dropout", Dropout(dropout_rate)),
            ("predictions", Dense(features=num_classes, logits=True)),
        ),
        input_hwc=image,
        num_classes=num_classes,
    )
