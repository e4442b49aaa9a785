"""What a layer may know of the run while it is applied."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace.core.rng import bits, name_id


@dataclass(frozen=True)
class Draws:
    """The address of an application's random numbers: the run's seed, the step, the number of each sample [N].

    A sample so draws the same numbers whichever micro-batch, replica, stage or process it is in.
    """

    seed: int
    step: Any
    samples: Array


@dataclass(frozen=True, kw_only=True)
class Ctx:
    """The conditions of one application of a network; layers read it, nothing writes it.

    `norm_groups` are (axis name, index groups) for batch norm over several replicas. `probe(block name, output)` sees
    every block's output. `path` is where in the network a layer is: the last words of its random numbers' address.
    `frozen(tensor's name)` tells the weights that training leaves alone.
    """

    train: bool
    compute_dtype: Any = jnp.float32
    half_partials: bool = False
    stable_norm: bool = False
    norm_groups: tuple[str, tuple[tuple[int, ...], ...]] | None = None
    draws: Draws | None = None
    path: str = ""
    probe: Callable[[str, Any], Any] | None = None
    frozen: Callable[[str], bool] | None = None

    def is_frozen(self, *tensors: str) -> bool:
        """Say whether all these tensors of the layer are left alone; it then works as in evaluation."""
        return self.frozen is not None and all(self.frozen(f"{self.path}/{tensor}") for tensor in tensors)

    def under(self, name: str) -> "Ctx":
        """Return the conditions for the part of this layer that has a name."""
        return replace(self, path=f"{self.path}/{name}" if self.path else name)

    def uniform(self, *shape: int) -> Array:
        """Return random float32 numbers in [0, 1) for every sample: [N, *shape]."""
        assert self.draws is not None, f"{self.path} draws random numbers, but none were given: Ctx(draws=...)"
        ones = (1,) * len(shape)
        samples = self.draws.samples.astype(jnp.uint32).reshape(-1, *ones)
        places = np.arange(int(np.prod(shape)), dtype=np.uint32).reshape(1, *shape)
        step = jnp.asarray(self.draws.step).astype(jnp.uint32).reshape(1, *ones)
        seed = np.array([self.draws.seed & 0xFFFFFFFF], np.uint32).reshape(1, *ones)
        drawn = bits(seed, name_id(self.path), step, samples, places)
        return (drawn >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)
