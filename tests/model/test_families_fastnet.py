"""FastNet: its forward pass in NumPy, and what its first weights do."""

import math

import numpy as np

from headrace.model.context import Ctx
from headrace.model.families.fastnet import Identity, Whitening

from .build import compute, network


def conv(x, w, pad):
    """Convolve [N, H, W, C] with [k, k, C, O] by shifting."""
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    k = len(w)
    height, width = x.shape[1] - k + 1, x.shape[2] - k + 1
    return np.sum([x[:, i : i + height, j : j + width] @ w[i, j] for i in range(k) for j in range(k)], axis=0)


def pool(x, size):
    n, h, w, c = x.shape
    h, w = h // size, w // size
    return x[:, : h * size, : w * size].reshape(n, h, size, w, size, c).max((2, 4))


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def norm(x, params, epsilon=1.001e-5):
    scaled = (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + epsilon)
    return scaled * params["gamma"] + params["beta"]


def test_forward_pass_of_a_training_step():
    net = network("cifar_fastnet")
    params, stats = net.init(3)
    x = np.random.default_rng(0).normal(size=(3, 32, 32, 3)).astype(np.float32)
    y = gelu(conv(x.astype(np.float64), params["stem"]["conv"]["kernel"], 0) + params["stem"]["conv"]["bias"])
    for group in (1, 2, 3):
        first, second = params[f"group{group}_1"], params[f"group{group}_2"]
        y = gelu(norm(pool(conv(y, first["1_conv"]["kernel"], 1), 2), first["1_bn"]))
        y = gelu(norm(conv(y, second["2_conv"]["kernel"], 1), second["2_bn"]))
    wanted = pool(y, 3).reshape(3, -1) @ params["predictions"]["kernel"] + params["predictions"]["bias"]
    logits, _ = compute(net, params, stats, x, Ctx(train=True))
    assert np.abs(wanted).max() > 0.01
    np.testing.assert_allclose(logits, wanted, rtol=1e-3, atol=1e-4)


def test_whitening_filters_make_the_assumed_patches_white():
    start, rng = Whitening(), np.random.default_rng(0)
    kernel = start.sample(rng, (2, 2, 3, 24)).reshape(12, 24).astype(np.float64)
    filters, negatives = kernel[:, :12], kernel[:, 12:]
    np.testing.assert_array_equal(filters, -negatives)
    np.testing.assert_allclose(filters.T @ start.covariance((2, 2), 3) @ filters, np.eye(12), atol=1e-5)
    # a pixel, its right neighbour and the pixel below; red and blue
    covariance = start.covariance((2, 2), 3)
    assert (covariance[0, 3], covariance[0, 6], covariance[0, 2]) == (0.93, 0.91, 0.9**2)
    grey = start.sample(rng, (2, 2, 1, 24))
    assert np.abs(np.linalg.norm(grey.reshape(4, 24)[:, 8:], axis=0)).max() <= 1.01  # beyond 2 x 4 they are drawn


def test_identity_filters_pass_channels_on():
    kernel = Identity().sample(np.random.default_rng(0), (3, 3, 4, 6)).astype(np.float64)
    x = np.random.default_rng(1).normal(size=(2, 5, 5, 4))
    y = conv(x, kernel, 1)
    np.testing.assert_allclose(y[..., :4], x, rtol=1e-12)
    assert np.abs(kernel[..., 4:]).min() > 0
    assert np.abs(kernel[..., 4:]).max() <= 1 / 6  # 1 / sqrt(9 x 4)
