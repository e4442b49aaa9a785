"""Proxy norm: what batch norm does to activations, from parameters alone instead of a batch.

After a norm that looks at one image at a time, an activation shifts and widens each channel differently. Proxy norm
takes a Gaussian of learnt mean and width per channel through the same scale, shift and activation, and normalises the
real activations by the mean and deviation of that: y = (act(gamma x + beta) - mean) / deviation.

The moments are over 200 quantiles. They are a function of the parameters, so gradients flow through them, and they are
computed anew in every pass: 200 numbers per channel cost nothing beside an image.
Shapes in names: C channels, Q quantiles.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from headrace.model.context import Ctx
from headrace.model.cost import Cost
from headrace.model.gates import ACTIVATIONS
from headrace.model.initial import RngAt
from headrace.model.layers import Shape, Tree

NUM_QUANTILES = 200


@dataclass(frozen=True, kw_only=True)
class ProxyActivation:
    """An activation with the scale and shift of the norm before it, and with proxy norm."""

    kind: str
    epsilon: float

    def shape(self, hwc: Shape) -> Shape:
        """Return the shape unchanged."""
        return hwc

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Start with a unit Gaussian, scale 1 and shift 0."""
        starts = {"gamma": 1.0, "beta": 0.0, "proxy_scale": 0.0, "proxy_shift": 0.0}
        return {name: np.full(hwc[-1], start, np.float32) for name, start in starts.items()}, {}

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Scale, shift, activate, and normalise by the proxy's moments; all in float32."""
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
        """Return the cost per image."""
        return Cost(params=4 * hwc[-1], activation_elements=math.prod(hwc))


def quantiles() -> np.ndarray:
    """Return the middles of 200 equally likely slices of a unit Gaussian, float32 [Q]."""
    gaussian = NormalDist()
    return np.array([gaussian.inv_cdf((i + 0.5) / NUM_QUANTILES) for i in range(NUM_QUANTILES)], np.float32)


def _wide(s_C: Array) -> Array:
    return s_C[None, None, None]
