"""The round numbers along the axes of a chart."""

import math
from collections.abc import Sequence

_LOG_SPAN = 50  # values that span a larger factor are drawn on a logarithmic axis


def value_ticks(axis: str, values: Sequence[float]) -> tuple[tuple[float, ...], bool]:
    """Return the ticks for finite values, and whether they are logarithmic; `axis` is that of a Panel."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if axis == "log" and low > 0 and high / low > _LOG_SPAN:
        return log_ticks(low, high), True
    if axis == "fitted":
        return round_ticks(low, high), False
    if axis == "percent":
        # Room below 100 even if all of them are: ticks of an empty range would go on above it.
        return round_ticks(min(99.0, low), max(100.0, high)), False
    return round_ticks(min(0.0, low), high), False


def epoch_ticks(last_epoch: float) -> tuple[float, ...]:
    """Return round ticks up to the last epoch: whole epochs unless there are fewer than two."""
    ticks = round_ticks(0, last_epoch, min(6, int(last_epoch)) if last_epoch >= 2 else 5)
    return tuple(tick for tick in ticks if tick <= last_epoch * 1.0001)


def round_ticks(low: float, high: float, num_wanted: int = 5) -> tuple[float, ...]:
    """Return evenly spaced round numbers (1, 2 or 5 times a power of ten) from at most `low` to at least `high`."""
    span = (high - low) or abs(high) or 1.0
    raw = span / num_wanted
    power = 10.0 ** math.floor(math.log10(raw))
    # A little tolerance here and below, since 0.3 / 0.1 is less than 3.
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(k * step for k in range(first, max(last, first + 1) + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return powers of ten around a range, with 2 and 5 times them when there would be few, and at most ten."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    every = max(1, math.ceil((last - first) / 8))
    ticks = [factor * 10.0**power for power in range(first, last + every, every) for factor in factors]
    below = max((tick for tick in ticks if tick <= low), default=ticks[0])
    above = min((tick for tick in ticks if tick >= high), default=ticks[-1])
    return tuple(tick for tick in ticks if below <= tick <= above)
