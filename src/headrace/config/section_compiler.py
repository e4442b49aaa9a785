"""The section of the schema about the compiler, its rules, and on which backends an option has no effect."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.config.field import TRANSLATED, Origin, Rule, option
from headrace.rows.values import FLOATS, at_least

if TYPE_CHECKING:
    from headrace.config.schema import Config


CPU_KERNELS = ("auto", "on", "no-winograd", "off")
TUNINGS = ("auto", "full", "quick")
SWITCH = ("auto", "on", "off")
TARGETS = ("cycles", "memory", "balanced")


def _percentages(values: tuple[float, ...]) -> str:
    """Limit to more than 0 and at most 100."""
    return "" if all(0 < value <= 100 for value in values) else "must be more than 0 and at most 100"


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """Options of the compiler. Those without effect on the device are listed when a run starts."""

    PREFIX_RANK: ClassVar[int] = 1  # so that these long names take no abbreviation from the others

    half_partials: bool = option(
        False,
        "Let matrix products return 16-bit sums, as convolutions do; off means 32-bit sums, rounded when used.",
        aliases=("enable_half_partials",),
    )
    internal_exchange_optimization_target: str | None = option(
        None,
        "What the compiler optimises for: cycles (time), memory, or a balance of both.",
        aliases=("internal_exchange_optimisation_target",),
        choices=TARGETS,
    )
    max_cross_replica_buffer_size: int | None = option(
        None, "Most bytes of gradients that are combined into one all-reduce; 0 combines none.", check=at_least(0)
    )
    max_reduce_many_buffer_size: int | None = option(
        None,
        "Most bytes that are combined into one reduce-scatter or all-gather; 0 combines none.",
        check=at_least(0),
    )
    cpu_kernels: str = option(
        "auto",
        "Compute convolutions on the CPU with Headrace's kernels instead of XLA's: auto where they are compiled "
        "and faster, on (an error where they are missing), no-winograd (on, by plain products), or off.",
        choices=CPU_KERNELS,
    )
    convolution_tuning: str = option(
        "auto",
        "On one NVIDIA GPU, try every algorithm that cuDNN has for each convolution of training (full), or only those "
        "that it recommends (quick): compiling takes less time, and steps of large images and batches up to 7 % more. "
        "auto is quick where a micro batch is little work.",
        choices=TUNINGS,
    )
    concurrent_kernels: str = option(
        "auto",
        "On one NVIDIA GPU, run kernels of a training step at the same time where none needs the other's results: "
        "small networks, images and batches train 3 to 28 % faster, in up to 30 % more memory. auto does so where "
        "convolutions are tuned quickly.",
        choices=SWITCH,
    )
    available_memory_proportion: tuple[float, ...] = option(
        (),
        "Percentage of a device's memory for the workspace of convolutions and matrix products; one value, or two per "
        "stage.",
        kind=FLOATS,
        check=_percentages,
    )


COMPILER_RULES = (
    Rule(
        broken=lambda facts: any(value < 1 for value in facts.config.compiler.available_memory_proportion),
        problem=lambda facts: f"{facts.describe('available_memory_proportion')}.",
        rule="It is a percentage (15), not a fraction (0.15).",
        remedy="Multiply it by 100, or add --application tf1, where it is a fraction.",
    ),
)

CPU, GPU, TPU = "cpu", "gpu", "tpu"
EVERYWHERE = (CPU, GPU, TPU)
BACKENDS = {"cpu": CPU, "cuda": GPU, "rocm": GPU, "tpu": TPU}  # of the platforms that name one; auto does not
_ONLY_GPU = "Only XLA's GPU backend has a limit to set for this."


@dataclass(frozen=True, kw_only=True)
class NoEffect:
    """An option, the backends on which it does nothing, and the reason; `applies` picks the values concerned."""

    section: str
    option: str
    reason: str
    backends: tuple[str, ...] = EVERYWHERE
    applies: Callable[[Any], bool] = lambda value: value not in (None, (), False)


NO_EFFECT = (
    NoEffect(
        section="compiler",
        option="half_partials",
        backends=(CPU,),
        reason="XLA's CPU backend computes 16-bit products in 32 bits and rounds the result.",
    ),
    NoEffect(
        section="compiler",
        option="internal_exchange_optimization_target",
        applies=lambda value: value == "balanced",
        reason="balanced is what XLA does anyway.",
    ),
    *(
        NoEffect(
            section="compiler",
            option=option,
            backends=(CPU, TPU),
            applies=lambda value: value not in (None, ()),  # 0 is a limit, too
            reason=_ONLY_GPU,
        )
        for option in (
            "max_cross_replica_buffer_size",
            "max_reduce_many_buffer_size",
            "available_memory_proportion",
        )
    ),
    NoEffect(
        section="compiler",
        option="cpu_kernels",
        backends=(GPU, TPU),
        applies=lambda value: value != "auto",
        reason="They are for the CPU.",
    ),
    NoEffect(
        section="compiler",
        option="convolution_tuning",
        backends=(CPU, TPU),
        applies=lambda value: value == "quick",
        reason="It is cuDNN's algorithms that are tried.",
    ),
    NoEffect(
        section="compiler",
        option="concurrent_kernels",
        backends=(CPU, TPU),
        applies=lambda value: value == "on",
        reason="It is kernels of CUDA graphs that run at the same time.",
    ),
    NoEffect(
        section="numerics",
        option="matmul_precision",
        backends=(CPU,),
        applies=lambda value: value != "default",
        reason="CPUs multiply float32 values as they are.",
    ),
    NoEffect(
        section="run",
        option="first_device",
        backends=(CPU, TPU),
        reason="Virtual CPU devices are alike, and a TPU's are chosen by its environment.",
    ),
)


def without_effect(config: "Config", backend: str, origins: Mapping[str, Origin]) -> dict[str, str]:
    """Return {option: reason} of the options given that do nothing on a backend.

    What follows from other options of an application was not given; what was only put into other units was.
    """
    return {
        row.option: row.reason
        for row in NO_EFFECT
        if backend in row.backends
        and (origins[row.option].kind != TRANSLATED or row.option in origins[row.option].where)
        and row.applies(getattr(getattr(config, row.section), row.option))
    }


def describe_without_effect(config: "Config", backend: str, origins: Mapping[str, Origin]) -> list[str]:
    """Return the sentence that lists them, if there are any."""
    found = without_effect(config, backend, origins)
    if not found:
        return []
    listed = "; ".join(f"{name} ({reason.rstrip('.')})" for name, reason in found.items())
    return [f"without effect on {backend}: {listed}"]
