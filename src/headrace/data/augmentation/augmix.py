"""AugMix: a few chains of operations, whose results are mixed with each other and with the image.

The image is that which is stored, before crop and flip. What a chain moves in from outside is black, as in the paper's
program; its loss (the divergence between three views of an image) is not part of this.
"""

import numpy as np

from headrace.core.rng import array_module, draw, name_id
from headrace.data.augmentation.apply_policy import change_colors, source_pixels, take_pixels
from headrace.data.augmentation.colors import Array, Epoch, levels
from headrace.data.augmentation.policies import AugMix

_WEIGHTS, _SHARE = name_id("augmix/weights"), name_id("augmix/share")
_PARTS = 4096  # such weights times levels are exact in float32


def augmix(images: Array, index: Array, epoch: Epoch, spec: AugMix) -> Array:
    """Return (1 - m) image + m sum_k w_k chain_k(image), of whole numbers from 0 to 255, float32 [n, H, W, C]."""
    xp = array_module(images)
    mixed = xp.zeros(images.shape, np.float32)
    weights, share = mixing_weights(index, epoch, spec)
    hw = images.shape[1], images.shape[2]
    for at, chain in enumerate(spec.chains):
        changed = change_colors(images, index, epoch, chain)
        rows, columns = source_pixels(index, epoch, chain, hw)
        inside = (rows >= 0) & (rows < hw[0]) & (columns >= 0) & (columns < hw[1])
        taken = take_pixels(changed, xp.clip(rows, 0, hw[0] - 1), xp.clip(columns, 0, hw[1] - 1))
        moved = xp.where(inside[..., None], taken, np.float32(0))
        mixed = mixed + weights[:, at, None, None, None] * moved
    share = share[:, None, None, None]
    return levels((np.float32(1) - share) * images + share * levels(mixed))


def mixing_weights(index: Array, epoch: Epoch, spec: AugMix) -> tuple[Array, Array]:
    """Return the weights of the chains, from Dirichlet(1, 1, 1), and the share of their sum, from Beta(1, 1):
    float32 [n, 3] and [n], multiples of 1/4096.
    """
    xp = array_module(index)
    assert len(spec.chains) == 3
    word = draw(spec.seed, epoch, index, _WEIGHTS)
    share = _even(draw(spec.seed, epoch, index, _SHARE) >> np.uint32(16))
    one, other = _even(word >> np.uint32(16)), _even(word & np.uint32(0xFFFF))
    # Two even cuts divide a line into parts of that distribution.
    low, high = xp.minimum(one, other), xp.maximum(one, other)
    weights = xp.stack([low, high - low, np.uint32(_PARTS) - high], 1)
    return weights.astype(np.float32) / np.float32(_PARTS), share.astype(np.float32) / np.float32(_PARTS)


def _even(half: Array) -> Array:
    """Return whole numbers from 0 to 4096, of 16 bits each."""
    return (half * np.uint32(_PARTS + 1)) >> np.uint32(16)
