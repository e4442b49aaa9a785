"""Results of steps while a call runs: the same numbers and bits, the progress line, callbacks, and what is refused."""

import threading

import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.engine.step_stream import listening
from headrace.run.callbacks import Callback
from headrace.run.design import CustomParts
from headrace.run.fit import train
from headrace.run.recorder import RunRecorder
from headrace.telemetry.records import TrainRecord, read_records

from .conftest import assert_same_bits, final_state


class Steps(Callback):
    """Remembers what it is told, and in which call that was: calls that have ended, and the thread."""

    def __init__(self, stop_after: int = 0) -> None:
        self.seen, self.calls, self.threads, self.stop_after = [], 0, set(), stop_after

    def on_step(self, event):
        self.seen.append((event.step, event.loss, self.calls))
        self.threads.add(threading.get_ident())
        return "enough" if event.step == self.stop_after else None

    def on_call_end(self, event):
        self.calls += 1


def reported(quick, name: str, callback: Callback | None = None, **options):
    parts = CustomParts(callbacks=(callback,) if callback else ())
    return train(quick(run_name=name, num_epochs=2, validation=False, call_seconds=0, **options), parts)


@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_are_reported_while_their_call_runs_with_the_losses_of_the_run(quick, replicas):
    steps = Steps()
    streamed = reported(quick, "streamed", steps, stream_results=True, num_replicas=replicas, logs_per_epoch=0)
    plain = reported(quick, "plain", num_replicas=replicas, logs_per_epoch=20)
    assert [step for step, _, _ in steps.seen] == list(range(1, 41))
    assert {calls for _, _, calls in steps.seen} == {0}, "all of them before their one call was over"
    assert threading.get_ident() not in steps.threads
    losses = [record.loss for record in read_records(plain.directory) if isinstance(record, TrainRecord)]
    np.testing.assert_allclose([loss for _, loss, _ in steps.seen], losses, rtol=1e-6)
    assert_same_bits(final_state(plain.directory), final_state(streamed.directory))


def test_the_progress_line_moves_within_a_call(quick, monkeypatch):
    moves = []
    monkeypatch.setattr("headrace.run.step_reports._SHOWN_EVERY", 0.0)
    monkeypatch.setattr(RunRecorder, "advance", lambda recorder, step, loss: moves.append((step, loss > 0)))
    reported(quick, "line", stream_results=True, logs_per_epoch=0)
    assert moves == [(step, True) for step in range(1, 41)]


def test_a_callback_may_stop_the_run_and_its_errors_end_it(quick):
    class Broken(Callback):
        def on_step(self, event):
            raise ValueError(f"step {event.step}")

    result = reported(quick, "stopped", Steps(stop_after=3), stream_results=True, max_steps_per_call=5)
    assert 3 <= result.step < 40
    assert result.step % 5 == 0, "the call of that step was the last, or the one that was launched already"
    with pytest.raises(ValueError, match="step 1"):
        reported(quick, "broken", Broken(), stream_results=True, max_steps_per_call=5)


def test_nobody_hears_after_the_run(quick):
    heard = []
    with listening(lambda step, sums: heard.append(step)):
        reported(quick, "first", stream_results=True)
    assert heard == list(range(1, 41))
    reported(quick, "second", stream_results=True)
    assert len(heard) == 40


@pytest.mark.parametrize(
    ("callback", "options", "text"),
    [
        (Steps(), {}, "stream_results is off"),
        (
            None,
            {"stream_results": True, "num_pipeline_stages": 2, "pipeline_schedule": "Interleaved"},
            "with stages that the host launches",
        ),
    ],
)
def test_what_cannot_be_reported_is_refused_before_a_run_is_made(quick, callback, options, text):
    with pytest.raises(ConfigError, match=text):
        reported(quick, "refused", callback, **options)
