"""Which number format holds what: compute, stored weights, gradient accumulator; and how a weight is written back.

`precision` reads compute.update. Whatever the formats, the update is computed in float32 from the stored weights; with
16-bit weights the result is rounded back, stochastically or to nearest.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from headrace.config.schema import Batch, Numerics
from headrace.core.errors import ConfigError, did_you_mean
from headrace.core.tree import map_named
from headrace.engine.rounding import element_bits, stochastic_round

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
    )


def store_weights(params: Any, precision: Precision) -> Any:
    """Return weights in the format they are stored in, rounded to nearest (initial or restored weights)."""
    return jax.tree.map(lambda w: jnp.asarray(w).astype(precision.weight_dtype), params)


def write_weights(params: Any, updates: Any, seed: Any, step: Any, precision: Precision) -> Any:
    """Return the weights after `params + updates`: summed in float32, then rounded to the stored format."""

    def write(name: str, weight: jax.Array, update: jax.Array) -> jax.Array:
        value = weight.astype(jnp.float32) + update.astype(jnp.float32)
        if precision.half_weights and precision.stochastic_rounding:
            return stochastic_round(value, precision.weight_dtype, element_bits(name, value.shape, seed, step))
        return value.astype(precision.weight_dtype)

    return map_named(write, params, updates)
