"""What blocks of a network share: activations and gates, the norm, and the options that they are built with."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from headrace import ops
from headrace.config.schema import Model
from headrace.config.section_model import Variant
from headrace.core.errors import ConfigError, did_you_mean
from headrace.model.context import NORM_WEIGHTS, Cost, Ctx
from headrace.model.layers import (
    FAN_OUT_HE,
    Conv,
    FusibleNorm,
    Layer,
    Named,
    Relu,
    RngAt,
    SameShape,
    Shape,
    Tree,
    VarianceScaling,
    WithoutParameters,
    under,
)
from headrace.ops.pool import Padding

# Activations by name, squeeze-and-excite, layer scale, dropout and stochastic depth.
#
# Shapes in names: N images, C channels, R channels after the squeeze.


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "relu": ops.relu,
    "relu6": ops.relu6,
    "swish": ops.swish,
    "mish": ops.mish,
    "gelu": ops.gelu,
    "hard_swish": ops.hard_swish,
    "sigmoid": ops.sigmoid,
    "hard_sigmoid": ops.hard_sigmoid,
}


@dataclass(frozen=True)
class Activation(WithoutParameters):
    """An activation function, by its name in ACTIVATIONS."""

    kind: str = "relu"

    def __post_init__(self) -> None:
        assert self.kind in ACTIVATIONS, self.kind

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        return ACTIVATIONS[self.kind](x), {}

    def fusible_activation(self) -> str | None:
        """Return the name of the activation: the CPU kernels may apply it with the convolution before it."""
        return self.kind

    def cost(self, hwc: Shape) -> Cost:
        return Cost(activation_elements=math.prod(hwc))


def activation_of(kind: str) -> Layer:
    """Return the layer of an activation by its name."""
    return Relu() if kind == "relu" else Activation(kind)


@dataclass(frozen=True, kw_only=True)
class SqueezeExcite(SameShape):
    """Scale each channel by a gate computed from the means of all channels: C to R, activation, and back to C."""

    width: int
    activation: str = "swish"
    gate: str = "sigmoid"
    initial: VarianceScaling = FAN_OUT_HE

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Draw both kernels; the biases start at zero."""
        params = {}
        for name, channels in (("reduce", (hwc[2], self.width)), ("expand", (self.width, hwc[2]))):
            kernel = self.initial.sample(under(rng_at, name)("kernel"), channels)
            params[name] = {"kernel": kernel, "bias": np.zeros(channels[1], np.float32)}
        return params, {}

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Scale; means and sums in float32."""
        fused = ops.find_gate(x, self._operation(params), ctx.cpu_kernels)
        if fused is not None:
            return fused, {}
        x = ops.materialised(x)  # once, for the mean and the product
        y_NC = ops.global_average_pool(x)
        for name, function in (("reduce", self.activation), ("expand", self.gate)):
            kernel, bias = params[name]["kernel"].astype(ctx.compute_dtype), params[name]["bias"]
            y_NC = ACTIVATIONS[function](ops.dense(y_NC, kernel, bias, half_sums=ctx.half_partials)).astype(
                ctx.compute_dtype
            )
        return x * y_NC[:, None, None], {}

    def fusible_gate(self, params: Tree) -> ops.Gate | None:
        """Return the gate: the CPU kernels may apply it with the convolutions before it."""
        gate = self._operation(params)
        return gate if gate.is_known() else None

    def _operation(self, params: Tree) -> ops.Gate:
        reduce, expand = ((params[name]["kernel"], params[name]["bias"]) for name in ("reduce", "expand"))
        return ops.Gate(reduce, expand, self.activation, self.gate)

    def cost(self, hwc: Shape) -> Cost:
        channels = hwc[2]
        return Cost(
            params=2 * channels * self.width + self.width + channels,
            flops=4 * channels * self.width,
            activation_elements=math.prod(hwc) + 2 * (channels + self.width),
            product_elements=channels + self.width,
        )


@dataclass(frozen=True)
class LayerScale(SameShape):
    """A learnt factor for each channel, starting at `initial`: small at the end of a residual unit's body."""

    initial: float

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        return {"gamma": np.full(hwc[-1], self.initial, np.float32)}, {}

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        return x * params["gamma"].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,)), {}

    def cost(self, hwc: Shape) -> Cost:
        return Cost(params=hwc[-1])


