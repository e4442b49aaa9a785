"""ResNets and ResNeXts for ImageNet (v1.5) and CIFAR images, with squeeze-excite or deep stems.

A residual unit is two blocks: the unit up to its addition, and the relu after it, where pipelines are cut. Layers are
named as in the reference: `conv2_block1` + `1_conv`.
"""

from dataclasses import dataclass, replace

from headrace.core.errors import ConfigError
from headrace.model.activations import activation_of
from headrace.model.build_options import BuildOptions, near_multiple
from headrace.model.composite import Chain, Named, Residual, SubsampleShortcut
from headrace.model.gates import DropPath, SqueezeExcite
from headrace.model.initial import GLOROT_UNIFORM
from headrace.model.layers import AveragePool, BlurPool, Conv, Dense, GlobalAveragePool, MaxPool
from headrace.rows.networks.resnet import ResNetRow


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """A residual unit: its group, width and stride, and whether it is the first of its group."""

    group: int
    width: int
    stride: int
    first: bool

    @property
    def grows(self) -> bool:
        """Say whether the unit has a wider output than input, and a smaller one, if nothing before it does that."""
        return self.first and self.group > 0


def blocks(row: ResNetRow, build: BuildOptions) -> tuple[Named, ...]:
    _check_options(row, build)
    width = 64 if row.stem != "cifar" or build.options.widenet else 16
    stem = build.options.stem or row.stem
    blocks = list(_cifar_stem(width, build) if stem == "cifar" else _imagenet_stem(stem == "deep", width, build))
    dropped = 1 - (1.0 if build.options.block_survival_prob is None else build.options.block_survival_prob)
    for group, count in enumerate(row.units):
        for i in range(count):
            first = i == 0
            unit = UnitSpec(group=group, width=width << group, stride=2 if group and first else 1, first=first)
            name = f"conv{group + 2}_block{i + 1}"
            if unit.stride > 1 and build.options.downsample == "max-blur":
                blocks.append((f"{name}_pool", _max_blur()))
                unit = replace(unit, stride=1)
            # 0 at the first unit, 1 at the last
            depth = (sum(row.units[:group]) + i) / max(sum(row.units) - 1, 1)
            residual = _with_drop(_unit(row, unit, build), 1 - dropped * depth)
            blocks += [(name, residual), (f"{name}_{relu_of(row)}", activation_of(build.activation))]
    head = "fc_layer" if row.is_cifar_basic else "predictions"
    return *blocks, ("avg_pool", GlobalAveragePool()), (head, Dense(features=build.num_classes, logits=True))


def relu_of(row: ResNetRow) -> str:
    """The suffix in the name of the relu after a unit."""
    return "post_addition_relu" if row.is_cifar_basic else "out"


def aliases(row: ResNetRow, build: BuildOptions) -> tuple[tuple[str, str], ...]:
    """Return other names of split points: both conventions of the TensorFlow 1 code, and PyTorch's modules."""
    named = [("b0", "conv1"), ("stage0", "conv1"), ("reduce_mean", "avg_pool"), ("pool1_pad", "pool1")]
    named += [("fc1", "fc_layer"), ("fc1", "predictions"), ("avgpool", "avg_pool")]
    named += [("fc", "fc_layer"), ("fc", "predictions"), ("pool1_pool", "pool1"), ("maxpool", "pool1")]
    for group, count in enumerate(row.units, start=1):
        for i in range(count):
            unit = f"conv{group + 1}_block{i + 1}"
            for theirs in (f"b{group}/{i}", f"stage{group}/unit{i + 1}"):
                named += [(theirs, unit), (f"{theirs}/relu", f"{unit}_{relu_of(row)}")]
            named += [(f"layer{group}/{i}", unit), (f"layer{group}/{i}/conv1", unit)]
            for k in (2, 3):
                named += [(f"layer{group}/{i}/conv{k}", f"{unit}/{k}_conv")]
            named += [(f"layer{group}/{i}/conv2", f"{unit}/layer2_conv")]
    return tuple(named)


