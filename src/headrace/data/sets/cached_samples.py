"""Caching in memory, encoded or decoded, within a budget."""

import threading

import numpy as np

from headrace.data.decoding.image import decode, read_header
from headrace.data.sets.samples import Content, Samples

KEPT = ("raw", "decoded")


class Budget:
    """A number of bytes that several caches share."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Take this many bytes if they are left; a negative number gives bytes back."""
        with self._lock:
            fits = num_bytes <= self.left
            self.left -= num_bytes if fits else 0
            return fits


class CachedSamples:
    """Samples that stay in memory once read, while the budget lasts: raw, or decoded with these channels."""

    def __init__(self, samples: Samples, budget: Budget, *, decoded: bool, channels: int, quick: bool) -> None:
        self._samples, self._budget = samples, budget
        self._decoded, self._channels, self._quick = decoded, channels, quick
        self._kept: dict[int, Content] = {}
        self.labels = samples.labels

    def __len__(self) -> int:
        return len(self._samples)

    def name(self, sample: int) -> str:
        """Return where a sample is stored, for messages."""
        return self._samples.name(sample)

    def content(self, sample: int) -> Content:
        """Return a sample from memory, or read it and keep it if there is room."""
        kept = self._kept.get(sample)
        if kept is not None:
            return kept
        content = self._samples.content(sample)
        if self._decoded and not isinstance(content.image, np.ndarray):
            # Whole, not the crop: the next epoch crops elsewhere.
            pixels = decode(content.image, read_header(content.image), self._channels, quick=self._quick)
            content = Content(pixels, content.boxes)
        # First come, first kept: replacing images would help nothing, since every epoch reads each of them once.
        # Two threads may read the same sample at once (repeated augmentation): one of them keeps it.
        if self._budget.take(content.num_bytes) and self._kept.setdefault(sample, content) is not content:
            self._budget.take(-content.num_bytes)
        return content
