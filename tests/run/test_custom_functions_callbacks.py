"""Callbacks in real runs: when they run, what they are given, and that a run stops cleanly for them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.run.callback_forms import check_callbacks
from headrace.run.callbacks import Callback, Callbacks, EarlyStopping, TargetAccuracy, ValidationEvent
from headrace.run.design import CustomParts
from headrace.run.fit import resume, train, train_or_resume
from headrace.telemetry.records import RunEnd, TrainRecord, ValidationRecord, read_records

from .conftest import assert_same_bits, final_state


def records(run_dir: Path, kind: Any) -> list[Any]:
    return [record for record in read_records(run_dir) if isinstance(record, kind)]


class Collect(Callback):
    """Keeps every event, and stops the run after an epoch."""

    def __init__(self, last_epoch: int = 99) -> None:
        self.calls: list[Any] = []
        self.epochs: list[Any] = []
        self.validations: list[Any] = []
        self.last_epoch = last_epoch

    def on_call_end(self, event):
        self.calls.append(event)

    def on_epoch_end(self, event):
        self.epochs.append(event)
        return "enough" if event.epoch == self.last_epoch else None

    def on_validation_end(self, event):
        self.validations.append(event)


# Few steps without accumulation; all runs of a kind share their compiled programs.
FEW: dict[str, Any] = {"weight_updates_per_epoch": 4, "global_batch_size": 16, "max_steps_per_call": 3}


def test_callbacks_see_calls_epochs_and_validations_and_stop_a_run_with_a_checkpoint(quick):
    seen = Collect(last_epoch=3)
    # one log in two epochs: calls would not end with an epoch if nobody waited for its end
    result = train(quick(logs_per_epoch=0.5, **FEW), CustomParts(callbacks=(seen,)))
    assert (result.outcome, result.reason, result.step, result.can_resume) == ("stopped", "enough", 12, True)
    assert [event.step for event in seen.epochs] == [4, 8, 12]
    assert sorted({4, 8, 12} & {event.step for event in seen.calls}) == [4, 8, 12]
    assert [event.step for event in seen.validations] == [8]
    assert seen.validations[0].results.keys() == {"raw", "ema"}
    # the records hold the same numbers: of two epochs together, and of the one that was cut off
    trained = records(result.directory, TrainRecord)
    assert [record.step for record in trained] == [8, 12]
    np.testing.assert_allclose(np.mean([event.loss for event in seen.epochs[:2]]), trained[0].loss, rtol=1e-6)
    assert trained[1].loss == seen.epochs[2].loss
    (end,) = records(result.directory, RunEnd)
    assert (end.outcome, end.reason) == ("stopped", "enough")
    assert "stopped at step 12: enough" in (result.directory / "log.txt").read_text()
    # it stopped where it says, with weights that a run left alone has there
    whole = train(quick(**FEW))
    again = resume(result.directory)
    assert (again.outcome, again.step) == ("finished", 16)
    assert_same_bits(final_state(again.directory), final_state(whole.directory))


def test_early_stopping_and_target_accuracy_end_a_run(quick):
    still = {**FEW, "lr_schedule_params": {"initial_learning_rate": 0.0}, "ema_decay": 0, "bn_momentum": 1}
    result = train(quick(early_stopping=2, **still))
    assert (result.outcome, result.step) == ("stopped", 12), "the first validation stays the best"
    assert result.reason.startswith("early stopping: no better top-1 than ")
    assert result.reason.endswith(" % (step 4) in 2 validations")
    result = train(quick(target_accuracy=0.01, **still))
    assert (result.outcome, result.step) == ("stopped", 4)
    assert "reaches 1 %" in result.reason
    # resumed, it stops at the next validation; the time to the target stays that of the first
    again = resume(result.directory)
    assert (again.outcome, again.step) == ("stopped", 8)
    first, second = records(result.directory, RunEnd)
    assert first.epoch_at_target == second.epoch_at_target == 1
    assert first.time_to_target == second.time_to_target > 0
    assert second.time_to_train > second.time_to_target


def test_the_same_command_leaves_a_run_that_has_stopped_as_it_is(quick):
    """With --resume auto it trained on to the next validation, each time it was typed."""
    still = {**FEW, "lr_schedule_params": {"initial_learning_rate": 0.0}, "ema_decay": 0, "bn_momentum": 1}
    for name, goal, step in (("target", {"target_accuracy": 0.01}, 4), ("early", {"early_stopping": 1}, 8)):
        asked = quick(**still, **goal, run_name=name, resume="auto")
        directory = train_or_resume(asked, {}).directory
        before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != ".lock"}
        again = train_or_resume(asked, {})
        assert (again.outcome, again.step, again.can_resume) == ("stopped", step, True)
        assert again.reason.startswith(f"before this command, which changed nothing: {name}")
        assert f"headrace resume {directory} with another --target-accuracy" in again.reason
        assert set(again.validation) == {"raw"}
        after = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != ".lock"}
        assert after == before
    # Whoever asks for more gets more.
    more = resume(directory, {"early_stopping": 5})
    assert (more.outcome, more.step) == ("finished", 16)


@pytest.mark.parametrize(
    ("scores", "patience", "stops"),
    [
        ([0.1, 0.2, 0.3], 1, False),
        ([0.1, 0.3, 0.3], 1, True),  # equal is not better
        ([0.1, 0.3, 0.2, 0.25], 2, True),
        ([0.1, 0.3, 0.2, 0.25], 3, False),
        ([float("nan"), float("nan")], 2, True),
        ([float("nan"), 0.1], 1, False),
    ],
)
def test_early_stopping_counts_validations_since_the_best(scores, patience, stops):
    history = tuple(
        ValidationRecord(step=20 * n, epoch=n, loss=1.0, top1=score, num_samples=1, seconds=0.1, weights=weights)
        for n, score in enumerate(scores)
        for weights in ("raw", "ema")
    )
    event = ValidationEvent(directory=Path(), step=0, epoch=0, results={"raw": history[-1]}, history=history)
    assert bool(EarlyStopping(patience).on_validation_end(event)) == stops
    assert bool(TargetAccuracy(0.25).on_validation_end(event)) == (scores[-1] >= 0.25)


def test_what_is_not_a_callback_is_refused(quick):
    with pytest.raises(ConfigError, match=r"A callback is a int.*inherits from headrace\.Callback"):
        check_callbacks([3])

    class Wrong(Callback):
        def on_epoch_end(self, event) -> Any:
            return True

    with pytest.raises(ConfigError, match="A callback returned True"):
        train(quick(**FEW), CustomParts(callbacks=(Wrong(),)))


def test_a_callback_that_would_never_be_called_is_refused():
    class Misspelt(Callback):
        def on_epoch_ends(self, event) -> None: ...

    class Nothing(Callback):
        def epoch_end(self, event) -> None: ...

    events = "on_call_end, on_step, on_epoch_end, on_validation_end"
    with pytest.raises(ConfigError, match=f"Misspelt has a method on_epoch_ends.*{events}.*Did you mean on_epoch_end"):
        check_callbacks([Misspelt()])
    for empty in (Nothing(), Callback()):
        with pytest.raises(ConfigError, match=f"no method for any event.*{events}"):
            check_callbacks([empty])
    with pytest.raises(ConfigError, match=r"A callback is a type.*Give an object: Nothing\(\)"):
        check_callbacks([Nothing])
    # methods that a class inherits, or that an object has as attributes, are its own
    given = Nothing()
    given.on_validation_end = lambda event: None  # pyright: ignore[reportAttributeAccessIssue]
    found = check_callbacks([given, EarlyStopping(2), type("Mine", (EarlyStopping,), {})(2)])
    assert len(found) == 3
    assert Callbacks(found[:1]).decide_after(epoch_ends=False, validated=True), "the run waits for it"


def test_an_epoch_that_was_interrupted_has_the_mean_of_all_its_steps(quick):
    class StopWithin(Callback):
        def on_call_end(self, event):
            return "enough" if event.step == 1 else None

    options = FEW | {"num_epochs": 1, "max_steps_per_call": 1, "validation": False}
    whole, resumed = Collect(), Collect()
    train(quick(**options), CustomParts(callbacks=(whole,)))
    cut = train(quick(**options), CustomParts(callbacks=(StopWithin(),)))
    assert cut.step < 4
    resume(cut.directory, custom=CustomParts(callbacks=(resumed,)))
    assert [(event.step, event.loss) for event in resumed.epochs] == [(4, whole.epochs[0].loss)]
