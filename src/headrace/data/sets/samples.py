"""Samples: the encoded images of one split by number, however they are stored, and caches of them in memory.

Caching never changes a view: with the cache of decoded images every image is decoded whole, also the first time.
"""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace.data.decoding.batch_decoder import FileExtents
from headrace.data.decoding.image import BadImage
from headrace.data.decoding.limits import refuse_large_file

Boxes = Sequence[tuple[float, float, float, float]]  # top, left, bottom, right of objects, from 0 to 1


class Content(NamedTuple):
    """A sample's image, encoded or as uint8 [h, w, C] pixels, and the boxes of the objects in it, where known."""

    image: Any  # bytes or np.ndarray
    boxes: Boxes = ()

    @property
    def num_bytes(self) -> int:
        """Return the size of the image as it is."""
        return self.image.nbytes if isinstance(self.image, np.ndarray) else len(self.image)


class Samples(Protocol):
    """One split as encoded images. Every method is safe to call from several threads."""

    @property
    def labels(self) -> np.ndarray:
        """Return the label of every sample: int32 [n] of classes, else a number for each output, [n, C]."""
        ...

    def __len__(self) -> int: ...

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
    refuse_large_file(size)
    data = os.read(handle, size + 1)
    while len(data) < size and (more := os.read(handle, size + 1 - len(data))):
        data += more
    return data


def of_dtype(labels: np.ndarray) -> np.ndarray:
    """Return numbers of classes as int32, other labels as they are."""
    return labels.astype(np.int32) if labels.ndim == 1 else labels


class FileSamples:
    """Images that are each a file."""

    def __init__(self, root: Path, files: Sequence[str], labels: np.ndarray) -> None:
        assert len(files) == len(labels)
        self._root, self._files, self.labels = str(root).rstrip("/"), files, of_dtype(labels)

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
