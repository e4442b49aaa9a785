"""Random words for the samples of a batch, addressed by (seed, epoch, sample, purpose)."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from headrace.core.rng import bits

_HALVES = np.array([[0x0000FFFF, 0xFFFF0000]], np.uint32)


def draw(seed: int, epoch: Any, index: Any, purpose: int) -> Any:
    """Return 32 random bits for each sample, uint32 [n]; `epoch` is one number or one for each sample."""
    xp = np if isinstance(index, np.ndarray) else jnp
    word = bits(seed, xp.asarray(epoch).astype(np.uint32), index.astype(np.uint32), purpose)
    if xp is np:
        return word
    # The sum of its two halves is the word itself. XLA fuses plain arithmetic into its consumers and would compute all
    # of it again for every pixel (on a CPU up to forty times slower); a sum it computes once for each sample.
    return jnp.sum(word[:, None] & _HALVES, axis=1, dtype=np.uint32)
