"""What a run does with the results of steps that arrive while a call runs: the progress line, and callbacks."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.plan.plan import Plan
from headrace.run.callbacks import Callbacks, TrainingEvent

_SHOWN_EVERY = 0.25  # seconds between two movements of the progress line


def refuse_streaming(plan: Plan, callbacks: Callbacks, *, streams: bool) -> None:
    """Refuse to report steps where no program could, and callbacks that would wait for it in vain."""
    if callbacks.wait_for_steps and not streams:
        raise ConfigError(
            "A callback has a method on_step, but stream_results is off.",
            rule="Steps are reported while a call runs only where that is asked for: it costs a little time.",
            remedy="Add stream_results=True (--stream-results), or use on_call_end.",
        )
    if streams and (plan.num_processes > 1 or not plan.whole_steps):
        why = f"{plan.num_processes} processes" if plan.num_processes > 1 else "stages that the host launches"
        raise ConfigError(
            f"stream_results is on, with {why}.",
            rule="Steps are reported from inside the one program of a call, to the one process of a run.",
            remedy="Leave stream_results out; results then come after each call, as long as --call-seconds says.",
        )


class StepReports:
    """Takes the results of steps on a thread of the devices; a callback's error is kept for the run's own thread."""

    def __init__(
        self, plan: Plan, directory: Path, callbacks: Callbacks, advance: Callable[[int, float | None], None]
    ) -> None:
        self._updates_per_epoch, self._directory = plan.steps.updates_per_epoch, directory
        self._callbacks, self._advance = callbacks, advance
        self._shown, self._error = 0.0, None

    def __call__(self, step: int, sums: Mapping[str, float]) -> None:
        """Report a step."""
        if self._error is not None:
            return
        try:
            self._report(step, sums)
        except BaseException as error:
            self._error = error

    def _report(self, step: int, sums: Mapping[str, float]) -> None:
        count = max(sums["count"], 1.0)
        now = time.monotonic()
        if now - self._shown >= _SHOWN_EVERY:
            self._shown = now
            self._advance(step, sums["loss"] / count)
        if self._callbacks.wait_for_steps:
            self._callbacks.step_ended(
                TrainingEvent(
                    directory=self._directory,
                    step=step,
                    epoch=step / self._updates_per_epoch,
                    loss=sums["loss"] / count,
                    accuracy=sums["top1"] / count,
                )
            )

    def raise_error(self) -> None:
        """Raise what a callback raised."""
        if self._error is not None:
            raise self._error
