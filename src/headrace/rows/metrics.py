"""The metrics of a validation, by name: what each is worth, where records keep it, and when it is shown.

A value comes from the sums over the validation images: loss, top1, top5, count, and confusion [true, predicted class].
"""

from collections.abc import Callable, Mapping, Sequence

from headrace.rows.row import Metric, Sums

# Classes are uneven where the largest has this many times as many training images as the smallest: of two such classes,
# answering the larger one alone is right for three images of four.
UNEVEN = 3.0


def _mean(name: str) -> Callable[[Sums], float | None]:
    return lambda sums: float(sums[name]) / float(sums["count"]) if sums["count"] else None


def _top5(sums: Sums) -> float | None:
    return _mean("top5")(sums) if len(sums["confusion"]) > 5 else None  # of five classes it is always 1


def _balanced_accuracy(sums: Sums) -> float | None:
    """Return the mean recall of the classes that have images."""
    import numpy as np

    confusion = np.asarray(sums["confusion"], np.float64)
    images = confusion.sum(1)
    some = images > 0
    return float((confusion.diagonal()[some] / images[some]).mean()) if some.any() else None


def _macro_f1(sums: Sums) -> float | None:
    """Return the mean F1 of the classes that have images or were answered, as scikit-learn takes it."""
    import numpy as np

    confusion = np.asarray(sums["confusion"], np.float64)
    both = confusion.sum(0) + confusion.sum(1)
    some = both > 0
    return float((2 * confusion.diagonal()[some] / both[some]).mean()) if some.any() else None


METRICS: Mapping[str, Metric] = {
    row.name: row
    for row in (
        Metric(
            name="top1",
            title="top-1",
            says="the share of images whose class is the answer",
            unit="%",
            value=_mean("top1"),
            has_field=True,
        ),
        Metric(
            name="top5",
            title="top-5",
            says="the share of images whose class is among the five best answers",
            unit="%",
            value=_top5,
            has_field=True,
        ),
        Metric(
            name="loss",
            title="loss",
            says="the mean loss of an image",
            value=_mean("loss"),
            better="less",
            has_field=True,
        ),
        Metric(
            name="balanced_accuracy",
            title="balanced accuracy",
            says="the mean recall of the classes: each counts the same, however many images it has",
            unit="%",
            value=_balanced_accuracy,
            column="balanced_acc",
        ),
        Metric(
            name="macro_f1",
            title="macro F1",
            says="the mean over the classes of F1, 2 x right / (images of the class + answers of it)",
            unit="%",
            value=_macro_f1,
            column="macro_f1",
        ),
    )
}
TOP1 = METRICS["top1"]
# Those that say more than top-1 does where classes are uneven; records keep them in `metrics`.
OF_CLASSES = tuple(row for row in METRICS.values() if not row.has_field)


def class_ratio(counts: Sequence[int]) -> float | None:
    """Return how many times as many images the largest class has as the smallest that has any; None of one class."""
    some = [count for count in counts if count]
    return max(some) / min(some) if len(some) > 1 else None
