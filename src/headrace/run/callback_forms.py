"""The forms in which code gives callbacks: objects of our class, functions, and objects with the methods of Keras."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from headrace.core.errors import ConfigError, did_you_mean, nearest
from headrace.run.callbacks import EVENTS, Callback, RunEvent, TrainingEvent, ValidationEvent, overrides

# A function is called after each epoch, or on the event that it is named after; a dict says the event of each.
CallbackLike = Callback | Callable[[Any], str | None] | Mapping[str, Callable[[Any], str | None]] | object

_CALLED = ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_test_begin", "on_test_end")
_OF_BATCHES = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_NEVER = ("on_test_batch_begin", "on_test_batch_end", "on_predict_begin", "on_predict_end")
_NEVER += ("on_predict_batch_begin", "on_predict_batch_end")


def check_callbacks(callbacks: object) -> tuple[Callback, ...]:
    """Return callbacks given by code; refuse anything else, and what would never be called."""
    given = tuple(callbacks) if isinstance(callbacks, list | tuple) else (callbacks,)
    return tuple(_callback(each) for each in given)


def _callback(given: object) -> Callback:
    if isinstance(given, Mapping):
        return _of_functions(given)
    if _in_the_manner_of_keras(given):
        return KerasCallback(given)
    if isinstance(given, Callback):
        _refuse_unknown_events(given)
        return given
    if callable(given) and not isinstance(given, type):
        name = getattr(given, "__name__", "")
        if name.startswith("on_") and name not in EVENTS:
            raise ConfigError(
                f"A function among the callbacks is named {name}, which is no event.",
                rule=f"It is called on the event that it is named after ({', '.join(EVENTS)}), else after each epoch.",
                remedy=did_you_mean(name, EVENTS),
            )
        return _of_functions({name if name in EVENTS else "on_epoch_end": given})
    made = f"{given.__name__}()" if isinstance(given, type) and issubclass(given, Callback) else ""
    raise ConfigError(
        f"A callback is a {type(given).__name__}.",
        rule="It is a function of an event, {event: function}, an object whose class inherits from headrace.Callback, "
        "or one with the methods of a callback of Keras.",
        remedy=f"Give an object: {made}." if made else f"The events are {', '.join(EVENTS)}.",
    )


def _of_functions(functions: Mapping[str, Any]) -> Callback:
    """Return a callback with these functions in the place of its methods."""
    callback = Callback()
    for name, function in functions.items():
        if name not in EVENTS:
            raise ConfigError(f"There is no event {name!r}.", remedy=did_you_mean(str(name), EVENTS))
        if not callable(function):
            raise ConfigError(f"The callback {name} is a {type(function).__name__}.", rule="It is a function.")
        setattr(callback, name, function)
    return callback


def _refuse_unknown_events(callback: Callback) -> None:
    """Refuse a callback with a method for an event that there is not, or without one for any event."""
    name, events = type(callback).__name__, ", ".join(EVENTS)
    methods = [method for method in dir(callback) if method.startswith("on_") and callable(getattr(callback, method))]
    if unknown := [method for method in methods if method not in EVENTS]:
        guess = nearest(unknown[0], EVENTS)
        raise ConfigError(
            f"The callback {name} has a method {unknown[0]}, which no event calls.",
            rule=f"The events of a run are {events}.",
            remedy=f"Did you mean {guess}?" if guess else "Use one of these, or give the method another beginning.",
        )
    if not any(overrides(callback, event) for event in EVENTS):
        raise ConfigError(
            f"The callback {name} has no method for any event.",
            rule=f"The events of a run are {events}.",
            remedy="Override one of them, or leave the callback out.",
        )


def _in_the_manner_of_keras(given: object) -> bool:
    """Say whether an object has methods for the events of Keras: not ours, or with arguments (epoch, logs)."""
    if isinstance(given, type):
        return False
    if not isinstance(given, Callback):
        return any(callable(getattr(given, name, None)) for name in (*_CALLED, *_OF_BATCHES))
    if any(callable(getattr(given, name, None)) for name in _CALLED if name not in EVENTS):
        return True
    return overrides(given, "on_epoch_end") and _num_arguments(given.on_epoch_end) > 1


def _num_arguments(method: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in kinds for each in inspect.signature(method).parameters.values())


class _StandIn:
    """What a callback of Keras sees as its model: it can ask the run to stop, and no more."""

    stop_training = False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the model of a callback has only stop_training in Headrace, not {name}")


class KerasCallback(Callback):
    """Calls the methods of a callback of Keras: on_epoch_end(epoch, logs) once the epoch's validation is there, too."""

    def __init__(self, given: object) -> None:
        self._given, self._logs, self._model = given, {}, _StandIn()
        self._step, self._num_epochs = -1, 0  # the step of an epoch that waits for its validation
        base = next((each for each in type(given).__mro__ if each.__name__ == "Callback"), object)
        own = {
            name
            for name in dir(given)
            if name.startswith("on_") and getattr(type(given), name, None) is not getattr(base, name, None)
        }
        name = type(given).__name__
        if of_batches := sorted(own & set(_OF_BATCHES)):
            raise ConfigError(
                f"The callback {name} has {of_batches[0]}.",
                rule="Many steps run in one call of the device program, and nobody waits between them.",
                remedy="Use on_call_end(event) of a headrace.Callback, or on_step(event) with stream_results=True.",
            )
        if unknown := sorted(own - set(_CALLED) - set(_NEVER)):
            raise ConfigError(
                f"The callback {name} has a method {unknown[0]}, which no event calls.",
                rule=f"Of the methods of a callback of Keras are called {', '.join(_CALLED)}.",
                remedy=did_you_mean(unknown[0], _CALLED),
            )

    def _call(self, method: str, *arguments: object) -> None:
        function = getattr(self._given, method, None)
        if callable(function):
            function(*arguments)

    @property
    def _reason(self) -> str | None:
        return f"{type(self._given).__name__} set stop_training" if self._model.stop_training else None

    def on_train_begin(self, event: RunEvent) -> str | None:
        """Tell the callback about the run."""
        self._num_epochs = event.num_epochs
        params = {"verbose": 0, "epochs": event.num_epochs, "steps": event.steps_per_epoch}
        for name, value in (("set_model", self._model), ("set_params", params)):
            if callable(getattr(self._given, name, None)):
                getattr(self._given, name)(value)
        if not hasattr(self._given, "model"):
            vars(self._given)["model"] = self._model
        self._call("on_train_begin", {})
        if event.epoch == int(event.epoch) and event.epoch < event.num_epochs:
            self._call("on_epoch_begin", int(event.epoch), {})
        return self._reason

    def on_train_end(self, event: RunEvent) -> None:
        """Hand the last numbers over."""
        self._call("on_train_end", dict(self._logs))

    def on_epoch_end(self, event: TrainingEvent) -> str | None:
        """Keep the numbers, and hand them over unless a validation of the same weights follows."""
        self._logs = {"loss": event.loss, "accuracy": event.accuracy, **event.metrics}
        self._step = event.step
        return None if event.validation_follows else self._epoch_ended(event)

    def on_validation_end(self, event: ValidationEvent) -> str | None:
        """Hand over the validation's numbers and, at the end of an epoch, all of them."""
        results = event.results.values()
        better = max(results, key=lambda record: -record.loss if record.top1 is None else record.top1)
        accuracy = {} if better.top1 is None else {"accuracy": better.top1}
        found = {"loss": better.loss, **accuracy, **better.metrics}
        self._call("on_test_begin", {})
        self._call("on_test_end", found)
        if event.step != self._step:
            return self._reason
        self._logs |= {f"val_{name}": value for name, value in found.items()}
        return self._epoch_ended(event)

    def _epoch_ended(self, event: TrainingEvent | ValidationEvent) -> str | None:
        self._step, number = -1, round(event.epoch)
        self._call("on_epoch_end", number - 1, dict(self._logs))
        reason = self._reason
        if reason is None and number < self._num_epochs:
            self._call("on_epoch_begin", number, {})
        return reason
