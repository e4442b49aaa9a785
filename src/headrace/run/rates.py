"""What a benchmark says of its calls: rates with their spread, latencies as percentiles."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

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


def call_rates(images_per_call: int, seconds: Sequence[float]) -> Rates:
    """Return the rates of calls that took so long, the first one left out."""
    return Rates(each=tuple(images_per_call / each for each in seconds[1:]))


def latencies(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles, mean and longest of some times, in milliseconds: each the least time not below its share."""
    ordered = sorted(1e3 * each for each in seconds)
    found = {f"p{share}": ordered[-(-share * len(ordered) // 100) - 1] for share in _PERCENTILES}
    return found | {"mean": statistics.fmean(ordered), "longest": ordered[-1]}