def _unit(row: ResNetRow, unit: UnitSpec, build: BuildOptions) -> Residual:
    if row.unit == "bottleneck":
        found = _bottleneck_unit(_inner(row, unit, build), unit, build)
    else:
        found = _cifar_unit(unit, build) if row.is_cifar_basic else _basic_unit(unit, build)
    if row.squeezes:
        channels = unit.width * (4 if row.unit == "bottleneck" else 1)
        squeeze = SqueezeExcite(width=near_multiple(channels / 16, least=0.0), activation="relu")
        found = replace(found, body=Chain((*found.body.layers, ("se", squeeze))))
    if unit.stride > 1 and build.options.downsample == "blur":
        found = replace(found, body=_blurred(found.body))
    pools = build.options.shortcut == "pool" or (build.options.shortcut == "auto" and row.stem == "deep")
    if pools and unit.stride > 1:
        (name, conv), *rest = found.shortcut.layers
        assert isinstance(conv, Conv)
        halved = ("0_pool", AveragePool(window=2, stride=2, padding="SAME")), (name, replace(conv, stride=1))
        found = replace(found, shortcut=Chain((*halved, *rest)))
    return found


def _inner(row: ResNetRow, unit: UnitSpec, build: BuildOptions) -> Conv:
    """Return the 3x3 convolution of a bottleneck."""
    stride = 1 if build.dialect.strides_first else unit.stride
    if row.cardinality == 1:
        return build.conv(unit.width, stride=stride)
    groups = build.options.convolution_groups or row.cardinality
    width = groups * (build.options.group_dim or 4) << unit.group
    return replace(build.conv(width, stride=stride), groups=groups)


def _check_options(row: ResNetRow, build: BuildOptions) -> None:
    """Raise ConfigError for options that only other rows of the family support."""
    if build.options.widenet and row.stem != "cifar":
        raise ConfigError(
            f"widenet is on for {build.name}.",
            rule="Only the ResNeXts for CIFAR images have a wide variant.",
            remedy="Omit widenet, or choose a network such as cifar_resnext29.",
        )
    if build.options.shortcut.startswith("pad") and row.unit == "bottleneck":
        raise ConfigError(
            f"shortcut is {build.options.shortcut} for {build.name}.",
            rule="In bottleneck units, a shortcut that changes the shape is a 1x1 convolution.",
            remedy="Omit shortcut, or choose a network with basic units, such as cifar_resnet56.",
        )

    if build.options.shortcut == "pool" and build.options.downsample == "max-blur":
        raise ConfigError(
            f"shortcut is pool and downsample is max-blur for {build.name}.",
            rule="max-blur halves an image before the unit, so that its shortcut has nothing left to average.",
            remedy="Leave one of them out, or take downsample blur.",
        )
    if build.options.zero_init_residual is not None and build.norm.kind == "none":
        raise ConfigError(
            f"zero_init_residual is {'on' if build.options.zero_init_residual else 'off'} without norms.",
            rule="It is about the scale of a unit's last norm.",
            remedy="Leave zero_init_residual out, or choose a norm.",
        )


def _max_blur() -> Chain:
    """Return the largest of 2x2 pixels, blurred and halved."""
    return Chain((("pool", MaxPool(window=2, stride=1, padding="SAME")), ("blur", BlurPool())))


def _blurred(body: Chain) -> Chain:
    """Return a unit's body with its stride in a blur, after the norm and activation that follow the convolution."""
    found = ((i, layer) for i, (_, layer) in enumerate(body.layers) if isinstance(layer, Conv) and layer.stride > 1)
    ((at, conv),) = found
    whole, blur = (body.layers[at][0], replace(conv, stride=1)), ("blur", BlurPool(stride=conv.stride))
    return Chain((*body.layers[:at], whole, *body.layers[at + 1 : at + 3], blur, *body.layers[at + 3 :]))


def _last_gamma(build: BuildOptions, usual: float) -> float:
    """Return the scale that a unit's last norm starts with."""
    zero = build.options.zero_init_residual
    return usual if zero is None else 1.0 - zero


def _with_drop(unit: Residual, survival: float) -> Residual:
    """Return a unit whose branch is dropped at random in training (stochastic depth)."""
    if survival == 1:
        return unit
    return replace(unit, body=Chain((*unit.body.layers, ("drop", DropPath(survival)))))


def conv_norm(name: str, conv: Conv, build: BuildOptions, gamma: float = 1.0) -> tuple[Named, Named]:
    """Return a convolution and its norm, named as in the reference."""
    return (f"{name}_conv", conv), build.norm_named(f"{name}_", gamma)


