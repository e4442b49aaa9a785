"""Stochastic rounding of float32 to a 16-bit float: unbiased, in integer arithmetic, with addressed bits.

A value between two neighbours of the 16-bit grid goes up with a probability equal to its distance from the lower one.
The arithmetic is on the bit patterns alone, so that no backend's treatment of subnormal numbers can change it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from headrace.core.rng import bits, name_id


@dataclass(frozen=True, kw_only=True)
class HalfFormat:
    """A 16-bit float seen from float32: fraction bits, first normal exponent (biased as float32's), limits."""

    fraction_bits: int
    first_exponent: int
    largest: int
    infinity: int
    nan: int


HALF_FORMATS = {
    "bfloat16": HalfFormat(fraction_bits=7, first_exponent=1, largest=0x7F7F, infinity=0x7F80, nan=0x7FC0),
    "float16": HalfFormat(fraction_bits=10, first_exponent=113, largest=0x7BFF, infinity=0x7C00, nan=0x7E00),
}


def stochastic_round(x: jax.Array, dtype: Any, random_bits: jax.Array) -> jax.Array:
    """Round float32 `x` to bfloat16 or float16, up or down by 32 random bits per element.

    Representable values stay; a finite value never becomes infinite (it saturates); infinities and NaN pass.
    The probability is exact for bfloat16 and, for float16, from 2^-33 up; below, the error of the mean is under 2^-56.
    """
    half = HALF_FORMATS[jnp.dtype(dtype).name]
    u = lax.bitcast_convert_type(x, jnp.uint32)
    exponent = (u >> 23) & 0xFF
    significand = (u & 0x7FFFFF) | jnp.where(exponent > 0, jnp.uint32(0x800000), jnp.uint32(0))
    exponent = jnp.maximum(exponent, 1)  # a subnormal has the first normal exponent, without the leading one
    # `dropped` significand bits fall off the end: those below the target's last place, more under its normal range
    kept = jnp.maximum(exponent, half.first_exponent)
    dropped = (23 - half.fraction_bits) + (kept - exponent)
    rest = significand & ((jnp.uint32(1) << jnp.minimum(dropped, 24)) - 1)
    # compare `dropped` random bits with the rest; where more than 32 are dropped, compare 32 with the top 32 of them
    threshold = rest >> (jnp.clip(dropped, 32, 63) - 32)
    up = (random_bits >> (32 - jnp.minimum(dropped, 32))) < threshold
    # the carry of `up` runs into the exponent by itself, as the formats are made for it
    magnitude = ((kept - half.first_exponent) << half.fraction_bits) + (significand >> jnp.minimum(dropped, 31))
    magnitude = jnp.minimum(magnitude + up.astype(jnp.uint32), half.largest)
    magnitude = jnp.where((u & 0x7FFFFFFF) == 0x7F800000, half.infinity, magnitude)
    magnitude = jnp.where((u & 0x7FFFFFFF) > 0x7F800000, half.nan, magnitude)
    return lax.bitcast_convert_type(((u >> 16) & 0x8000 | magnitude).astype(jnp.uint16), jnp.dtype(dtype))


def element_bits(name: str, shape: tuple[int, ...], seed: Any, step: Any) -> jax.Array:
    """Return 32 random bits for each element of a tensor, addressed by (tensor name, seed, step, element).

    The same on every replica, so that copies of the weights stay equal. The element's number is a uint32: in a tensor
    of more than 2^32 elements, elements 2^32 apart share their bits (each still rounds without bias).
    """
    seed = jnp.asarray(seed & 0xFFFFFFFF if isinstance(seed, int) else seed).astype(jnp.uint32)
    step = jnp.asarray(step).astype(jnp.uint32)
    element = jnp.zeros(shape or (1,), jnp.uint32)
    # from coordinates, not from a reshaped range: stays elementwise whatever memory layout the weights have
    stride = 1
    for dim in reversed(range(len(shape))):
        element = element + lax.broadcasted_iota(jnp.uint32, shape, dim) * np.uint32(stride & 0xFFFFFFFF)
        stride *= shape[dim]
    name_word = np.full((1,) * max(len(shape), 1), name_id(name), np.uint32)
    return bits(name_word, seed, step, element).reshape(shape)
