"""Samples: the encoded images of one split by number, however they are stored, and caches of them in memory.

Caching never changes a view: with the cache of decoded images every image is decoded whole, also the first time.
"""

import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace.core.units import format_bytes
from headrace.data.decoding.image import BadImage, decode, read_header
from headrace.data.decoding.jpeg import FileExtents

Boxes = Sequence[tuple[float, float, float, float]]  # top, left, bottom, right of objects, from 0 to 1


class Content(NamedTuple):
    """A sample's image, encoded or as uint8 [h, w, C] pixels, and the boxes of the objects in it, where known."""

    image: Any
    boxes: Boxes = ()


class Samples(Protocol):
    """One split as encoded images. Every method is safe to call from several threads."""

    @property
    def labels(self) -> np.ndarray:
        """Return the label of every sample, int32."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def content(self, sample: int) -> Content:
        """Return a sample's image and object boxes; BadImage where it cannot be read."""
        ...

    def name(self, sample: int) -> str:
        """Return where a sample is stored, for messages."""
        ...


def read_all(handle: int) -> bytes:
    """Read the rest of an open file; BadImage if it is not a regular one."""
    facts = os.fstat(handle)
    # After opening, so that nothing can be exchanged between the check and the read.
    if not stat.S_ISREG(facts.st_mode):
        raise BadImage("not a regular file")
    size = facts.st_size
    data = os.read(handle, size + 1)
    while len(data) < size and (more := os.read(handle, size + 1 - len(data))):
        data += more
    return data


class FileSamples:
    """Images that are each a file."""

    def __init__(self, root: Path, files: Sequence[str], labels: np.ndarray) -> None:
        assert len(files) == len(labels)
        self._root, self._files, self.labels = str(root).rstrip("/"), files, labels.astype(np.int32)

    def __len__(self) -> int:
        return len(self._files)

    def content(self, sample: int) -> Content:
        """Return the file's bytes."""
        try:
            # Creating a file object takes longer than reading the file. A pipe without a writer must not block.
            handle = os.open(self.name(sample), os.O_RDONLY | os.O_NONBLOCK)
            try:
                return Content(read_all(handle))
            finally:
                os.close(handle)
        except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
            raise BadImage(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None

    def extents(self, samples: np.ndarray) -> FileExtents:
        """Return where these images are stored: each is a whole file."""
        none, zero = np.full(len(samples), -1, np.int64), np.zeros(len(samples), np.int64)
        paths = [os.fsencode(self.name(sample)) for sample in samples.tolist()]
        return FileExtents(paths, zero, lengths=none, crcs=none, skips=zero, sizes=none)

    def name(self, sample: int) -> str:
        """Return the file's path."""
        return f"{self._root}/{self._files[sample]}"


class ObjectSamples:
    """Images from a Python object: `len(it)` samples, `it.get(i)` (or `it[i]`) an image and its label.

    An image is encoded bytes, or pixels as uint8 [h, w] or [h, w, C].
    """

    def __init__(self, source: Any, labels: np.ndarray | None = None) -> None:
        self._get = source.get if hasattr(source, "get") else source.__getitem__
        found = [self._get(number)[1] for number in range(len(source))] if labels is None else labels
        self.labels = np.asarray(found).astype(np.int32)

    def __len__(self) -> int:
        return len(self.labels)

    def content(self, sample: int) -> Content:
        """Return the object's image."""
        image = self._get(sample)[0]
        if isinstance(image, bytes | bytearray | memoryview):
            return Content(bytes(image))
        pixels = np.asarray(image)
        if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
            raise BadImage(f"an array of {pixels.dtype} {list(pixels.shape)}, not uint8 [height, width, channels]")
        return Content(pixels if pixels.ndim == 3 else pixels[:, :, None])

    def name(self, sample: int) -> str:
        """Return the sample's number."""
        return f"sample {sample:,}"


# Caching in memory, encoded or decoded, within a budget


KEPT = ("raw", "decoded")


class Budget:
    """A number of bytes that several caches share."""

    def __init__(self, num_bytes: int) -> None:
        self.total = self.left = num_bytes
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Take this many bytes if they are left."""
        with self._lock:
            fits = num_bytes <= self.left
            self.left -= num_bytes if fits else 0
            return fits

    def describe(self) -> str:
        """Say how much is in use."""
        return f"{format_bytes(self.total - self.left)} of {format_bytes(self.total)}"


class CachedSamples:
    """Samples that stay in memory once read, while the budget lasts. `form` is raw or decoded."""

    def __init__(self, samples: Samples, form: str, view: Any, budget: Budget) -> None:
        assert form in KEPT
        self._samples, self._budget = samples, budget
        self._decoded, self._channels, self._quick = form == "decoded", view.channels, view.crop is not None
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
        size = content.image.nbytes if isinstance(content.image, np.ndarray) else len(content.image)
        # First come, first kept: replacing images would help nothing, since every epoch reads each of them once.
        if self._budget.take(size):
            self._kept[sample] = content
        return content
