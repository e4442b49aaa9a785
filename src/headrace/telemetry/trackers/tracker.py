"""What a tracker is: something that takes the numbers of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.core.json_text import parse_json
from headrace.engine.histograms import Histogram


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What a tracker needs to know about the run as a whole."""

    directory: Path
    name: str
    options: Mapping[str, Any]
    plan: Mapping[str, Any]
    step: int  # from which this process starts or resumes


Row = tuple[int, Mapping[str, float]]  # a step, and its numbers by name


class Tracker(Protocol):
    """Takes numbers by name."""

    def scalars(self, *rows: Row) -> None:
        """Take numbers of one step or several, in their order."""
        ...

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Take an image [H, W, 3] of a step, 0..255."""
        ...

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Take the histograms of a step by name."""
        ...

    def summary(self, values: Mapping[str, object]) -> None:
        """Take what is known at the end."""
        ...

    def close(self) -> None: ...


def known_run(place: Path) -> dict[str, str]:
    """Return the id that an earlier process of the run wrote; nothing if there is none that can be read."""
    try:
        found = parse_json(place.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("id"), str) else {}
