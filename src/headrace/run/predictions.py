"""What a model predicts: probabilities of classes for images, with the names of files and classes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

_SHOWN, _CLASSES = 10, 3  # images and classes in a text


@dataclass(frozen=True, kw_only=True, repr=False)
class Predicted:
    """The prediction for one image: its classes, best first. `problem` says why a file could not be read."""

    source: str  # the file, or the number of the image
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]
    problem: str = ""

    @property
    def name(self) -> str:
        """The best class."""
        return self.classes[0] if self.classes else ""

    @property
    def probability(self) -> float:
        """The probability of the best class."""
        return self.probabilities[0] if self.probabilities else float("nan")

    def __repr__(self) -> str:
        best = zip(self.classes[:_CLASSES], self.probabilities, strict=False)
        return f"{self.source}: {', '.join(f'{name} {100 * share:.2f} %' for name, share in best) or self.problem}"


class Predictions(Sequence[Predicted]):
    """Predictions for images, in their order: `probabilities` [N, classes], `labels` and `names` [N].

    A file that could not be read has NaN everywhere, and the label -1.
    """

    def __init__(
        self,
        probabilities: np.ndarray,
        class_names: Sequence[str],
        files: Sequence[Path] = (),
        problems: Sequence[str] = (),
    ) -> None:
        self.probabilities, self.class_names, self.files = probabilities, tuple(class_names), tuple(files)
        self.problems = tuple(problems) or ("",) * len(probabilities)

    @property
    def labels(self) -> np.ndarray:
        """The number of the best class of each image."""
        readable = ~np.isnan(self.probabilities).any(1)
        return np.where(readable, np.nan_to_num(self.probabilities).argmax(1), -1)

    @property
    def names(self) -> list[str]:
        """The name of the best class of each image."""
        return [self.class_names[label] if label >= 0 else "" for label in self.labels]

    def __len__(self) -> int:
        return len(self.probabilities)

    def __getitem__(self, number: Any) -> Any:
        """Return the prediction of an image, or several of them for a slice."""
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        shares = self.probabilities[number]
        order = np.argsort(-shares, kind="stable") if not self.problems[number] else []
        return Predicted(
            source=str(self.files[number]) if self.files else f"image {range(len(self))[number]}",
            classes=tuple(self.class_names[i] for i in order),
            probabilities=tuple(float(shares[i]) for i in order),
            problem=self.problems[number],
        )

    def __iter__(self) -> Iterator[Predicted]:
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        rows = [repr(one) for one in self[:_SHOWN]]
        return "\n".join([*rows, *([f"... and {len(self) - _SHOWN:,} more"] if len(self) > _SHOWN else [])])

    def _repr_html_(self) -> str:
        """Return the same as lines of HTML, for a notebook."""
        return "".join(f"<div>{escape(line)}</div>" for line in repr(self).splitlines())
