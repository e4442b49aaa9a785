"""The dense layer's product."""

import jax.numpy as jnp
from jax import Array, lax

from headrace.ops.backend import is_portable, on_cpu


def dense(x_NC: Array, w_CO: Array, b_O: Array, *, half_sums: bool = False) -> Array:
    """Multiply and add the bias; sums and result in float32 whatever the inputs' dtype.

    With `half_sums` the product has the inputs' dtype, and the backend may add up in it. The CPU's never does.
    """
    halved = half_sums and not on_cpu() and not is_portable()
    product_NO = lax.dot(x_NC, w_CO, preferred_element_type=x_NC.dtype if halved else jnp.float32).astype(jnp.float32)
    return product_NO + b_O.astype(jnp.float32)[None, :]
