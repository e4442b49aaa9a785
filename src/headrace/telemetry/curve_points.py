"""The points of a run's curves: means over a few steps each, some hundreds in a run, however long its calls are."""

from dataclasses import replace

import numpy as np

from headrace.telemetry.metric_totals import HostMetrics
from headrace.telemetry.records import CurvePoint

_FINEST = 100  # each step is a point until there are twice as many
_SUMS = ("loss", "top1", "count")

Sums = tuple[float, ...]  # of these names
NOTHING_SUMMED: Sums = (0.0, 0.0, 0.0)


def steps_of_point(step: int) -> int:
    """Return how many steps the point has that the step after `step` steps belongs to.

    One in the first 200 steps, then a power of two that doubles with the steps done: a run of at least 200 steps has at
    least 200 points, one of a million has 1,400, whether its end is known or not. Points end at multiples of their
    steps, so that a resumed run has the same ones.
    """
    return 1 << max(0, (step // _FINEST).bit_length() - 1)


class CurvePoints:
    """Makes points of the metrics of calls, which are given in their order."""

    def __init__(self, updates_per_epoch: int) -> None:
        self._updates_per_epoch = updates_per_epoch
        self.sums = NOTHING_SUMMED  # over the steps of the point that is not complete; a checkpoint keeps them

    def add(self, first_step: int, metrics: HostMetrics, images_per_second: float | None) -> list[CurvePoint]:
        """Add a call that began after `first_step` steps; return the points that it completes."""
        # With nan_policy skip a bad step changes no weight, and must not make the mean of the others NaN.
        good = np.isfinite(metrics["loss"])
        is_class, none = "top1" in metrics, np.zeros(len(good))  # a task without classes has no hits
        columns = [np.where(good, metrics.get(name, none), 0.0).tolist() for name in _SUMS]
        points, step, last_step = [], first_step, first_step + len(good)
        while step < last_step:
            size = steps_of_point(step)
            ends = (step // size + 1) * size
            rows = slice(step - first_step, min(ends, last_step) - first_step)
            # float32 values in float64: hardly ever rounded, so that a point is the same however calls cut its steps.
            self.sums = tuple(sum(column[rows], before) for column, before in zip(columns, self.sums, strict=True))
            if ends <= last_step:
                rate = metrics["learning_rate"][ends - 1 - first_step]
                point = self._completed(ends, float(rate), images_per_second)
                points.append(point if is_class else replace(point, accuracy=None))
            step = ends
        return points

    def _completed(self, step: int, rate: float, images_per_second: float | None) -> CurvePoint:
        loss, top1, count = self.sums
        self.sums = NOTHING_SUMMED
        return CurvePoint(
            step=step,
            epoch=step / self._updates_per_epoch,
            loss=loss / count if count else float("nan"),
            accuracy=top1 / count if count else float("nan"),
            learning_rate=rate,
            images_per_second=images_per_second,
        )
