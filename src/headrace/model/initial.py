"""Initial weights, drawn on the host (30 tensors drawn eagerly on the device would cost 5 s of small compilations)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

# The spread of a unit normal cut at +-2: what is drawn is divided by it, so that the result has the spread asked for.
_SPREAD_OF_CUT_NORMAL = 0.87962566103423978

RngAt = Callable[[str], np.random.Generator]


@dataclass(frozen=True, kw_only=True)
class VarianceScaling:
    """Draw weights with variance scale / fan, from a normal cut at two deviations or a uniform distribution."""

    scale: float = 1.0
    fan: Literal["in", "out", "average"] = "in"
    distribution: Literal["truncated_normal", "uniform"] = "truncated_normal"

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Return float32 weights; the last two dims of `shape` are channels in and out, those before the window."""
        window = math.prod(shape[:-2])
        fan_in, fan_out = window * shape[-2], window * shape[-1]
        fan = {"in": fan_in, "out": fan_out, "average": (fan_in + fan_out) / 2}[self.fan]
        deviation = math.sqrt(self.scale / fan)
        if self.distribution == "uniform":
            limit = math.sqrt(3) * deviation
            return rng.uniform(-limit, limit, shape).astype(np.float32)
        return (_cut_normal(rng, shape) * (deviation / _SPREAD_OF_CUT_NORMAL)).astype(np.float32)


FAN_IN_NORMAL = VarianceScaling()
FAN_IN_HE = VarianceScaling(scale=2.0)
FAN_OUT_HE = VarianceScaling(scale=2.0, fan="out")
GLOROT_UNIFORM = VarianceScaling(fan="average", distribution="uniform")


def under(rng_at: RngAt, name: str) -> RngAt:
    """Return `rng_at` for the names below `name`."""
    return lambda below: rng_at(f"{name}/{below}")


def _cut_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    drawn = rng.standard_normal(shape)
    while (outside := np.abs(drawn) > 2).any():
        drawn[outside] = rng.standard_normal(int(outside.sum()))
    return drawn