@dataclass(frozen=True)
class Dropout(WithoutParameters):
    """In training, set each element to zero with probability `rate` and scale the others up."""

    rate: float

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Drop and scale in training; otherwise do nothing."""
        if not ctx.train or self.rate == 0:
            return x, {}
        kept = (ctx.uniform(*x.shape[1:]) >= np.float32(self.rate)).astype(jnp.float32)
        return x * (kept * np.float32(1 / (1 - self.rate))).astype(x.dtype), {}


@dataclass(frozen=True)
class DropPath(WithoutParameters):
    """In training, drop the whole branch of an image, or keep it with probability `survival` and scale it up.

    At the end of a residual unit's body, a dropped branch leaves only the shortcut. Also called stochastic depth.
    """

    survival: float

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Drop and scale in training; otherwise do nothing."""
        if not ctx.train or self.survival == 1:
            return x, {}
        kept = (ctx.uniform() < np.float32(self.survival)).astype(jnp.float32) * np.float32(1 / self.survival)
        return x * kept.astype(x.dtype).reshape(-1, *(1,) * (x.ndim - 1)), {}


# The norm layer (batch, group or layer norm, or none), chosen once for a network; layer norm by pixel; proxy norm.
#
# After a norm that uses one image at a time, an activation shifts and widens each channel differently. Proxy norm sends
# a Gaussian with learnt mean and width per channel through the same scale, shift and activation, and normalises the
# real activations by the resulting mean and deviation: y = (act(gamma x + beta) - mean) / deviation. These moments are
# taken over 200 quantiles. They are a function of the parameters, so gradients flow through them; recomputing them in
# every pass is cheap, as 200 numbers per channel are few compared with an image.
#
# Shapes in names: C channels, Q quantiles.


# That of Keras' ResNets.
DEFAULT_EPSILON = 1.001e-5
Kind = Literal["batch", "group", "layer", "none"]
# name in `norm_layer` -> (kind, suffix of layer names, further keys)
_NAMES: dict[str, tuple[Kind, str, tuple[str, ...]]] = {
    "batch_norm": ("batch", "bn", ("momentum",)),
    "custom_batch_norm": ("batch", "bn", ("momentum",)),
    "group_norm": ("group", "gn", ("num_groups", "channels_per_group")),
    "layer_norm": ("layer", "ln", ()),
    "none": ("none", "norm", ()),
}


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """The choice of norm for a network; `suffix` ends the names of its layers (`1_bn`, `1_gn`).

    With a `proxy_epsilon`, the activation after a norm has the learnt scale and shift, and applies proxy norm.
    """

    kind: Kind = "batch"
    suffix: str = "bn"
    num_groups: int | None = None
    channels_per_group: int | None = None
    group_order: str = "contiguous"
    epsilon: float = DEFAULT_EPSILON
    proxy_epsilon: float | None = None


