"""Every private name of JAX that Headrace uses, one small function each.

`tests/core/test_jax_private.py` checks each function alone, so that after an upgrade of JAX its failures say which name
has gone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax


class CoordinationClient(Protocol):
    """The key-value store of JAX's coordination service, shared by all processes of a job."""

    def key_value_set(self, key: str, value: str) -> None:
        """Store a value; a key can be set once."""

    def key_value_delete(self, key: str) -> None:
        """Remove a key."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Return the (key, value) pairs whose keys begin with a directory."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a key and return its value; JaxRuntimeError with DEADLINE_EXCEEDED after the time limit."""
        ...


def coordination_client() -> tuple[int, int, CoordinationClient] | None:
    """Return (process, number of processes, client) of the job that JAX has joined; None before it has joined one.

    JAX has no public way to its store; its own multihost_utils takes the same one.
    """
    if not jax.distributed.is_initialized():
        return None
    from jax._src.distributed import global_state

    client: Any = global_state.client  # the class of C++ says nothing of its methods
    return global_state.process_id, global_state.num_processes, client


def devices_are_started() -> bool:
    """Return whether JAX has opened its devices, which fixes their number; asking by public names opens them."""
    from jax._src.xla_bridge import backends_are_initialized

    return backends_are_initialized()


def without_arguments(vjp: Any) -> Any:
    """Remove the arguments (weights, inputs) from the residuals that jax.vjp keeps; return the same function.

    Somebody else keeps them anyway, and as outputs of a compiled program they would be copied. A JAX without the
    attribute still computes the same gradients, with those copies.
    """
    if hasattr(vjp, "args_res"):
        vjp.args_res = [None] * len(vjp.args_res)
    return vjp


def with_arguments(vjp: Any, arguments: Sequence[Any]) -> Any:
    """Put the arguments back, so that the gradient can be computed; return the same function."""
    if hasattr(vjp, "args_res"):
        vjp.args_res = list(arguments)
    return vjp


def run_equation(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Return the results of one equation of a jaxpr on these values."""
    primitive = equation.primitive
    bound = primitive.get_bind_params(equation.params)
    # JAX 0.10 returns the parameters, newer ones functions beside them.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with equation.ctx.manager:
        results = primitive.bind(*functions, *values, **params)
    return list(results) if primitive.multiple_results else [results]


def add_compiler(platform: str, library: Path) -> None:
    """Let JAX compile with a plugin for GPUs that are not here; its devices are not opened.

    JAX finds plugins by itself, but one that sees no device of its kind may withdraw.
    """
    from jax._src import xla_bridge
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    options = {**xla_client.generate_pjrt_gpu_plugin_options(), "platform_name": platform.upper()}
    xla_bridge.register_plugin(platform, priority=-1, library_path=str(library), options=options)
