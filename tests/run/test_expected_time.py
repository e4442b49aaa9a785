"""What is said of a run's duration: before it starts, on a CPU what would be quicker, and after its first calls."""

import re

import pytest

from headrace.config.load import resolve
from headrace.plan.steps import Events, make_epoch_plan, make_step_plan
from headrace.run.design import design_run
from headrace.run.expected_time import Forecast, expected_time, say_expected

PHOTOS = {"dataset": "synthetic", "num_classes": 10, "num_samples": 9000, "batch_size": 64, "num_epochs": 5}


def said(**options: object) -> tuple[str, ...]:
    resolved = resolve({**PHOTOS, **options}, config_name="none")
    return say_expected(resolved, design_run(resolved.config), "cpu", "cpu")


def test_a_long_run_on_a_cpu_is_told_what_would_be_quicker(monkeypatch):
    monkeypatch.setattr("headrace.run.expected_time.num_processors", lambda: 2)
    time, offer = said(model_name="resnet50", image_size=192)
    assert re.fullmatch(
        r"expected time, roughly: about \d h \d\d min: 700 steps of \d\.\d s, 5 validations of .*", time
    )
    written = re.search(r"--model (\w+) --image-size (\d+) takes about (\d+) min", offer)
    assert written
    assert int(written[3]) < 10
    # What is offered is what those options take.
    options = {"model_name": written[1], "image_size": int(written[2])}
    resolved = resolve({**PHOTOS, **options}, config_name="none")
    expected = expected_time(design_run(resolved.config), "cpu", "")
    assert expected
    assert int(written[3]) == pytest.approx(expected.seconds / 60, abs=1)


def test_a_short_run_is_told_nothing():
    assert said(model_name="cifar_resnet8", image_size=16, num_epochs=1) == ()


def test_what_was_not_measured_is_not_guessed():
    resolved = resolve({**PHOTOS, "model_name": "resnet50", "image_size": 192}, config_name="none")
    assert say_expected(resolved, design_run(resolved.config), "gpu", "AMD Instinct MI300X") == ()


def forecast(num_epochs: int = 10) -> Forecast:
    epoch = make_epoch_plan(num_samples=6400, global_batch_size=64, weight_updates_per_epoch=-1)
    steps = make_step_plan(epoch, num_epochs, Events(logs=1, checkpoints=None, validations=1), None)
    return Forecast(steps=steps, images_per_step=64, num_validation_images=1920)


def test_the_forecast_follows_from_measured_steps():
    # 900 steps of 3 s, and nine validations of 30 batches at a third of a step each.
    text = forecast().after(100, 3.0, timed_seconds=30.0, timed_steps=10)
    assert text == "time left: about 49 min 30 s: 900 steps of 3.0 s, 9 validations of 30.0 s"


def test_the_forecast_is_said_once_and_not_too_early():
    found = forecast()
    assert found.after(1, None, 0.0, 0) == ""
    assert found.after(3, 0.5, timed_seconds=1.0, timed_steps=2) == ""
    assert found.after(20, 0.5, timed_seconds=9.0, timed_steps=18)
    assert found.after(40, 0.5, timed_seconds=19.0, timed_steps=38) == ""


def test_the_forecast_of_a_short_run_is_not_said():
    assert forecast(num_epochs=1).after(50, 0.01, timed_seconds=3.0, timed_steps=49) == ""
