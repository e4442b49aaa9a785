"""Filters that decorrelate patches of images: what a first convolution may start from, and keep."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.tree import map_named
from headrace.model.composite import split_layers
from headrace.model.layers import Conv
from headrace.model.network import Network

_MOST_PATCHES = 2_000_000  # beyond that, patches are taken from every second, third, ... pixel
EPSILON = 5e-4  # added to the variances, so that components that are hardly there do not become noise


def whitening_filters(covariance: np.ndarray, window: tuple[int, int, int], epsilon: float = 0.0) -> np.ndarray:
    """Return the components of a covariance of patches, each scaled to variance 1, then their negatives.

    They are [*window, 2 x values of a patch], those of large variance first.
    """
    variances, components = np.linalg.eigh(covariance)
    # LAPACK leaves the signs open: fixed, so that every machine starts from the same weights.
    components = components * np.sign(components[np.abs(components).argmax(0), np.arange(len(variances))])
    filters = (components / np.sqrt(variances + epsilon)).reshape(*window, -1)[..., ::-1]
    return np.concatenate([filters, -filters], -1)


def first_convolution(network: Network) -> tuple[str, Conv]:
    """Return the name and the value of the layer that sees the image; ConfigError where it is no convolution."""
    name, block = network.blocks[0]
    layer, conv = split_layers(name, block)[0]
    if not isinstance(conv, Conv) or conv.groups > 1:
        raise ConfigError(
            f"whiten_images is given, but {network.name} begins with {type(conv).__name__} ({layer}).",
            rule="It makes the filters of the convolution that sees the image.",
            remedy="Leave whiten_images out.",
        )
    return layer, conv


def patch_covariance(batches: Iterable[np.ndarray], window: int, num_images: int) -> np.ndarray:
    """Return the mean product of any two values of the patches in images [n, H, W, C]: rows, columns, channels."""
    total, count = np.zeros((0, 0)), 0
    for images in batches:
        places = num_images * (images.shape[1] - window + 1) * (images.shape[2] - window + 1)
        step = math.ceil(math.sqrt(places / _MOST_PATCHES))
        views = np.lib.stride_tricks.sliding_window_view(images, (window, window), (1, 2))[:, ::step, ::step]
        patches = views.transpose(0, 1, 2, 4, 5, 3).reshape(-1, window * window * images.shape[3])
        # Sums of some ten thousand products in float32, these in float64.
        product = (patches.T @ patches).astype(np.float64)
        total, count = (product if not count else total + product), count + len(patches)
    return total / count


def whitened(
    network: Network, params: Mapping[str, Any], batches: Callable[[int], Iterable[np.ndarray]], num_images: int
) -> dict[str, Any]:
    """Return the weights with the filters of the first convolution made from its patches of these images.

    `batches` is asked for the number of images in each. Channels beyond twice the values of a patch stay as they are.
    """
    name, conv = first_convolution(network)
    covariance = patch_covariance(batches(64), conv.kernel, num_images)

    def with_filters(old: np.ndarray) -> np.ndarray:
        filters = whitening_filters(covariance, old.shape[:3], EPSILON)[..., : conv.channels]
        new = np.array(old)
        new[..., : filters.shape[3]] = filters
        return new

    return map_named(lambda each, w: with_filters(w) if each == f"{name}/kernel" else w, dict(params))
