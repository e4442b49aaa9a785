"""Progressive resolution on paper: sizes, the steps they begin at, and what is refused."""

from typing import Any

import pytest

from headrace.config.load import config_from
from headrace.core.errors import ConfigError
from headrace.run.design import design_run

BASE: dict[str, Any] = {
    "dataset": "synthetic",
    "image_size": 32,
    "num_samples": 320,
    "model_name": "cifar_resnet8",
    "micro_batch_size": 32,
    "num_epochs": 10,
    "logs_per_epoch": 1,
}


def spans(**options: Any) -> list[tuple[int, tuple[int, int]]]:
    return [(span.first_step, span.image_hw) for span in design_run(config_from(BASE | options)).sizes]


def test_one_size_by_default() -> None:
    assert spans() == [(0, (32, 32))]


def test_training_images_may_be_smaller_than_those_of_validation() -> None:
    assert spans(train_image_size=24) == [(0, (24, 24))]
    assert spans(train_image_size=32) == spans()


def test_sizes_are_evenly_apart_and_last_equally_long() -> None:
    """100 steps in calls of 10: three sizes; the full one from 80 % of the run on."""
    three = {"progressive_resolution": 16, "progressive_resolution_sizes": 3}
    assert spans(**three) == [(0, (16, 16)), (40, (24, 24)), (80, (32, 32))]
    assert spans(**three, progressive_resolution_end=0.6) == [(0, (16, 16)), (30, (24, 24)), (60, (32, 32))]


def test_sizes_between_are_multiples_of_four_and_the_ends_are_exact() -> None:
    found = spans(progressive_resolution=18, progressive_resolution_sizes=4)
    assert [hw for _, hw in found] == [(18, 18), (24, 24), (28, 28), (32, 32)]
    many = spans(progressive_resolution=24, progressive_resolution_sizes=5)  # 26 and 30 round to sizes that are there
    assert [hw for _, hw in many] == [(24, 24), (28, 28), (32, 32)]


def test_sizes_change_at_any_step_and_the_run_ends_at_full_size() -> None:
    found = spans(progressive_resolution=8, progressive_resolution_sizes=7, progressive_resolution_end=1)
    assert [step for step, _ in found] == [0, 17, 33, 50, 67, 83, 99]  # sixths of 100 steps; the last has the last step
    assert found[-1][1] == (32, 32)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"progressive_resolution": 32}, "32x32"),
        ({"progressive_resolution": 48}, "32x32"),
        ({"train_image_size": 48}, "train_image_size is 48, image_size 32"),
        ({"train_image_size": 16, "model_name": "toy_model"}, "different weights|fails at block"),
        ({"train_image_size": 16, "progressive_resolution": 8}, "Both are given"),
        ({"progressive_resolution": 16, "num_epochs": 1, "micro_batch_size": 160}, "do not fit 2 steps"),
        ({"progressive_resolution": 40, "image_size": 64, "model_name": "toy_model"}, "different weights"),
        ({"progressive_resolution": 4, "model_name": "toy_model"}, "fails at block"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        spans(**options)


@pytest.mark.parametrize(
    "options",
    [{"progressive_resolution": 2}, {"progressive_resolution_sizes": 1}, {"progressive_resolution_end": 1.5}],
)
def test_wrong_values_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="progressive_resolution"):
        config_from(options)
