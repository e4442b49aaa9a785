"""What a layer knows about the run while it is applied (`Ctx`), and its random numbers.

Random numbers are addressed by sample. An ordinary JAX key fills an array [N, ...] by position, so a sample's numbers
would depend on the micro batch it is in. The key of `sample_key` also carries the indices of the N samples: each row
of an array whose first dim is N is drawn for its own sample, so every plan yields the same numbers. It works with all
of `jax.random` and can be split and folded like any other key. Other arrays are drawn by position, the same for all
samples.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from headrace.core.rng import Seed, bits, name_id, seed_word


@dataclass(frozen=True)
class Draws:
    """The address of random numbers: the seed of the run, the step, and the index of each sample [N].

    A sample thus draws the same numbers in whichever micro batch, replica, stage or process it is.
    """

    seed: Seed
    step: Array | int
    samples: Array


# A batch norm is frozen when training leaves both of these alone. It then normalises with its running statistics, which
# stop moving; with only one of them frozen it still follows the batches.
NORM_WEIGHTS = ("gamma", "beta")


def all_frozen(frozen: Callable[[str], bool] | None, layer: str, tensors: Iterable[str]) -> bool:
    """Say whether training leaves all these tensors of a layer alone; `frozen` answers for a tensor's full name."""
    return frozen is not None and all(frozen(f"{layer}/{tensor}") for tensor in tensors)


@dataclass(frozen=True, kw_only=True)
class Ctx:
    """The conditions under which a network is applied; layers only read it.

    `norm_groups` is (axis name, index groups) for batch norm over several replicas. `probe(block name, output)` is
    called with the output of every block. `path` is the position of a layer in the network, which is part of the
    address of its random numbers. `frozen(tensor name)` returns whether training leaves a weight unchanged.
    `cpu_kernels` says when convolutions on the CPU are our own (ops/native_kernels.py), `matmul_precision` how
    accelerators multiply float32 values (ops/tracing.py).
    """

    train: bool
    compute_dtype: DTypeLike = jnp.float32
    half_partials: bool = False
    stable_norm: bool = False
    norm_groups: tuple[str, tuple[tuple[int, ...], ...]] | None = None
    draws: Draws | None = None
    path: str = ""
    probe: Callable[[str, Any], Any] | None = None
    frozen: Callable[[str], bool] | None = None
    cpu_kernels: str = "auto"
    matmul_precision: str = "default"

    def is_frozen(self, *tensors: str) -> bool:
        """Return whether all these tensors of the layer are frozen; the layer then works as in evaluation."""
        return all_frozen(self.frozen, self.path, tensors)

    def under(self, name: str) -> "Ctx":
        """Return the context of a named sublayer."""
        return replace(self, path=f"{self.path}/{name}" if self.path else name)

    def uniform(self, *shape: int) -> Array:
        """Return uniform float32 numbers in [0, 1) for every sample: [N, *shape]."""
        assert self.draws is not None, f"{self.path} draws random numbers, but none were given: Ctx(draws=...)"
        ones = (1,) * len(shape)
        samples = self.draws.samples.astype(jnp.uint32).reshape(-1, *ones)
        places = np.arange(int(np.prod(shape)), dtype=np.uint32).reshape(1, *shape)
        step = jnp.asarray(self.draws.step).astype(jnp.uint32).reshape(1, *ones)
        drawn = bits(seed_word(self.draws.seed).reshape(1, *ones), name_id(self.path), step, samples, places)
        # 24 bits, as many as a float32 holds exactly: more would round some numbers up to 1.
        return (drawn >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)
