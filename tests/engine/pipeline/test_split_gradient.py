"""A backward pass in two halves: together what jax.grad gives, and each convolution in one of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from headrace.engine.pipeline.nodes import keep_products
from headrace.engine.pipeline.split_gradient import SplitGradient


def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def network(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for name in ("a", "b", "c"):
        y = convolve(x, params[name])
        x = x + jax.nn.relu((y - y.mean((0, 1, 2), keepdims=True)) * lax.rsqrt(y.var((0, 1, 2), keepdims=True) + 1e-3))
    return jnp.tanh(x @ params["d"])


def values() -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    draw = np.random.default_rng(0).normal
    params = {name: jnp.asarray(draw(size=(3, 3, 4, 4)) / 6, jnp.float32) for name in "abc"}
    params["d"] = jnp.asarray(draw(size=(4, 3)), jnp.float32)
    return params, jnp.asarray(draw(size=(2, 6, 6, 4)), jnp.float32), jnp.asarray(draw(size=(2, 6, 6, 3)), jnp.float32)


def convolutions(function, *given) -> int:
    text = jax.jit(function).lower(*given).compile().as_text()
    assert text is not None
    return text.count(" convolution(")


@pytest.mark.parametrize("hands_all", [False, True])
@pytest.mark.parametrize("policy", ["products", "nothing", "all"])
def test_halves_are_the_gradient_and_share_no_convolution(policy, hands_all):
    params, x, dy = values()
    run = network if policy == "all" else jax.checkpoint(network, policy={"products": keep_products()}.get(policy))
    _, backward = jax.vjp(run, params, x)

    def gradients(kept, incoming):
        return kept(incoming)

    wanted = jax.tree.leaves(backward(dy))

    def halves(backward, dy):
        split = SplitGradient(gradients, backward, dy, hands_all=hands_all)
        dx, handed = split.of_inputs(backward, dy)
        return split.of_weights(backward, dy, handed), dx

    found = jax.tree.leaves(jax.jit(halves)(backward, dy))
    for mine, its in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, its, rtol=2e-5, atol=1e-6)

    def first(backward, dy):
        return SplitGradient(gradients, backward, dy, hands_all=hands_all).of_inputs(backward, dy)

    handed = jax.jit(first)(backward, dy)[1]

    def second(backward, dy, handed):
        return SplitGradient(gradients, backward, dy, hands_all=hands_all).of_weights(backward, dy, handed)

    # Three convolutions have two gradients each; where their results are not kept, they are computed again.
    again = 3 if policy == "nothing" else 0
    assert convolutions(first, backward, dy) == 3 + again
    assert convolutions(second, backward, dy, handed) == 3 + (0 if hands_all else again)
