"""Proxy norm and the other norms of one image: against NumPy in float64, and in whole networks."""

from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.core.tree import flatten_named
from headrace.model.context import Ctx
from headrace.model.norm import Norm, ProxyActivation, make_norm_spec

from .build import compute, network

TRAIN = Ctx(train=True)


def swish(x):
    return x / (1 + np.exp(-x))


def proxy_norm(x, values, epsilon):
    """Return proxy norm by its definition, from 200 quantiles of a Gaussian."""
    gamma, beta, scale, shift = (values[name] for name in ("gamma", "beta", "proxy_scale", "proxy_shift"))
    r = np.array([NormalDist().inv_cdf((i + 0.5) / 200) for i in range(200)])[:, None]
    z = swish(gamma * ((1 + scale) * r + shift) + beta)
    return (swish(gamma * x + beta) - z.mean(0)) / np.sqrt(z.var(0) + epsilon)


def test_values_and_gradients_of_proxy_norm():
    layer = ProxyActivation(kind="swish", epsilon=0.03)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 3, 4))
    values = {
        name: rng.normal(size=4) * 0.5 + (name == "gamma") for name in ("gamma", "beta", "proxy_scale", "proxy_shift")
    }
    wanted = proxy_norm(x, values, 0.03)
    params = {name: jnp.array(value, jnp.float32) for name, value in values.items()}

    def total(params):
        y, _ = compute(layer, params, {}, x.astype(np.float32), TRAIN)
        return (y * jnp.array(wanted, jnp.float32)).sum(), y

    gradients, y = jax.jit(jax.grad(total, has_aux=True))(params)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    for name in values:
        for channel in range(4):
            moved = []
            for step in (1e-5, -1e-5):
                other = {key: value.copy() for key, value in values.items()}
                other[name][channel] += step
                moved.append((proxy_norm(x, other, 0.03) * wanted).sum())
            assert gradients[name][channel] == pytest.approx((moved[0] - moved[1]) / 2e-5, rel=1e-3, abs=1e-3), name


def test_it_normalises_what_a_gaussian_becomes():
    x = np.random.default_rng(0).normal(size=(64, 16, 16, 2)).astype(np.float32)
    layer = ProxyActivation(kind="relu", epsilon=1e-6)
    params, _ = layer.init(lambda name: np.random.default_rng(0), (16, 16, 2))
    y, _ = compute(layer, params, {}, x, TRAIN)
    np.testing.assert_allclose(np.mean(y, (0, 1, 2)), 0, atol=0.02)
    np.testing.assert_allclose(np.var(y, (0, 1, 2)), 1, atol=0.03)


def test_layer_norm_is_over_the_whole_image():
    x = np.random.default_rng(0).normal(2, 3, (3, 4, 5, 6)).astype(np.float32)
    spec = make_norm_spec({"name": "layer_norm"}, epsilon=0.1)
    norm = Norm(spec=spec)
    params, stats = norm.init(lambda name: np.random.default_rng(0), (4, 5, 6))
    y, _ = compute(norm, params, stats, x, TRAIN)
    mean, variance = x.mean((1, 2, 3), keepdims=True), x.var((1, 2, 3), keepdims=True)
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(variance + 0.1), rtol=1e-4, atol=1e-5)
    assert (spec.suffix, stats) == ("ln", {})


def test_strided_groups_take_every_nth_channel():
    x = np.random.default_rng(0).normal(size=(2, 3, 3, 6)).astype(np.float32) * np.arange(1, 7, dtype=np.float32)
    spec = make_norm_spec({"name": "group_norm", "num_groups": 2}, epsilon=0.0, group_order="strided")
    norm = Norm(spec=spec)
    params, _ = norm.init(lambda name: np.random.default_rng(0), (3, 3, 6))
    y, _ = compute(norm, params, {}, x, TRAIN)
    for group in (0, 1):
        mine = x[..., group::2]
        mean, spread = mine.mean((1, 2, 3), keepdims=True), mine.std((1, 2, 3), keepdims=True)
        np.testing.assert_allclose(y[..., group::2], (mine - mean) / spread, rtol=1e-3, atol=1e-4)


def test_a_network_with_proxy_norm():
    plain = network("cifar_resnet8", groups=4, image=(8, 8, 3))
    built = network("cifar_resnet8", groups=4, proxy_norm=True, image=(8, 8, 3))
    # two parameters more for each channel of a norm that an activation follows: the stem's and each unit's first
    assert built.total_cost().params == plain.total_cost().params + 2 * (16 + 16 + 32 + 64)
    params, stats = built.init(0)
    names = set(flatten_named(params))
    assert {"conv1/relu/gamma", "conv1/relu/proxy_shift", "conv3_block1/layer2_gn/gamma"} <= names
    assert "conv1/gn/gamma" not in names
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    logits, _ = jax.jit(lambda p, x: built.apply(p, stats, x, TRAIN))(params, x)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 4},
        {"norm_layer": {"name": "layer_norm"}},
        {"norm_layer": {"name": "none"}},
        {"groups": 4, "proxy_norm": True},
    ],
)
@pytest.mark.parametrize("name", ["resnet50", "resnext50", "efficientnet_b0", "mobilenet_v3_small"])
def test_any_network_takes_any_norm(name, options):
    built = network(name, image=(64, 64, 3), num_classes=10, **options)
    assert built.total_cost().params > 0
    if options.get("proxy_norm"):
        assert built.total_cost().params > network(name, image=(64, 64, 3), num_classes=10).total_cost().params
