"""What jax.vjp keeps between the passes, without the arguments that somebody else keeps anyway."""

from typing import Any


def without_arguments(vjp: Any) -> Any:
    """Take the arguments (weights, inputs) out of what jax.vjp keeps: left in, they would be copied."""
    if hasattr(vjp, "args_res"):
        vjp.args_res = [None] * len(vjp.args_res)
    return vjp


def with_arguments(vjp: Any, arguments: tuple[Any, ...]) -> Any:
    """Put the arguments back, so that the gradient can be computed."""
    if hasattr(vjp, "args_res"):
        vjp.args_res = list(arguments)
    return vjp