@dataclass(frozen=True, kw_only=True)
class Norm(Layer):
    """Normalisation with a learnt scale (starting at `gamma`) and shift (starting at 0) per channel.

    If not `learnt` it has neither, because the proxy activation after it does.
    """

    spec: NormSpec = NormSpec()
    gamma: float = 1.0
    learnt: bool = True

    def shape(self, hwc: Shape) -> Shape:
        """Return the shape unchanged; channels that do not form whole groups raise ConfigError."""
        if self.spec.kind in ("group", "layer"):
            self.groups(hwc[2])
        return hwc

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Return scale and shift and, for batch norm, statistics of mean 0 and variance 1."""
        assert self.learnt or self.spec.kind != "batch"
        if self.spec.kind == "none" or not self.learnt:
            return {}, {}
        zeros_C, ones_C = np.zeros(hwc[2], np.float32), np.ones(hwc[2], np.float32)
        params = {"gamma": ones_C * np.float32(self.gamma), "beta": zeros_C}
        return params, {"mean": zeros_C.copy(), "variance": ones_C} if self.spec.kind == "batch" else {}

    @jax.named_scope("norm")  # by which profiles recognise norms, as no instruction is typical of them
    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Normalise; in training, batch norm also returns the mean and unbiased variance of this batch."""
        if self.spec.kind == "none":
            return x, {}
        epsilon = self.spec.epsilon
        if not self.learnt:
            params = {"gamma": jnp.ones(x.shape[-1]), "beta": jnp.zeros(x.shape[-1])}
        gamma_C, beta_C = params["gamma"], params["beta"]
        if self.spec.kind in ("group", "layer"):
            groups = self.groups(x.shape[-1])
            return ops.group_norm(x, gamma_C, beta_C, groups, epsilon, ctx.stable_norm), {}
        if self._uses_running(ctx):
            return ops.batch_norm_eval(x, gamma_C, beta_C, (stats["mean"], stats["variance"]), epsilon), stats
        y, mean_C, variance_C = ops.batch_norm_train(x, gamma_C, beta_C, epsilon, ctx.stable_norm, ctx.norm_groups)
        return y, _batch_stats(ctx, x.size // x.shape[-1], mean_C, variance_C)

    def fusible_norm(self, params: Tree, stats: Tree, ctx: Ctx) -> FusibleNorm | None:
        """Return a batch norm as the operation after a convolution; variances in two passes are not fused."""
        running = self._uses_running(ctx)
        if self.spec.kind != "batch" or not self.learnt or (ctx.stable_norm and not running):
            return None
        statistics = (stats["mean"], stats["variance"]) if running else None
        norm = ops.BatchNorm(
            gamma=params["gamma"],
            beta=params["beta"],
            epsilon=self.spec.epsilon,
            running=statistics,
            shared=ctx.norm_groups,
        )
        return FusibleNorm(norm, (lambda *_: stats) if running else partial(_batch_stats, ctx))

    def _uses_running(self, ctx: Ctx) -> bool:
        return not ctx.train or ctx.is_frozen(*NORM_WEIGHTS)

    def cost(self, hwc: Shape) -> Cost:
        return Cost(params=0 if self.spec.kind == "none" or not self.learnt else 2 * hwc[2])

    def groups(self, channels: int) -> ops.Groups:
        """Return the groups of a group norm, or the one group of a layer norm; channels that do not fit are refused."""
        if self.spec.kind == "layer":
            return ops.Groups(num_groups=1)
        size = self.spec.channels_per_group
        num_groups = self.spec.num_groups or (channels // size if size else 0)
        if num_groups < 1 or channels % num_groups or (size and channels % size):
            wanted = f"{size} channels per group" if size else f"{num_groups} groups"
            raise ConfigError(
                f"Group norm with {wanted} does not divide {channels} channels.",
                rule="Every group must have the same number of channels.",
                remedy="Choose another num_groups or channels_per_group in norm_layer.",
            )
        return ops.Groups(num_groups=num_groups, order=self.spec.group_order)


@dataclass(frozen=True)
class LayerNorm(SameShape):
    """Normalisation of the channels of each pixel, with a learnt scale and shift; also after pooling.

    The norm that the option `norm_layer` calls layer_norm normalises all pixels and channels of an image together.
    """

    epsilon: float = 1e-6

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        return {"gamma": np.ones(hwc[-1], np.float32), "beta": np.zeros(hwc[-1], np.float32)}, {}

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        return ops.layer_norm(x, params["gamma"], params["beta"], self.epsilon), {}

    def cost(self, hwc: Shape) -> Cost:
        """Return the cost; a convolution follows directly, for which the output is kept."""
        return Cost(params=2 * hwc[-1], activation_elements=math.prod(hwc))


def _batch_stats(ctx: Ctx, count: int, mean_C: Array, variance_C: Array) -> Tree:
    """Return the statistics of a batch, `count` values per channel in each replica.

    As in other libraries: the batch is normalised by its biased variance, the running statistics hold the unbiased one.
    """
    count *= len(ctx.norm_groups[1][0]) if ctx.norm_groups else 1
    return {"mean": mean_C, "variance": variance_C * (count / max(count - 1, 1))}


def make_norm_spec(
    norm_layer: Mapping[str, Any],
    epsilon: float | None = None,
    group_order: str = "contiguous",
    proxy_epsilon: float | None = None,
) -> NormSpec:
    """Read the `norm_layer` option, such as {"name": "group_norm", "num_groups": 8}."""
    name = norm_layer.get("name", "")
    if not isinstance(name, str) or name not in _NAMES:
        raise ConfigError(f"norm_layer has no norm named {name!r}.", remedy=did_you_mean(str(name), _NAMES))
    kind, suffix, allowed = _NAMES[name]
    for key in norm_layer:
        if key not in ("name", *allowed):
            raise ConfigError(
                f"norm_layer {name} has no setting {key!r}.", remedy=did_you_mean(key, ("name", *allowed))
            )
    num_groups, channels_per_group = norm_layer.get("num_groups"), norm_layer.get("channels_per_group")
    if kind == "group" and (num_groups is None) == (channels_per_group is None):
        raise ConfigError(
            "norm_layer group_norm has no number of groups."
            if num_groups is None
            else "norm_layer group_norm has both num_groups and channels_per_group.",
            rule="It needs exactly one of num_groups and channels_per_group.",
        )
    for key, value in (("num_groups", num_groups), ("channels_per_group", channels_per_group)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"norm_layer {key} is {value!r}.", rule="It must be an integer of at least 1.")
    return NormSpec(
        kind=kind,
        suffix=suffix,
        num_groups=num_groups,
        channels_per_group=channels_per_group,
        epsilon=DEFAULT_EPSILON if epsilon is None else epsilon,
        group_order=group_order,
        proxy_epsilon=proxy_epsilon,
    )


NUM_QUANTILES = 200


@dataclass(frozen=True, kw_only=True)
class ProxyActivation(SameShape):
    """An activation with the scale and shift of the preceding norm, and proxy norm."""

    kind: str
    epsilon: float

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Start with a unit Gaussian, scale 1 and shift 0."""
        starts = {"gamma": 1.0, "beta": 0.0, "proxy_scale": 0.0, "proxy_shift": 0.0}
        return {name: np.full(hwc[-1], start, np.float32) for name, start in starts.items()}, {}

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Scale, shift, activate, and normalise by the moments of the proxy, all in float32."""
        gamma_C, beta_C, scale_C, shift_C = (
            params[name].astype(jnp.float32) for name in ("gamma", "beta", "proxy_scale", "proxy_shift")
        )
        activate = ACTIVATIONS[self.kind]
        gaussian_QC = quantiles()[:, None] * (1 + scale_C)[None] + shift_C[None]
        proxy_QC = activate(gaussian_QC * gamma_C[None] + beta_C[None])
        mean_C = jnp.mean(proxy_QC, 0)
        inverse_C = lax.rsqrt(jnp.mean(jnp.square(proxy_QC - mean_C[None]), 0) + self.epsilon)
        y = activate(x.astype(jnp.float32) * _wide(gamma_C) + _wide(beta_C))
        return ((y - _wide(mean_C)) * _wide(inverse_C)).astype(x.dtype), {}

    def cost(self, hwc: Shape) -> Cost:
        return Cost(params=4 * hwc[-1], activation_elements=math.prod(hwc))


def quantiles() -> np.ndarray:
    """Return the midpoints of 200 equally likely slices of a unit Gaussian, float32 [Q]."""
    # Midpoints, because the ends of the distribution are infinite.
    gaussian = NormalDist()
    return np.array([gaussian.inv_cdf((i + 0.5) / NUM_QUANTILES) for i in range(NUM_QUANTILES)], np.float32)


def _wide(s_C: Array) -> Array:
    return s_C[None, None, None]


# What all blocks of a network share: the norm, the dialect and the model options.


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How definitions of the same network differ between libraries; `epsilons` by prefix of the network's name.

    Symmetric padding is PyTorch's: equal on all sides, even where a stride leaves a pixel over. Otherwise it is SAME.
    """

    symmetric: bool
    projects_first_group: bool  # ResNet-10, 18, 34: 1x1 convolution on the first shortcut, although shapes match
    shortcut: Literal["pad-end", "pad-both"]  # of CIFAR ResNets
    epsilons: Mapping[str, float]
    strides_first: bool = False  # the first 1x1 convolution of a bottleneck has the stride, not the 3x3 one
    symmetric_mobilenets: bool = True


DIALECTS: Mapping[str, Dialect] = {
    "reference": Dialect(
        symmetric=False,
        projects_first_group=True,
        shortcut="pad-end",
        epsilons={"efficientnet": 1e-3, "mobilenet": 1e-5, "": DEFAULT_EPSILON},
    ),
    "torchvision": Dialect(
        symmetric=True,
        projects_first_group=False,
        shortcut="pad-both",
        epsilons={
            "efficientnet_b5": 1e-3,
            "efficientnet_b6": 1e-3,
            "efficientnet_b7": 1e-3,
            "efficientnet_v2": 1e-3,
            "mobilenet_v3": 1e-3,
            "convnext": 1e-6,
            "": 1e-5,
        },
    ),
    "timm": Dialect(
        symmetric=True, projects_first_group=False, shortcut="pad-both", epsilons={"convnext": 1e-6, "": 1e-5}
    ),
    "keras": Dialect(
        symmetric=False,
        projects_first_group=True,
        shortcut="pad-end",
        epsilons={"efficientnet": 1e-3, "mobilenet": 1e-3, "": DEFAULT_EPSILON},
        strides_first=True,
        symmetric_mobilenets=False,
    ),
}


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The choices for a whole network, and the layers they determine."""

    variant: Variant
    norm: NormSpec
    dialect: Dialect
    options: Model
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


def default_epsilon(dialect: Dialect, name: str) -> float:
    """Return the norm epsilon of a network in a dialect; the longest matching prefix wins."""
    beginning = max((start for start in dialect.epsilons if name.startswith(start)), key=len)
    return dialect.epsilons[beginning]


def near_multiple(channels: float, divisor: int = 8, least: float = 0.9) -> int:
    """Round channels to a multiple of the divisor, at least the divisor and at least 0.9 of the channels."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < least * channels else rounded
