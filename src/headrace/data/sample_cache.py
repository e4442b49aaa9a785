"""Keep samples in memory, as they are stored or decoded, as long as a budget lasts.

What is seen of a picture does not depend on whether it was kept: kept decoded, every picture is decoded whole, at its
first reading too.
"""

import threading
from typing import Any

import numpy as np

from headrace.core.units import format_bytes
from headrace.data.picture import decode, read_header
from headrace.data.samples import Content, Samples

KEPT = ("raw", "decoded")


class Budget:
    """Bytes that several caches may take together."""

    def __init__(self, num_bytes: int) -> None:
        self.total = self.left = num_bytes
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Take so many bytes if they are left."""
        with self._lock:
            fits = num_bytes <= self.left
            self.left -= num_bytes if fits else 0
            return fits

    def told(self) -> str:
        """Say how much is in use."""
        return f"{format_bytes(self.total - self.left)} of {format_bytes(self.total)}"


class CachedSamples:
    """Samples of which those that were read first stay in memory. `form` is raw or decoded."""

    def __init__(self, samples: Samples, form: str, look: Any, budget: Budget) -> None:
        assert form in KEPT
        self._samples, self._budget = samples, budget
        self._decoded, self._channels, self._quick = form == "decoded", look.channels, look.crop is not None
        self._kept: dict[int, Content] = {}
        self.labels = samples.labels

    def __len__(self) -> int:
        return len(self._samples)

    def name(self, sample: int) -> str:
        """Return where a sample is stored, for people."""
        return self._samples.name(sample)

    def content(self, sample: int) -> Content:
        """Return a sample from memory, or read it and keep it if there is room."""
        kept = self._kept.get(sample)
        if kept is not None:
            return kept
        content = self._samples.content(sample)
        if self._decoded and not isinstance(content.picture, np.ndarray):
            pixels = decode(content.picture, read_header(content.picture), self._channels, quick=self._quick)
            content = Content(pixels, content.boxes)
        size = content.picture.nbytes if isinstance(content.picture, np.ndarray) else len(content.picture)
        if self._budget.take(size):
            self._kept[sample] = content
        return content
