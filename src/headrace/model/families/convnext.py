"""ConvNeXt: residual units of a 7x7 depthwise convolution, a layer norm and two 1x1 convolutions around a GELU.

A unit's output is scaled by a learnt factor per channel that starts near zero. The norms are layer norms over the
channels of each pixel; no option changes them. Libraries agree on the definition, so the dialect makes no difference.
"""

from headrace.model.activations import Activation
from headrace.model.build_options import BuildOptions
from headrace.model.composite import Chain, Named, Residual
from headrace.model.gates import DropPath, LayerScale
from headrace.model.initial import Normal
from headrace.model.layers import Conv, Dense, GlobalAveragePool
from headrace.model.norm import LayerNorm
from headrace.rows.networks.convnext import ConvNeXtRow

# As in the ConvNeXt paper.
_INITIAL = Normal(0.02)
_SCALE = 1e-6


def blocks(row: ConvNeXtRow, build: BuildOptions) -> tuple[Named, ...]:
    """Return the named blocks: `group2` reduces the image, `group2_block1` is the first unit after it."""
    chosen = build.options.block_survival_prob
    last_survival = row.survival if chosen is None else chosen
    norm = LayerNorm(build.norm.epsilon)
    blocks: list[Named] = [("stem", Chain((("conv", _patches(row.widths[0], 4)), ("ln", norm))))]
    number = 0
    for group, (count, width) in enumerate(zip(row.units, row.widths, strict=True), start=1):
        blocks += [(f"group{group}", Chain((("ln", norm), ("conv", _patches(width, 2)))))] if group > 1 else []
        for i in range(1, count + 1):
            # The deeper a unit, the more often it is dropped.
            survival = 1 - (1 - last_survival) * number / (sum(row.units) - 1)
            blocks += [(f"group{group}_block{i}", _unit(width, norm, survival))]
            number += 1
    blocks += [("avg_pool", GlobalAveragePool()), ("top", Chain((("ln", norm),)))]
    return *blocks, ("predictions", Dense(features=build.num_classes, logits=True, initial=_INITIAL))


def aliases(row: ConvNeXtRow, build: BuildOptions) -> tuple[tuple[str, str], ...]:
    """Return other names of split points: torchvision's and timm's modules."""
    named = [("features/0", "stem"), ("stages/0", "group1_block1"), ("head", "avg_pool")]
    for group, count in enumerate(row.units, start=1):
        named += [(f"features/{2 * group - 2}", f"group{group}"), (f"stages/{group - 1}", f"group{group}")]
        for i in range(count):
            unit = f"group{group}_block{i + 1}"
            named += [(f"features/{2 * group - 1}/{i}", unit), (f"stages/{group - 1}/blocks/{i}", unit)]
    return tuple(named)


def _patches(channels: int, size: int) -> Conv:
    """Return a convolution of patches that do not overlap."""
    return Conv(channels=channels, kernel=size, stride=size, padding="VALID", bias=True, initial=_INITIAL)


def _unit(width: int, norm: LayerNorm, survival: float) -> Residual:
    layers: tuple[Named, ...] = (
        ("dwconv", Conv(channels=width, kernel=7, groups=width, bias=True, initial=_INITIAL)),
        ("ln", norm),
        ("expand_conv", Conv(channels=4 * width, kernel=1, bias=True, initial=_INITIAL)),
        ("activation", Activation("gelu")),
        ("project_conv", Conv(channels=width, kernel=1, bias=True, initial=_INITIAL)),
        ("scale", LayerScale(_SCALE)),
    )
    return Residual(body=Chain((*layers, ("drop", DropPath(survival))) if survival < 1 else layers))
