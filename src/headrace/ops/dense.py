"""The dense layer's product."""

import jax.numpy as jnp
from jax import Array, lax


def dense(x_NC: Array, w_CO: Array, b_O: Array) -> Array:
    """Multiply and add the bias; sums and result in float32 whatever the inputs' dtype."""
    product_NO = lax.dot(x_NC, w_CO, preferred_element_type=jnp.float32)
    return product_NO + b_O.astype(jnp.float32)[None, :]
