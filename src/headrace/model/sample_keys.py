"""Keys addressed by sample, for functions that take a JAX key: user functions, and Flax's dropout."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace.core.rng import bits, name_id
from headrace.model.context import Ctx

_HEAD = 1  # words of a key before the indices of its samples


def sample_key(ctx: Ctx) -> jax.Array:
    """Return the JAX key of a layer for the samples it is applied to."""
    assert ctx.draws is not None, f"{ctx.path} draws random numbers, but none were given: Ctx(draws=...)"
    step = jnp.asarray(ctx.draws.step).astype(jnp.uint32).reshape(1)
    head = jnp.asarray(bits(ctx.draws.seed, name_id(ctx.path), step))
    samples = ctx.draws.samples.astype(jnp.uint32)
    return jax.random.wrap_key_data(jnp.concatenate([head, samples]), impl=_keys_for(len(samples)))


def start_key(number: object) -> jax.Array:
    """Return the key for drawing initial weights, which has no samples.

    With JAX's default keys XLA needs 8.8 s on a CPU to compile the drawing of three small kernels; with these, 0.5 s.
    """
    return jax.random.wrap_key_data(bits(jnp.asarray(number).astype(jnp.uint32).reshape(1)), impl=_keys_for(0))


@cache
def _keys_for(num_samples: int) -> Any:
    """Return the key implementation for that many samples (the size of a key is part of its type)."""

    def seed(number: object) -> Array:
        head = bits(jnp.asarray(number).astype(jnp.uint32).reshape(1))
        return jnp.concatenate([head, jnp.zeros(num_samples, jnp.uint32)])

    def fold_in(key: Array, number: Array | int) -> Array:
        head = bits(key[:_HEAD], jnp.asarray(number).astype(jnp.uint32).reshape(1))
        return jnp.concatenate([head, key[_HEAD:]])

    def split(key: Array, shape: tuple[int, ...]) -> Array:
        count = int(np.prod(shape))
        heads = bits(name_id("split"), key[:_HEAD], np.arange(count, dtype=np.uint32))
        samples = jnp.broadcast_to(key[None, _HEAD:], (count, num_samples))
        return jnp.concatenate([heads[:, None], samples], axis=1).reshape(*shape, _HEAD + num_samples)

    def random_bits(key: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
        if bit_width == 64:
            high, low = (random_bits(fold_in(key, half), 32, shape).astype(jnp.uint64) for half in range(2))
            return high << np.uint64(32) | low
        # JAX asks for bits by shape only: an array whose first dim is the batch is taken to have a row for each
        # sample.
        by_sample = len(shape) > 0 and shape[0] == num_samples > 0
        rows = key[_HEAD:] if by_sample else jnp.arange(shape[0] if shape else 1, dtype=jnp.uint32)
        places = np.arange(int(np.prod(shape[1:])), dtype=np.uint32) if len(shape) > 1 else np.zeros(1, np.uint32)
        # So that row 3 drawn by position and sample 3 do not share their bits.
        purpose = np.array([[by_sample]], np.uint32)
        word = bits(purpose, key[:_HEAD, None], rows[:, None], places[None])
        return (word >> np.uint32(32 - bit_width)).astype(f"uint{bit_width}").reshape(shape)

    from jax.extend.random import define_prng_impl  # here: it is 26 ms, for networks given by code alone

    return define_prng_impl(
        key_shape=(_HEAD + num_samples,),
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name=f"headrace_{num_samples}_samples",
        tag="hr",
    )
