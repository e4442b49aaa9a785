"""The norm layer (batch, group or layer norm, or none), chosen once for a network; layer norm by pixel; proxy norm.

After a norm that uses one image at a time, an activation shifts and widens each channel differently. Proxy norm sends
a Gaussian with learnt mean and width per channel through the same scale, shift and activation, and normalises the
real activations by the resulting mean and deviation: y = (act(gamma x + beta) - mean) / deviation. These moments are
taken over 200 quantiles. They are a function of the parameters, so gradients flow through them; recomputing them in
every pass is cheap, as 200 numbers per channel are few compared with an image.

Shapes in names: C channels, Q quantiles.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from headrace import ops
from headrace.core.errors import ConfigError, did_you_mean
from headrace.model.activations import ACTIVATIONS
from headrace.model.context import NORM_WEIGHTS, Ctx
from headrace.model.cost import Cost
from headrace.model.initial import Weight
from headrace.model.layers import DeclaredLayer, FusibleNorm, SameShape, Shape, Tree

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
class Norm(DeclaredLayer):
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

    def weights(self, hwc: Shape) -> tuple[Tree, Tree]:
        """Return scale and shift and, for batch norm, statistics that start at mean 0 and variance 1."""
        assert self.learnt or self.spec.kind != "batch"
        if self.spec.kind == "none" or not self.learnt:
            return {}, {}
        zeros_C, ones_C = Weight((hwc[2],)), Weight((hwc[2],), 1.0)
        params = {"gamma": Weight((hwc[2],), float(self.gamma)), "beta": zeros_C}
        return params, {"mean": zeros_C, "variance": ones_C} if self.spec.kind == "batch" else {}

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

    def weights(self, hwc: Shape) -> tuple[Tree, Tree]:
        return {"gamma": Weight((hwc[-1],), 1.0), "beta": Weight((hwc[-1],))}, {}

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

    def weights(self, hwc: Shape) -> tuple[Tree, Tree]:
        """Start with a unit Gaussian, scale 1 and shift 0."""
        starts = {"gamma": 1.0, "beta": 0.0, "proxy_scale": 0.0, "proxy_shift": 0.0}
        return {name: Weight((hwc[-1],), start) for name, start in starts.items()}, {}

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
