"""The verdict on a model: which results are called useless, and which are not."""

import math

import numpy as np
import pytest

from headrace.telemetry.model_verdict import Losses, model_verdict, never_recognized
from headrace.telemetry.validation_report import validation_report


def report(confusion: list[list[int]]) -> dict:
    matrix = np.array(confusion)
    sums = {"confusion": matrix, "count": matrix.sum(), "top1": np.trace(matrix), "top5": 0, "loss": 1.0}
    return validation_report(sums, [f"c{k}" for k in range(len(matrix))])


@pytest.mark.parametrize(
    ("first", "last", "chance", "diverged"),
    [
        (2.0, 8.7e19, math.log(10), True),
        (8.7e19, 8.6e19, math.log(10), True),  # from the first record on
        (2.0, math.nan, math.log(10), True),
        (2.0, math.inf, None, True),
        (0.5, 400.0, None, True),  # of a loss whose scale is not known
        (2.3, 3.0, math.log(10), False),  # bad, but no more than a rough start
        (900.0, 20.0, None, False),
        (-1.0, -2.0, None, False),  # a loss given by code may be negative
        (2.3, 0.1, math.log(10), False),
    ],
)
def test_a_loss_far_above_that_of_chance_has_diverged(first, last, chance, diverged):
    verdict = model_verdict(Losses(first=first, last=last, chance=chance), None)
    assert verdict.startswith("diverged: ") == diverged
    assert bool(verdict) == diverged
    assert ("--lr" in verdict) == diverged


def test_one_answer_for_all_images_is_named_with_its_share():
    verdict = model_verdict(None, report([[10, 0], [1, 0]]))
    assert verdict.startswith("constant: c0 is the answer to all 11 validation images")
    assert "90.91 %" in verdict
    assert "--class-weights balanced or --balanced-sampling" in verdict
    even = model_verdict(None, report([[0, 0, 5], [0, 0, 5], [0, 0, 5]]))
    assert "33.33 %" in even
    assert "--class-weights" not in even, "even classes need no evening out"
    evened_out = model_verdict(None, report([[10, 0], [1, 0]]), evened_out=True)
    assert evened_out.startswith("constant: ")
    assert "--class-weights" not in evened_out, "the run had one of these"
    assert model_verdict(None, report([[10, 0], [0, 1]])) == ""
    assert model_verdict(None, report([[10, 0], [0, 0]])) == "", "the images are of one class"
    bad = Losses(first=1.0, last=math.nan, chance=0.7)
    assert model_verdict(bad, report([[10, 0], [1, 0]])).startswith("diverged"), "what explains the other"


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_a_validation_loss_that_is_not_finite_has_diverged(loss):
    """Weights may become useless after the last training record; a report in a file has null there."""
    losses = Losses(first=1.0, last=1.0, chance=0.7)
    assert model_verdict(losses, report([[10, 0], [1, 0]]) | {"loss": loss}).startswith("diverged: the validation loss")


def test_classes_that_are_never_recognized_are_named_and_bounded():
    assert never_recognized(report([[10, 0], [1, 0]])) == "c1 (1 image)"
    assert never_recognized(report([[10, 0], [0, 0]])) == "", "no image, nothing missed"
    many = np.zeros((9, 9), int)
    many[:, 0] = 2
    assert never_recognized(report(many.tolist())) == (
        "c1 (2 images), c2 (2 images), c3 (2 images), c4 (2 images), c5 (2 images) and 3 more"
    )
