"""Number formats: of compute, stored weights and accumulators; stochastic rounding to 16 bits.

`precision` reads compute.update. Whatever the formats, the update is computed in float32 from the stored weights; with
16-bit weights the result is rounded back, stochastically or to nearest.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from headrace.config.schema import Batch, Numerics
from headrace.core.errors import ConfigError, did_you_mean
from headrace.core.rng import Seed, bits, name_id, seed_word
from headrace.core.tree import PyTree, map_named


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


def stochastic_round(x: jax.Array, dtype: jax.typing.DTypeLike, random_bits: jax.Array) -> jax.Array:
    """Round float32 `x` to bfloat16 or float16 stochastically, with 32 random bits per element.

    A value between two neighbours is rounded up with a probability equal to its distance from the lower one. The
    arithmetic is on the bit patterns alone, so that no backend's treatment of subnormal numbers can change it.
    Representable values stay; a finite value never becomes infinite (it saturates); infinities and NaN pass.
    The probability is exact for bfloat16 and, for float16, from 2^-33 up; below, the error of the mean is under 2^-56.
    """
    half = HALF_FORMATS[jnp.dtype(dtype).name]
    u = lax.bitcast_convert_type(x, jnp.uint32)
    exponent = (u >> 23) & 0xFF
    # The leading one of a normal number is implicit. It must be there where the number becomes a subnormal of the
    # target.
    significand = (u & 0x7FFFFF) | jnp.where(exponent > 0, jnp.uint32(0x800000), jnp.uint32(0))
    exponent = jnp.maximum(exponent, 1)  # a subnormal has the first normal exponent, without the leading one
    # `dropped` significand bits fall off the end: those below the target's last place, more under its normal range
    kept = jnp.maximum(exponent, half.first_exponent)
    dropped = (23 - half.fraction_bits) + (kept - exponent)
    rest = significand & ((jnp.uint32(1) << jnp.minimum(dropped, 24)) - 1)
    # compare `dropped` random bits with the rest; where more than 32 bits are dropped, compare with the top 32 of them
    threshold = rest >> (jnp.clip(dropped, 32, 63) - 32)
    up = (random_bits >> (32 - jnp.minimum(dropped, 32))) < threshold
    # a carry out of the fraction increments the exponent, which is the next representable number in IEEE formats
    magnitude = ((kept - half.first_exponent) << half.fraction_bits) + (significand >> jnp.minimum(dropped, 31))
    # Saturated: rounded up, the largest finite number would become infinite.
    magnitude = jnp.minimum(magnitude + up.astype(jnp.uint32), half.largest)
    magnitude = jnp.where((u & 0x7FFFFFFF) == 0x7F800000, half.infinity, magnitude)
    magnitude = jnp.where((u & 0x7FFFFFFF) > 0x7F800000, half.nan, magnitude)
    return lax.bitcast_convert_type(((u >> 16) & 0x8000 | magnitude).astype(jnp.uint16), jnp.dtype(dtype))


def element_bits(name: str, shape: tuple[int, ...], seed: Seed, step: jax.Array | int) -> jax.Array:
    """Return 32 random bits for each element of a tensor, addressed by (tensor name, seed, step, element).

    The same on every replica, so that copies of the weights stay equal. The element's number is a uint32: in a tensor
    of more than 2^32 elements, elements 2^32 apart share their bits (each still rounds without bias).
    """
    seed = jnp.asarray(seed_word(seed)).astype(jnp.uint32)
    step = jnp.asarray(step).astype(jnp.uint32)
    element = jnp.zeros(shape or (1,), jnp.uint32)
    # from coordinates, not from a reshaped range, which XLA could not fuse with weights in another memory layout
    stride = 1
    for dim in reversed(range(len(shape))):
        element = element + lax.broadcasted_iota(jnp.uint32, shape, dim) * np.uint32(stride & 0xFFFFFFFF)
        stride *= shape[dim]
    name_word = np.full((1,) * max(len(shape), 1), name_id(name), np.uint32)
    return bits(name_word, seed, step, element).reshape(shape)


# precision -> (half-width compute?, half-width weights?)
_WIDTHS = {"16.16": (True, True), "16.32": (True, False), "32.32": (False, False)}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The number formats of a run. Hashable, so it may be a static argument."""

    compute_dtype: jnp.dtype
    weight_dtype: jnp.dtype
    accumulator_dtype: jnp.dtype
    stochastic_rounding: bool  # of 16-bit weights; has no effect on float32 ones
    half_partials: bool = False  # 16-bit sums of matrix products
    matmul_precision: str = "default"  # how accelerators multiply float32 values

    @property
    def half_weights(self) -> bool:
        """Say whether weights are stored in 16 bits."""
        return self.weight_dtype.itemsize == 2


def make_precision(numerics: Numerics, batch: Batch, *, half_partials: bool = False) -> Precision:
    """Return the number formats that the options ask for."""
    if numerics.precision not in _WIDTHS:
        raise ConfigError(
            f"Precision {numerics.precision!r} is not supported.",
            rule="It reads compute.update, the update at least as wide as the compute.",
            remedy=did_you_mean(numerics.precision, _WIDTHS),
        )
    half_compute, half_weights = _WIDTHS[numerics.precision]
    half, full = jnp.dtype(numerics.half_type), jnp.dtype("float32")
    return Precision(
        compute_dtype=half if half_compute else full,
        weight_dtype=half if half_weights else full,
        accumulator_dtype=jnp.dtype(batch.gradient_accumulation_dtype),
        stochastic_rounding=numerics.stochastic_rounding,
        half_partials=half_partials and half_compute,
        matmul_precision="default" if half_compute else numerics.matmul_precision,
    )


def store_weights(params: PyTree, precision: Precision) -> PyTree:
    """Return weights in the format they are stored in, rounded to nearest (initial or restored weights)."""
    return jax.tree.map(lambda w: jnp.asarray(w).astype(precision.weight_dtype), params)


def write_weights(params: PyTree, updates: PyTree, seed: Seed, step: jax.Array | int, precision: Precision) -> PyTree:
    """Return the weights after `params + updates`: summed in float32, then rounded to the stored format."""

    def write(name: str, weight: jax.Array, update: jax.Array) -> jax.Array:
        value = weight.astype(jnp.float32) + update.astype(jnp.float32)
        if precision.half_weights and precision.stochastic_rounding:
            # To nearest, an update of less than half the last place would be lost every time; rounded at random it
            # counts on average.
            return stochastic_round(value, precision.weight_dtype, element_bits(name, value.shape, seed, step))
        return value.astype(precision.weight_dtype)

    return map_named(write, params, updates)