def conv_norm_relu(name: str, conv: Conv, build: BuildOptions) -> tuple[Named, ...]:
    return (f"{name}_conv", conv), *build.norm_act(f"{name}_", f"{name}_relu", build.activation)


def _projection(unit: UnitSpec, channels: int, build: BuildOptions) -> Chain:
    return Chain(conv_norm("0", build.conv(channels, kernel=1, stride=unit.stride), build) if unit.first else ())


def _basic_unit(unit: UnitSpec, build: BuildOptions) -> Residual:
    body = (
        *conv_norm_relu("1", build.conv(unit.width, stride=unit.stride), build),
        *conv_norm("2", build.conv(unit.width), build, _last_gamma(build, 1.0)),
    )
    chosen = build.options.shortcut
    if chosen in ("pad-end", "pad-both"):
        return Residual(body=Chain(body), shortcut=_padded(unit, chosen == "pad-both"))
    first = unit.first and (unit.group > 0 or build.dialect.projects_first_group)
    return Residual(body=Chain(body), shortcut=_projection(replace(unit, first=first), unit.width, build))


def _bottleneck_unit(inner: Conv, unit: UnitSpec, build: BuildOptions) -> Residual:
    """Return a unit; with an identity shortcut it usually starts as the identity (its last gamma is 0)."""
    stride = unit.stride if build.dialect.strides_first else 1
    body = (
        *conv_norm_relu("1", build.conv(inner.channels, kernel=1, stride=stride), build),
        *conv_norm_relu("2", inner, build),
        *conv_norm("3", build.conv(4 * unit.width, kernel=1), build, _last_gamma(build, 1.0 if unit.first else 0.0)),
    )
    return Residual(body=Chain(body), shortcut=_projection(unit, 4 * unit.width, build))


def _cifar_unit(unit: UnitSpec, build: BuildOptions) -> Residual:
    conv1, *rest = conv_norm_relu("layer1", build.conv(unit.width, stride=unit.stride), build)
    body = (
        ("layer1_conv_ds" if unit.grows else "layer1_conv", conv1[1]),
        *rest,
        *conv_norm("layer2", build.conv(unit.width), build, _last_gamma(build, 1.0)),
    )
    chosen = build.dialect.shortcut if build.options.shortcut == "auto" else build.options.shortcut
    if chosen in ("projection", "pool"):
        conv = build.conv(unit.width, kernel=1, stride=unit.stride)
        shortcut = Chain(conv_norm("shortcut", conv, build) if unit.grows else ())
    else:
        shortcut = _padded(unit, chosen == "pad-both")
    return Residual(body=Chain(body), shortcut=shortcut)


def _padded(unit: UnitSpec, both_sides: bool) -> Chain:
    """Return the shortcut without parameters (option A); the identity if the shape stays."""
    if not unit.grows:
        return Chain()
    shortcut = SubsampleShortcut(channels=unit.width, stride=unit.stride, both_sides=both_sides)
    return Chain((("shortcut", shortcut),))


def _imagenet_stem(deep: bool, width: int, build: BuildOptions) -> tuple[Named, ...]:
    """Return a 7x7/2 convolution, or three 3x3 ones, and a 3x3/2 max pool, padded equally on all sides.

    The reference pads the pool with zeros, which is equivalent to ignoring padding as the relu leaves no negatives.
    """
    conv = Conv(channels=width, kernel=7, stride=2, padding=build.padding(7, symmetric=True), initial=GLOROT_UNIFORM)
    layers = (("conv", conv), *build.norm_act("", "relu", build.activation))
    if deep:
        half = width // 2
        convs = enumerate((build.conv(half, stride=2), build.conv(half), build.conv(width)), start=1)
        layers = tuple(layer for number, conv in convs for layer in conv_norm_relu(str(number), conv, build))
    pool = MaxPool(window=3, stride=2, padding=build.padding(3, symmetric=True))
    pools = {
        "stride": Chain((("pool", pool),)),
        "blur": Chain((("pool", replace(pool, stride=1)), ("blur", BlurPool()))),
        "max-blur": _max_blur(),
    }
    return ("conv1", Chain(layers)), ("pool1", pools[build.options.downsample])


def _cifar_stem(width: int, build: BuildOptions) -> tuple[Named, ...]:
    return (("conv1", Chain((("conv", build.conv(width)), *build.norm_act("", "relu", build.activation)))),)
