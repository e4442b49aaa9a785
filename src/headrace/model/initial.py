"""The initial values of weights."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

# The standard deviation of a unit normal truncated at +-2. Samples are divided by it to get the intended deviation.
_TRUNCATED_DEVIATION = 0.87962566103423978


RngAt = Callable[[str], np.random.Generator]


class Initial(Protocol):
    """How the initial values of a kernel are chosen."""

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Return float32 weights; the last two dims of `shape` are channels in and out, the first ones the window."""
        ...


@dataclass(frozen=True, kw_only=True)
class VarianceScaling:
    """Draw weights with variance scale / fan, from a truncated normal (two deviations) or a uniform distribution.

    They are drawn on the host: drawing 30 tensors eagerly on a device costs 5 s of small compilations.
    """

    scale: float = 1.0
    fan: Literal["in", "out", "average"] = "in"
    distribution: Literal["truncated_normal", "uniform"] = "truncated_normal"

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Return float32 weights; the last two dims of `shape` are channels in and out, the first ones the window."""
        window = math.prod(shape[:-2])
        fan_in, fan_out = window * shape[-2], window * shape[-1]
        fan = {"in": fan_in, "out": fan_out, "average": (fan_in + fan_out) / 2}[self.fan]
        deviation = math.sqrt(self.scale / fan)
        if self.distribution == "uniform":
            limit = math.sqrt(3) * deviation
            return rng.uniform(-limit, limit, shape).astype(np.float32)
        return (_truncated_normal(rng, shape) * (deviation / _TRUNCATED_DEVIATION)).astype(np.float32)


@dataclass(frozen=True)
class Normal:
    """Draw weights from a normal distribution of a given deviation, whatever the number of channels."""

    deviation: float

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Return float32 weights."""
        return (rng.standard_normal(shape) * self.deviation).astype(np.float32)


FAN_IN_NORMAL = VarianceScaling()


FAN_IN_HE = VarianceScaling(scale=2.0)


FAN_OUT_HE = VarianceScaling(scale=2.0, fan="out")


GLOROT_UNIFORM = VarianceScaling(fan="average", distribution="uniform")


def under(rng_at: RngAt, name: str) -> RngAt:
    """Return `rng_at` for names relative to `name`."""
    return lambda below: rng_at(f"{name}/{below}")


@dataclass(frozen=True)
class Weight:
    """A tensor of a layer, float32: its shape, and the distribution or the value that it starts from."""

    shape: tuple[int, ...]
    start: Initial | float = 0.0

    def draw(self, rng_at: RngAt, name: str) -> np.ndarray:
        """Return the initial values of the tensor of this name."""
        if isinstance(self.start, int | float):
            return np.full(self.shape, self.start, np.float32)
        return self.start.sample(rng_at(name), self.shape)


def draw(weights: Mapping[str, Any], rng_at: RngAt) -> dict[str, Any]:
    """Return initial values for a tree of tensors; each depends on its full name."""
    return {
        name: draw(each, under(rng_at, name)) if isinstance(each, Mapping) else each.draw(rng_at, name)
        for name, each in weights.items()
    }


def _truncated_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    drawn = rng.standard_normal(math.prod(shape))
    outside = np.flatnonzero(np.abs(drawn) > 2)
    while outside.size:  # one in 22 is drawn again; only those are looked at again
        again = rng.standard_normal(outside.size)
        drawn[outside] = again
        outside = outside[np.abs(again) > 2]
    return drawn.reshape(shape)
