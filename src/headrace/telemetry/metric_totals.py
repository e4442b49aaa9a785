"""The metrics of calls: read while the next call runs, added up, and stopped at where they are not finite."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from headrace.core.errors import RunStopped
from headrace.engine.objective import SUMS, metric_sums
from headrace.plan.plan import Plan
from headrace.telemetry.clock import CallTime, Throughput
from headrace.telemetry.records import TrainRecord

HostMetrics = dict[str, np.ndarray]  # each [K, ...]: one row per step of the call


@dataclass(frozen=True, kw_only=True)
class Unlogged:
    """Sums over the calls since the last record. A checkpoint keeps them, so that a resumed run logs the same numbers.

    They are added call by call, in order, so that a resumed run gets the same bits as one that was never interrupted.
    A step whose loss is not finite (--nan-policy skip) enters `skipped` alone.
    """

    loss: float = 0.0
    top1: float = 0.0
    top5: float = 0.0
    count: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)  # custom ones
    skipped: int = 0
    wait_seconds: float = 0.0

    def add(self, metrics: HostMetrics, wait: float) -> "Unlogged":
        """Return the sums with one more call."""
        # With nan_policy skip a bad step changes no weight, and must not make the mean of all others NaN.
        good = np.isfinite(metrics["loss"])
        # One after the other, as np.sum does not: the bits of a sum must not depend on how steps are cut into calls.
        sums = {key: sum(metrics[key][good].tolist(), getattr(self, key)) for key in SUMS if key in metrics}
        custom = {
            name: sum(rows[good].tolist(), self.metrics.get(name, 0.0)) for name, rows in metric_sums(metrics).items()
        }
        # Skipped steps have finite losses as well: with dynamic loss scaling only their gradients overflowed.
        skipped = self.skipped + int(metrics["skipped"].sum())
        return Unlogged(**sums, metrics=custom, skipped=skipped, wait_seconds=self.wait_seconds + wait)

    def mean(self, total: float) -> float:
        """Return a sum as the mean over the samples counted, NaN when there were none."""
        return total / self.count if self.count else float("nan")

    def metric_means(self) -> dict[str, float]:
        """Return the custom metrics as means."""
        return {name: self.mean(total) for name, total in self.metrics.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as plain values, for a manifest."""
        return asdict(self)

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> "Unlogged":
        """Return the sums that `to_dict` was given; names that a newer Headrace may have added are ignored."""
        return Unlogged(**{key: saved[key] for key in asdict(NOTHING_UNLOGGED) if key in saved})


NOTHING_UNLOGGED = Unlogged()


@dataclass
class MetricTotals:
    """Totals of the calls since the last record, and the throughput of this process; skipped steps of the whole run."""

    plan: Plan
    block_names: tuple[str, ...]
    nan_policy: str
    throughput: Throughput = field(default_factory=Throughput)
    skipped_steps: int = 0
    unlogged: Unlogged = NOTHING_UNLOGGED
    _last: HostMetrics | None = None  # of the last call; None when there was none since the last record
    _recent: Throughput = field(default_factory=Throughput)

    def continue_from(self, unlogged: Unlogged, skipped_in_records: int) -> None:
        """Start with the totals of the earlier process of the run."""
        self.unlogged, self.skipped_steps = unlogged, skipped_in_records + unlogged.skipped

    def add_call(self, last_step: int, metrics: HostMetrics, took: CallTime) -> None:
        """Add the metrics of the call that ended with `last_step`."""
        # First, so that nothing of a call with bad numbers is recorded or saved.
        self._refuse_bad(last_step - len(metrics["loss"]), metrics)
        steps = len(metrics["loss"])
        images = steps * self.plan.batch.global_batch_size
        self.throughput = self.throughput.add(images=images, steps=steps, took=took)
        self._recent = self._recent.add(images=images, steps=steps, took=took)
        self.skipped_steps += int(metrics["skipped"].sum())
        self.unlogged, self._last = self.unlogged.add(metrics, took.wait), metrics

    def record(self, last_step: int, elapsed: float) -> TrainRecord | None:
        """Return a record of all calls since the last one, or None when there were none."""
        if self._last is None:
            return None
        sums, last = self.unlogged, self._last
        record = TrainRecord(
            step=last_step,
            epoch=last_step / self.plan.steps.updates_per_epoch,
            loss=sums.mean(sums.loss),
            accuracy=sums.mean(sums.top1) if "top1" in last else None,
            top5=sums.mean(sums.top5) if "top5" in last else None,
            metrics=sums.metric_means(),
            # Of the last step: a mean over the steps of a record would be no rate that was ever used.
            learning_rate=last["learning_rate"][-1],
            grad_norm=last["grad_norm"][-1],
            images_per_second=self._recent.images_per_second,
            step_seconds=self._recent.step_seconds,
            loss_scale=last["loss_scale"][-1],
            skipped_steps=sums.skipped,
            infeed_wait_seconds=sums.wait_seconds,
            elapsed_seconds=elapsed,
        )
        # `restarted` keeps whether the first call is over: that one never counts.
        self.unlogged, self._last, self._recent = NOTHING_UNLOGGED, None, self._recent.restarted()
        return record

    def _refuse_bad(self, first_step: int, metrics: HostMetrics) -> None:
        bad = np.flatnonzero(metrics["bad"])
        # `bad` leaves out the overflows that dynamic loss scaling expects.
        if self.nan_policy == "skip" or not len(bad):
            return
        at = int(bad[0])
        where = _first_layer(metrics, at, self.block_names)
        remedy = "Lower the learning rate, clip gradients (--gradient-clipping), or use a wider --precision."
        if not where:
            remedy += " --fp-exceptions names the first layer."
        raise RunStopped(
            f"Step {first_step + at + 1} gave numbers that are not finite{where} "
            f"(loss {metrics['loss'][at] / metrics['count'][at]:g}, gradient norm {metrics['grad_norm'][at]:g}, "
            f"learning rate {metrics['learning_rate'][at]:g}).",
            rule="The weights before that step were kept, and so was the last checkpoint.",
            remedy=remedy + " --nan-policy skip leaves such steps out and continues.",
        )


def _first_layer(metrics: HostMetrics, at: int, block_names: tuple[str, ...]) -> str:
    """Name the first block that made a non-finite number in that step: forward in order, else backward from the end."""
    if "forward_finite" not in metrics:
        return ""
    forward, backward = metrics["forward_finite"][at], metrics["gradient_finite"][at]
    if not forward.all():
        return f", first in the output of {block_names[int(np.argmin(forward))]}"
    if not backward.all():
        # Backward the last block comes first, so the search runs from the end.
        return f", first in the gradients of {block_names[len(backward) - 1 - int(np.argmin(backward[::-1]))]}"
    return ", first in the loss"
