"""Callbacks as functions, dicts of them, and objects with the methods of Keras: when they are called, and with what."""

from typing import Any

import pytest

from headrace import Callback, Model
from headrace.core.errors import ConfigError
from headrace.run.callback_forms import check_callbacks

OPTIONS: dict[str, Any] = {"micro_batch_size": 32, "progress": "none", "config": "none", "learning_rate": 0.01}
FEW: dict[str, Any] = {"epochs": 3, "steps_per_epoch": 4}


class LikeKeras:
    """What somebody who knows Keras writes, without a base."""

    def __init__(self, stop_after: int = 99) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.stop_after = stop_after

    def set_params(self, params):
        self.told.append(("params", params["epochs"], params["steps"]))

    def on_train_begin(self, logs=None):
        self.told.append(("train_begin",))

    def on_epoch_begin(self, epoch, logs=None):
        self.told.append(("epoch_begin", epoch))

    def on_epoch_end(self, epoch, logs=None):
        self.told.append(("epoch_end", epoch, logs))
        if epoch == self.stop_after:
            vars(self)["model"].stop_training = True

    def on_train_end(self, logs=None):
        self.told.append(("train_end", logs))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return Model("toy_model_bn", log_dir=str(tmp_path_factory.mktemp("runs")), **OPTIONS)


def test_functions_and_keras_see_the_numbers_of_the_records(model):
    losses, ends, seen = [], [], LikeKeras()

    def on_train_end(event):
        ends.append((event.outcome, event.step, event.num_epochs, event.steps_per_epoch))

    run = model.fit(
        "digits",
        callbacks=[lambda event: losses.append(event.loss), on_train_end, seen, {"on_validation_end": ends.append}],
        **FEW,
    )
    assert losses == pytest.approx(list(run.metrics["loss"]))
    assert ends[-1] == ("finished", 12, 3, 4)
    assert [event.step for event in ends[:-1]] == [4, 8, 12]
    names = [entry[0] for entry in seen.told]
    assert names == ["params", "train_begin", *["epoch_begin", "epoch_end"] * 3, "train_end"]
    assert seen.told[0] == ("params", 3, 4)
    logs = [entry[2] for entry in seen.told if entry[0] == "epoch_end"]
    assert [entry[1] for entry in seen.told if entry[0] == "epoch_end"] == [0, 1, 2]
    for name in ("loss", "accuracy"):
        assert [each[name] for each in logs] == pytest.approx(list(run.metrics[name]))
    assert [each["val_accuracy"] for each in logs] == pytest.approx(list(run.metrics["val_accuracy"]))
    assert seen.told[-1][1] == logs[-1]


def test_stop_training_stops_after_the_epoch(model):
    seen = LikeKeras(stop_after=1)
    run = model.fit("digits", callbacks=seen, **FEW)
    assert (run.outcome, run.reason, run.step) == ("stopped", "LikeKeras set stop_training", 8)
    assert [entry[1] for entry in seen.told if entry[0] == "epoch_end"] == [0, 1]
    assert seen.told[-1][0] == "train_end"


def test_without_validation_epochs_end_at_once_and_ours_may_have_the_arguments_of_keras(model):
    class Ours(Callback):
        def on_epoch_end(self, epoch, logs=None):  # pyright: ignore[reportIncompatibleMethodOverride]
            found.append((epoch, sorted(logs or {})))

    found: list[Any] = []
    model.fit("digits", callbacks=[Ours()], validation=False, **FEW)
    assert found == [(epoch, ["accuracy", "loss"]) for epoch in range(3)]


class Batches(LikeKeras):
    def on_train_batch_end(self, batch, logs=None):
        pass


class Slip(LikeKeras):
    def on_epoch_ends(self, epoch, logs=None):
        pass


def on_epoch_ends(event):
    pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Batches(), "Batches has on_train_batch_end.*on_call_end"),
        (Slip(), "Slip has a method on_epoch_ends.*Did you mean on_epoch_end"),
        (on_epoch_ends, "named on_epoch_ends, which is no event.*Did you mean on_epoch_end"),
        ({"on_epoch": print}, "no event 'on_epoch'.*on_epoch_end"),
        ({"on_epoch_end": 3}, "on_epoch_end is a int"),
        (3, "A callback is a int"),
        (Callback, r"Give an object: Callback\(\)"),
    ],
)
def test_what_would_never_be_called_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        check_callbacks([given])


def test_the_model_of_a_callback_says_what_it_has_not():
    (made,) = check_callbacks(LikeKeras())
    with pytest.raises(AttributeError, match="only stop_training in Headrace, not optimizer"):
        vars(made)["_model"].optimizer  # noqa: B018
