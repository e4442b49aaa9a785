"""From calls to records: add up what the device sends out, stop at numbers that are not finite, keep the pace."""

from dataclasses import dataclass, field

import numpy as np

from headrace.core.errors import RunStopped
from headrace.plan.plan import Plan
from headrace.telemetry.clock import Throughput
from headrace.telemetry.record import TrainRecord

HostMetrics = dict[str, np.ndarray]  # each [K, ...]: one row per step of the call


@dataclass
class Ledger:
    """The calls since the last record, and the pace of the whole run. One for each process of a run."""

    plan: Plan
    block_names: tuple[str, ...]
    nan_policy: str
    pace: Throughput = field(default_factory=Throughput)
    skipped_steps: int = 0
    _calls: list[HostMetrics] = field(default_factory=list)
    _recent: Throughput = field(default_factory=Throughput)
    _wait: float = 0.0

    def settle(self, last_step: int, metrics: HostMetrics, seconds: float, wait: float) -> None:
        """Take the metrics of the call that ended with `last_step`, `seconds` long, `wait` of them without input."""
        self._refuse_bad(last_step - len(metrics["loss"]), metrics)
        steps = len(metrics["loss"])
        images = steps * self.plan.batch.global_batch_size
        self.pace = self.pace.add(images=images, steps=steps, seconds=seconds)
        self._recent = self._recent.add(images=images, steps=steps, seconds=seconds)
        self.skipped_steps += int(metrics["skipped"].sum())
        self._wait += wait
        self._calls.append(metrics)

    def record(self, last_step: int, elapsed: float) -> TrainRecord | None:
        """Return a record of all calls since the last one, or None when there were none."""
        if not self._calls:
            return None
        total = {key: np.concatenate([call[key] for call in self._calls]) for key in self._calls[0]}
        count = float(total["count"].sum(dtype=np.float64))
        mean = {key: float(total[key].sum(dtype=np.float64)) / count for key in ("loss", "top1", "top5")}
        record = TrainRecord(
            step=last_step,
            epoch=last_step / self.plan.steps.updates_per_epoch,
            loss=mean["loss"],
            accuracy=mean["top1"],
            top5=mean["top5"],
            learning_rate=total["learning_rate"][-1],
            grad_norm=total["grad_norm"][-1],
            images_per_second=self._recent.images_per_second,
            step_seconds=self._recent.step_seconds,
            loss_scale=total["loss_scale"][-1],
            skipped_steps=int(total["skipped"].sum()),
            infeed_wait_seconds=self._wait,
            elapsed_seconds=elapsed,
        )
        self._calls, self._recent, self._wait = [], self._recent.fresh(), 0.0
        return record

    def _refuse_bad(self, first_step: int, metrics: HostMetrics) -> None:
        bad = np.flatnonzero(metrics["bad"])
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
            remedy=remedy + " --nan-policy skip leaves such steps out and goes on.",
        )


def _first_layer(metrics: HostMetrics, at: int, block_names: tuple[str, ...]) -> str:
    """Name the first block that made a non-finite number in that step: forward in order, else backward from the end."""
    if "forward_finite" not in metrics:
        return ""
    forward, backward = metrics["forward_finite"][at], metrics["gradient_finite"][at]
    if not forward.all():
        return f", first in the output of {block_names[int(np.argmin(forward))]}"
    if not backward.all():
        return f", first in the gradients of {block_names[len(backward) - 1 - int(np.argmin(backward[::-1]))]}"
    return ", first in the loss"
