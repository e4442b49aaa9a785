"""Keys addressed by sample: the same numbers for a sample in any batch, and good numbers."""

import jax
import jax.numpy as jnp
import numpy as np

from headrace.model.context import Ctx, Draws
from headrace.model.sample_keys import sample_key


def ctx_of(samples, step=3, path="block"):
    return Ctx(train=True, draws=Draws(7, step, jnp.asarray(samples)), path=path)


DRAWS = {
    "uniform": lambda key, n: jax.random.uniform(key, (n, 4, 5)),
    "folded": lambda key, n: jax.random.normal(jax.random.fold_in(key, 9), (n, 20)),
    "second of a split": lambda key, n: jax.random.bernoulli(jax.random.split(key)[1], 0.3, (n, 2, 2)),
    "bits of 8": lambda key, n: jax.random.bits(key, (n, 6), jnp.uint8),
    "bits of 16": lambda key, n: jax.random.bits(key, (n, 6), jnp.uint16),
    "one each": lambda key, n: jax.random.randint(key, (n,), 0, 1000),
}


def test_a_sample_draws_the_same_in_every_batch():
    samples = np.array([5, 900, 2, 77, 4, 123456])

    def draw(s, step):
        key = sample_key(ctx_of(s, step))
        return {name: one(key, len(s)) for name, one in DRAWS.items()}

    jitted = jax.jit(draw)  # all draws in one program for each size of a batch
    whole = jitted(samples, 3)
    np.testing.assert_array_equal(DRAWS["uniform"](sample_key(ctx_of(samples)), 6), whole["uniform"])  # without a jit
    for part in (slice(0, 2), slice(2, 6), slice(5, 6)):
        for name, drawn in jitted(samples[part], 3).items():
            np.testing.assert_array_equal(drawn, whole[name][part], err_msg=name)


def test_different_addresses_draw_different_numbers():
    samples = np.arange(6)
    key = sample_key(ctx_of(samples))
    keys = [key, jax.random.fold_in(key, 0), jax.random.fold_in(key, 1), *jax.random.split(key, 3)]
    keys += [sample_key(ctx_of(samples, step=4)), sample_key(ctx_of(samples, path="other"))]
    drawn = [np.asarray(jax.random.uniform(k, (6, 50))) for k in keys]
    for i, one in enumerate(drawn):
        assert len(np.unique(one)) == 300
        for other in drawn[:i]:
            assert (one == other).sum() <= 1


def test_the_numbers_are_uniform_and_independent():
    key = sample_key(ctx_of(np.arange(256)))
    drawn = np.asarray(jax.random.uniform(key, (256, 1024)), np.float64)
    assert abs(drawn.mean() - 0.5) < 5 / np.sqrt(12 * drawn.size)
    assert abs((drawn < 0.2).mean() - 0.2) < 5 * np.sqrt(0.16 / drawn.size)
    centred = drawn - 0.5
    for a, b in ((centred[:-1], centred[1:]), (centred[:, :-1], centred[:, 1:])):
        assert abs((a * b).mean() * 12) < 5 / np.sqrt(a.size)


def test_an_array_without_the_samples_dim_is_the_same_for_all_batches():
    first = jax.random.normal(sample_key(ctx_of(np.arange(4))), (3, 2))
    other = jax.random.normal(sample_key(ctx_of(np.arange(50, 60))), (3, 2))
    np.testing.assert_array_equal(first, other)


def test_it_goes_through_grad_scan_and_vmap():
    def loss(w, step):
        key = sample_key(ctx_of(np.arange(4), step))
        return jnp.sum(w * jax.random.uniform(key, (4, 3)))

    by_hand = [np.asarray(jax.random.uniform(sample_key(ctx_of(np.arange(4), s)), (4, 3))).sum() for s in range(3)]
    scanned = jax.lax.scan(lambda w, s: (w, jax.grad(jax.checkpoint(loss))(w, s)), 2.0, jnp.arange(3))[1]
    np.testing.assert_allclose(scanned, by_hand, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(loss), (None, 0))(2.0, jnp.arange(3)), by_hand, rtol=1e-6)
