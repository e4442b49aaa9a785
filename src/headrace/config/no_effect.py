"""Options of the reference that do nothing here, and why: on every backend, or on some.

They are accepted, so that its command lines run as they stand, and named once when a run starts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.config.legacy_table import ROWS
from headrace.config.schema import Config, all_options

CPU, GPU, TPU = "cpu", "gpu", "tpu"
EVERYWHERE = (CPU, GPU, TPU)
_TILES = "It is about the IPU's tiles; other devices have none."
_JOINED = "Only XLA's GPU backend has a limit to set for this."


@dataclass(frozen=True, kw_only=True)
class NoEffect:
    """An option, the backends on which it does nothing, and the reason; `values` where only some do nothing."""

    option: str
    reason: str
    backends: tuple[str, ...] = EVERYWHERE
    applies: Callable[[Any], bool] = bool


def _always(value: Any) -> bool:
    return value not in (None, ())


ROWS_HERE = (
    NoEffect(
        option="half_partials",
        backends=(CPU,),
        reason="XLA's CPU backend computes 16-bit products in 32 bits and rounds the result.",
    ),
    NoEffect(
        option="internal_exchange_optimization_target",
        applies=lambda value: value == "balanced",
        reason="balanced is what XLA does anyway.",
    ),
    NoEffect(option="max_cross_replica_buffer_size", backends=(CPU, TPU), applies=_always, reason=_JOINED),
    NoEffect(option="max_reduce_many_buffer_size", backends=(CPU, TPU), applies=_always, reason=_JOINED),
    NoEffect(option="available_memory_proportion", backends=(CPU, TPU), reason=_JOINED),
    NoEffect(option="gather_conv_output", reason="XLA joins the small sums of batch norm by itself."),
    NoEffect(option="conv_dithering", reason=_TILES),
    NoEffect(option="num_io_tiles", reason=_TILES),
    NoEffect(option="min_remote_tensor_size", applies=_always, reason="A state goes to host memory as a whole."),
    NoEffect(
        option="scheduling_algorithm",
        reason="XLA orders operations itself; internal_exchange_optimization_target says what for.",
    ),
    NoEffect(
        option="on_demand", applies=_always, reason="Devices are always opened when a run needs them, not before."
    ),
    NoEffect(
        option="nanoo",
        applies=_always,
        reason="Numbers that overflow become infinite, and a step with such a gradient changes no weight.",
    ),
    NoEffect(
        option="select_ipus",
        backends=(CPU, TPU),
        applies=lambda words: any(word != "0" and word.isdecimal() for word in words),
        reason="Virtual CPU devices are alike, and a TPU's are chosen by its environment.",
    ),
    *(NoEffect(option=row.option, applies=_always, reason=row.no_effect) for row in ROWS if row.no_effect),
)


def without_effect(config: Config, backend: str) -> dict[str, str]:
    """Return {option: reason} of the options given that do nothing on a backend."""
    found = {}
    for row in ROWS_HERE:
        value = getattr(getattr(config, all_options()[row.option].section), row.option)
        if backend in row.backends and row.applies(value):
            found[row.option] = row.reason
    return found


def describe_without_effect(config: Config, backend: str) -> list[str]:
    """Return the sentence that names them, if there are any."""
    found = without_effect(config, backend)
    if not found:
        return []
    listed = "; ".join(f"{name} ({reason.rstrip('.')})" for name, reason in found.items())
    return [f"without effect on {backend}: {listed}"]
