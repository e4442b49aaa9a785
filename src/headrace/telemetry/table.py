"""The two CSV tables of a run, as pure functions of its records, in the reference's columns and then ours.

Accuracies are in percent here (fractions in metrics.jsonl). `step` and `iteration` are the same number, the weight
updates done; `*_batch` are means since the last row, `*_avg` means over the last epoch; `it_time` is seconds per step.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.telemetry.record import Record, TrainRecord, ValidationRecord

TRAINING_COLUMNS = (
    "step", "iteration", "epoch", "lr", "loss_batch", "loss_avg", "train_acc_batch", "train_acc_avg", "it_time",
    "img_per_sec", "total_time", "top5_batch", "grad_norm", "loss_scale", "skipped_steps", "infeed_wait",
)  # fmt: skip

VALIDATION_COLUMNS: Mapping[str, Callable[[ValidationRecord], Any]] = {
    "name": lambda r: r.checkpoint,
    "iteration": lambda r: r.step,
    "epoch": lambda r: r.epoch,
    "val_acc": lambda r: 100 * r.top1,
    "val_time": lambda r: r.seconds,
    "val_size": lambda r: r.num_samples,
    "img_per_sec": lambda r: r.images_per_second,
    "weights": lambda r: r.weights,
    "loss": lambda r: r.loss,
    "top5": lambda r: None if r.top5 is None else 100 * r.top5,
}


@dataclass
class TrainingTable:
    """Turns training records into rows; remembers the last epoch's records for the running means."""

    _window: deque[tuple[int, TrainRecord]] = field(default_factory=deque)  # (steps the record stands for, record)
    _last_step: int = 0

    def row(self, record: TrainRecord) -> list[str]:
        """Return the row of the next record."""
        self._window.append((record.step - self._last_step, record))
        self._last_step = record.step
        while self._window[0][1].epoch <= record.epoch - 1 + 1e-9:  # 1.2 - 1 is a little less than 0.2
            self._window.popleft()
        steps = sum(n for n, _ in self._window)
        loss_avg = sum(n * r.loss for n, r in self._window) / steps
        accuracy_avg = sum(n * r.accuracy for n, r in self._window) / steps
        values = (
            record.step, record.step, record.epoch, record.learning_rate, record.loss, loss_avg,
            100 * record.accuracy, 100 * accuracy_avg, record.step_seconds, record.images_per_second,
            record.elapsed_seconds, None if record.top5 is None else 100 * record.top5, record.grad_norm,
            record.loss_scale, record.skipped_steps, record.infeed_wait_seconds,
        )  # fmt: skip
        return [cell(value) for value in values]

    def rows(self, records: Iterable[Record]) -> list[list[str]]:
        """Return the rows of the training records among these."""
        return [self.row(record) for record in records if isinstance(record, TrainRecord)]


def validation_row(record: ValidationRecord) -> list[str]:
    """Return the row of a validation record."""
    return [cell(column(record)) for column in VALIDATION_COLUMNS.values()]


def cell(value: Any) -> str:
    """Return a value as a table shows it: nothing for None, seven significant digits for fractions."""
    if value is None:
        return ""
    return f"{value:.7g}" if isinstance(value, float) else str(value)
