"""Samples: the encoded pictures of one split by number, however they are stored."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace.data.picture import BadPicture
from headrace.data.show_chunk import Places

Boxes = Sequence[tuple[float, float, float, float]]  # top, left, bottom, right of objects, from 0 to 1


class Content(NamedTuple):
    """A sample's picture, encoded or as uint8 [h, w, C] pixels, and the objects that are known in it."""

    picture: Any
    boxes: Boxes = ()


class Samples(Protocol):
    """One split as encoded pictures. Every method is safe to call from several threads."""

    @property
    def labels(self) -> np.ndarray:
        """Return the label of every sample, int32."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def content(self, sample: int) -> Content:
        """Return a sample's picture and what is known of it; BadPicture where it cannot be had."""
        ...

    def name(self, sample: int) -> str:
        """Return where a sample is stored, for people."""
        ...


def read_all(handle: int) -> bytes:
    """Return what an open file has."""
    size = os.fstat(handle).st_size
    data = os.read(handle, size + 1)
    while len(data) < size and (more := os.read(handle, size + 1 - len(data))):
        data += more
    return data


class FileSamples:
    """Pictures that are files of their own."""

    def __init__(self, root: Path, files: Sequence[str], labels: np.ndarray) -> None:
        assert len(files) == len(labels)
        self._root, self._files, self.labels = str(root), files, labels.astype(np.int32)

    def __len__(self) -> int:
        return len(self._files)

    def content(self, sample: int) -> Content:
        """Return the file's bytes."""
        try:
            handle = os.open(self.name(sample), os.O_RDONLY)  # a file object costs more than the reading
            try:
                return Content(read_all(handle))
            finally:
                os.close(handle)
        except OSError as error:
            raise BadPicture(f"cannot be read: {error.strerror or error}") from None

    def places(self, samples: np.ndarray) -> Places:
        """Return where these pictures lie: each is a whole file."""
        none = np.full(len(samples), -1, np.int64)
        return Places([os.fsencode(self.name(sample)) for sample in samples.tolist()], np.zeros_like(none), none, none)

    def name(self, sample: int) -> str:
        """Return the file's path."""
        return f"{self._root}/{self._files[sample]}"


class ObjectSamples:
    """Pictures that a Python object gives: `len(it)` samples, `it.get(i)` (or `it[i]`) a picture and its label.

    A picture is encoded bytes, or pixels as uint8 [h, w] or [h, w, C].
    """

    def __init__(self, source: Any, labels: np.ndarray | None = None) -> None:
        self._get = source.get if hasattr(source, "get") else source.__getitem__
        found = [self._get(number)[1] for number in range(len(source))] if labels is None else labels
        self.labels = np.asarray(found).astype(np.int32)

    def __len__(self) -> int:
        return len(self.labels)

    def content(self, sample: int) -> Content:
        """Return what the object gives."""
        picture = self._get(sample)[0]
        if isinstance(picture, bytes | bytearray | memoryview):
            return Content(bytes(picture))
        pixels = np.asarray(picture)
        if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
            raise BadPicture(f"an array of {pixels.dtype} {list(pixels.shape)}, not uint8 [height, width, channels]")
        return Content(pixels if pixels.ndim == 3 else pixels[:, :, None])

    def name(self, sample: int) -> str:
        """Return the sample's number."""
        return f"sample {sample:,}"
