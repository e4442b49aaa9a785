"""What a benchmark says of its calls: rates with their spread, latencies as percentiles."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import jax

import headrace
from headrace.config.schema import Config
from headrace.run.trainer import Compiled

_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Images per second of each timed call; the first call of all is never among them."""

    each: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the middle rate, which a slow call does not move."""
        return statistics.median(self.each)

    @property
    def mean(self) -> float:
        """Return the average rate, as the reference's users work it out by hand."""
        return statistics.fmean(self.each)

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the rates, 0 of a single one."""
        return statistics.stdev(self.each) if len(self.each) > 1 else 0.0

    def to_dict(self) -> dict[str, float | list[float]]:
        """Return the figures as plain values."""
        return {
            "images_per_second": self.median,
            "mean": self.mean,
            "standard_deviation": self.deviation,
            "lowest": min(self.each),
            "highest": max(self.each),
            "each_call": [round(rate, 3) for rate in self.each],
        }

    def __str__(self) -> str:
        return (
            f"{self.median:,.0f} img/s (median of {len(self.each)}; mean {self.mean:,.0f} ± {self.deviation:,.0f}, "
            f"{min(self.each):,.0f} to {max(self.each):,.0f})"
        )


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What was measured, on what, and what compiling it took."""

    model: str
    dataset: str
    precision: str
    compile_seconds: float
    compile_cache: str
    device_bytes: int
    device: str
    versions: dict[str, str]


def conditions(config: Config, compiled: Compiled, devices: list[Any]) -> Conditions:
    """Return under which conditions a program ran."""
    return Conditions(
        model=config.model.model_name,
        dataset=config.data.dataset,
        precision=config.numerics.precision,
        compile_seconds=compiled.seconds,
        compile_cache=str(compiled.counts),
        device_bytes=compiled.device_bytes,
        device=f"{len(devices)} x {devices[0].device_kind}",
        versions={"headrace": headrace.__version__, "jax": jax.__version__},
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What all benchmarks tell: the conditions and the rates of the calls after the first."""

    mode: ClassVar[str]
    conditions: Conditions
    rates: Rates
    micro_batch_size: int
    num_replicas: int
    first_call_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values, on one level."""
        plain = asdict(self)
        del plain["rates"]
        return {"mode": self.mode} | plain.pop("conditions") | plain | self.rates.to_dict()


def call_rates(images_per_call: int, seconds: Sequence[float]) -> Rates:
    """Return the rates of calls that took so long, the first one left out."""
    return Rates(each=tuple(images_per_call / each for each in seconds[1:]))


def latencies(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles, mean and longest of some times, in milliseconds: each the least time not below its share."""
    ordered = sorted(1e3 * each for each in seconds)
    found = {f"p{share}": ordered[-(-share * len(ordered) // 100) - 1] for share in _PERCENTILES}
    return found | {"mean": statistics.fmean(ordered), "longest": ordered[-1]}
