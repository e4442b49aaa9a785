"""The verdict on a model: why its result is useless, which an accuracy alone may hide. Of a good one it is empty."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.units import format_list, format_percent
from headrace.rows.metrics import UNEVEN, class_ratio

# Of the loss of answering by chance. A bad start may reach a few times as much; a run that diverged, any number.
_FAR = 5.0
MOST_NAMED = 5  # classes in a sentence
_SLOWER = "lower the learning rate (--lr, or headrace lr-find), or clip gradients (--gradient-clipping)"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The training losses of a run: of its first record and of its last, and what answering by chance would have.

    `chance` is None where it is not known: of a loss given by code, or with weights of classes as numbers.
    """

    first: float
    last: float
    chance: float | None


def model_verdict(losses: Losses | None, report: Mapping[str, Any] | None, *, evened_out: bool = False) -> str:
    """Return why a run's result is useless, or nothing; `report` is that of its best validation.

    `evened_out`: the run has an option that evens out its classes.
    """
    # One of them: a network that diverged often answers one class as well.
    diverged = _diverged(losses) if losses else ""
    if diverged or not report:
        return diverged
    return _not_finite(report) or ("" if "task" in report else _constant(report, evened_out=evened_out))


def _not_finite(report: Mapping[str, Any]) -> str:
    loss = report.get("loss")  # null in a file where it is not finite
    if not report["num_samples"] or (loss is not None and math.isfinite(loss)):
        return ""
    return f"diverged: the validation loss is not finite; {_SLOWER}"


def _diverged(losses: Losses) -> str:
    if not math.isfinite(losses.last):
        return f"diverged: the training loss is {losses.last} at the end; {_SLOWER}"
    if losses.chance is not None and losses.last > _FAR * losses.chance:
        chance = f"answering by chance has {losses.chance:.2f}"
        return f"diverged: the training loss is {losses.last:.4g} at the end, {chance}; {_SLOWER}"
    if losses.chance is None and 0 < _FAR * losses.first < losses.last:
        return f"diverged: the training loss was {losses.first:.4g} and is {losses.last:.4g} at the end; {_SLOWER}"
    return ""


def _constant(report: Mapping[str, Any], *, evened_out: bool) -> str:
    classes: Sequence[Mapping[str, Any]] = report["classes"]
    answered = [row for row in classes if row["num_predicted"]]
    with_images = [row for row in classes if row["num_samples"]]
    if len(answered) != 1 or len(with_images) < 2:
        return ""
    count, name, share = report["num_samples"], answered[0]["name"], answered[0]["num_samples"] / report["num_samples"]
    is_uneven = (class_ratio([row["num_samples"] for row in with_images]) or 1.0) >= UNEVEN
    wanted = is_uneven and not evened_out
    even = "even out the classes (--class-weights balanced or --balanced-sampling), " if wanted else ""
    return (
        f"constant: {name} is the answer to all {count:,} validation images, so that top-1 is the share of its images, "
        f"{format_percent(share)}; {even}train longer, or try another learning rate (headrace lr-find)"
    )


def never_recognized(report: Mapping[str, Any]) -> str:
    """Name the classes of which no validation image was recognized, with their images; nothing where there are none."""
    names = [
        f"{row['name']} ({row['num_samples']:,} image{'s' * (row['num_samples'] != 1)})"
        for row in report.get("classes", ())
        if row["num_samples"] and not row["num_correct"]
    ]
    return format_list(names, MOST_NAMED)
