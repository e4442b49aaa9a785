"""What a layer may know of the run while it is applied."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Ctx:
    """The conditions of one application of a network; layers read it, nothing writes it.

    `norm_groups` are (axis name, index groups) for batch norm over several replicas, `seed` and `step` the
    address of dropout's random bits. `probe(block name, output)` sees every block's output.
    """

    train: bool
    compute_dtype: Any = jnp.float32
    stable_norm: bool = False
    norm_groups: tuple[str, tuple[tuple[int, ...], ...]] | None = None
    seed: int = 0
    step: Any = None
    probe: Callable[[str, Any], None] | None = None
