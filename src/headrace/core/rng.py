"""Counter-based randomness: random bits as a pure function of an address, never of a stream.

`bits(seed, epoch, sample, draw)` is the same on the host and on the device, in any order of calls. The
functions use only integer operators on uint32 arrays, so that one definition serves NumPy (on arrays) and JAX alike.
The mixer is the murmur3 finaliser; every word of the address goes through it.
"""

import zlib
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

Seed = int | np.uint32 | Array  # a number on the host, a uint32 inside a program
HostOrDevice = Array | np.ndarray

# 2^32 over the golden ratio: added to every word, so that an address of zeros is not mixed into zero.
GOLDEN = np.uint32(0x9E3779B9)
# The multipliers of murmur3's finaliser.
M1 = np.uint32(0x85EBCA6B)
M2 = np.uint32(0xC2B2AE35)


def array_module(array: HostOrDevice) -> ModuleType:
    """Return the library whose array this is, numpy or jax.numpy."""
    return np if isinstance(array, np.ndarray) else jnp


def mix(h: Any) -> Any:
    """Scramble uint32 words (bijective: different words stay different)."""
    h = h ^ (h >> np.uint32(16))
    h = h * M1
    h = h ^ (h >> np.uint32(13))
    h = h * M2
    return h ^ (h >> np.uint32(16))


def seed_word(seed: Seed) -> np.uint32 | Array:
    """Return the part of a seed that is in addresses: its low 32 bits."""
    return np.uint32(seed & 0xFFFFFFFF) if isinstance(seed, int) else seed


def bits(*address: Any) -> Any:
    """Return 32 random bits for an address: whole numbers or uint32 arrays, which broadcast against each other."""
    # Of the address's rank: the tests have JAX refuse arithmetic on arrays of different ranks.
    h: Any = np.zeros((1,) * max(1, np.ndim(address[0])), np.uint32)
    for word in address:
        number = isinstance(word, int | np.integer)
        # Arrays even for single numbers: NumPy warns of overflow in scalars, and uint32 is meant to wrap around here.
        words = np.full((1,) * h.ndim, int(word) & 0xFFFFFFFF, np.uint32) if number else word
        h = mix((h ^ words) * GOLDEN + GOLDEN)
    return h


def name_id(name: str) -> int:
    """Return a stable 32-bit number for a name (a tensor's path, a purpose)."""
    # Not hash(), which Python salts anew in every process.
    return zlib.crc32(name.encode())


def generator(seed: int, name: str) -> np.random.Generator:
    """Return a host generator addressed by seed and name, for initial weights and generated data."""
    return np.random.Generator(np.random.Philox(key=(seed & 0xFFFFFFFFFFFFFFFF) << 64 | name_id(name)))


_HALVES = np.array([[0x0000FFFF, 0xFFFF0000]], np.uint32)  # masks of the two halves of a word


def draw(seed: Seed, epoch: HostOrDevice | np.integer | int, index: HostOrDevice, purpose: int) -> Any:
    """Return 32 random bits for each sample, uint32 [n]; `epoch` is one number or one for each sample."""
    xp = array_module(index)
    word = bits(seed, xp.asarray(epoch).astype(np.uint32), index.astype(np.uint32), purpose)
    if xp is np:
        return word
    # The sum of its two halves is the word itself. XLA fuses plain arithmetic into its consumers and would recompute it
    # for every pixel (up to forty times slower on a CPU); a reduction is computed once for each sample.
    return jnp.sum(word[:, None] & _HALVES, axis=1, dtype=np.uint32)
