"""One split of a dataset by sample number: encoded samples, caches of them, and sources of images."""

import os
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from headrace.core.rng import HostOrDevice, array_module, bits, name_id
from headrace.data.decoding.image import BadImage, decode, read_header
from headrace.data.decoding.jpeg import FileExtents
from headrace.data.decoding.limits import refuse_large_file

# Samples: the encoded images of one split by number, however they are stored, and caches of them in memory.
#
# Caching never changes a view: with the cache of decoded images every image is decoded whole, also the first time.


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
        """Return the label of every sample, int32."""
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


# Caching in memory, encoded or decoded, within a budget


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


# Sources: one split of a dataset, as images by sample number; synthetic data; the first samples of a split.
#
# `generated` images are made on the host and sent like real ones; `synthetic` ones are made on the device and cost no
# host traffic. There are at most 1,024 different images, used repeatedly, so that making them never limits a run.


# Synthetic data: random bytes, a pure function of (seed, split, image), the same on host and device


MAX_DISTINCT = 1024


def distinct_images(num_samples: int, image_bytes: int, budget_bytes: int) -> int:
    """Return how many different images to make, at most what fits a quarter of the device budget."""
    return max(1, min(num_samples, MAX_DISTINCT, budget_bytes // (4 * image_bytes)))


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """What determines the images and labels of a synthetic split."""

    seed: int
    split: str
    image_hwc: tuple[int, int, int]
    num_classes: int
    num_distinct: int


def synthetic_images(spec: Synthetic, numbers: HostOrDevice) -> Any:
    """Return the images of these numbers (uint32 [n]) as uint8 [n, H, W, C], where the numbers are."""
    xp = array_module(numbers)
    size = int(np.prod(spec.image_hwc))
    num_words = -(-size // 4)
    # Four bytes from each word of random bits: a quarter of the hashing.
    address = numbers[:, None] * np.uint32(num_words) + xp.arange(num_words, dtype=np.uint32)[None, :]
    # "made up" is part of the address of the bits: another name would change every image and label
    words = bits(spec.seed, name_id(f"made up/{spec.split}/images"), address.reshape(-1))
    shifts = xp.arange(0, 32, 8, dtype=np.uint32)
    each_byte = (words[:, None] >> shifts[None, :]).astype(np.uint8)
    return each_byte.reshape(len(numbers), num_words * 4)[:, :size].reshape(len(numbers), *spec.image_hwc)


def synthetic_labels(spec: Synthetic, numbers: HostOrDevice) -> Any:
    """Return the labels of the images of these numbers, int32 [n]."""
    draw = bits(spec.seed, name_id(f"made up/{spec.split}/labels"), numbers)
    return (draw % np.uint32(spec.num_classes)).astype(np.int32)


_AT_ONCE = 16  # images made together: they stay in the processor's cache, four times faster than all at once


class Source(Protocol):
    """One split. Sample `i` is image `i % num_distinct`; only synthetic sets have fewer images than samples."""

    @property
    def num_distinct(self) -> int:
        """Return how many different images there are."""
        ...

    @property
    def image_hwc(self) -> tuple[int, int, int]: ...

    @property
    def labels(self) -> np.ndarray:
        """Return the label of every sample, int32."""
        ...

    @property
    def nbytes(self) -> int:
        """Return the bytes of all different images."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def read(self, indices: np.ndarray, epoch: np.ndarray | int) -> np.ndarray:
        """Return the images of these samples [n, H, W, C], uint8 or float32; safe to call from several threads."""
        ...


@runtime_checkable
class DecodingSource(Source, Protocol):
    """A source that can decode images directly into the block that is sent."""

    def read_into(self, indices: np.ndarray, epoch: np.ndarray | int, out: np.ndarray) -> None:
        """Write the images of these samples into `out`, uint8 [n, H, W, C]; safe to call from several threads."""
        ...


class ArraySource:
    """A split held in memory; with `num_samples` its images are repeated up to that number."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, num_samples: int | None = None) -> None:
        assert images.dtype in (np.uint8, np.float32)
        assert labels.dtype == np.int32
        assert len(images) == len(labels)
        self._num_samples = len(images) if num_samples is None else num_samples
        # On the CPU a device array may share this memory, so it must never be written to.
        self._images = images.view()
        self._images.flags.writeable = False
        self.labels = labels[np.arange(self._num_samples) % len(labels)]
        self.labels.flags.writeable = False

    @property
    def num_distinct(self) -> int:
        """Return how many different images there are."""
        return len(self._images)

    @property
    def image_hwc(self) -> tuple[int, int, int]:
        height, width, channels = self._images.shape[1:]
        return height, width, channels

    @property
    def nbytes(self) -> int:
        """Return the bytes of all images."""
        return self._images.nbytes

    def __len__(self) -> int:
        return self._num_samples

    def read(self, indices: np.ndarray, epoch: np.ndarray | int) -> np.ndarray:
        """Return the images of these samples; an array does not change with the epoch."""
        if len(self._images) < self._num_samples:
            indices = indices % len(self._images)
        return self._images[indices]


class SyntheticSource:
    """A split generated on the device; the host can generate the same images when it needs them."""

    def __init__(self, spec: Synthetic, num_samples: int) -> None:
        self.spec, self._num_samples = spec, num_samples
        distinct = synthetic_labels(spec, np.arange(spec.num_distinct, dtype=np.uint32))
        self.labels = distinct[np.arange(num_samples) % spec.num_distinct]

    @property
    def num_distinct(self) -> int:
        """Return how many different images there are."""
        return self.spec.num_distinct

    @property
    def image_hwc(self) -> tuple[int, int, int]:
        return self.spec.image_hwc

    @property
    def nbytes(self) -> int:
        """Return the bytes of the different images."""
        return self.num_distinct * int(np.prod(self.image_hwc))

    def __len__(self) -> int:
        return self._num_samples

    def read(self, indices: np.ndarray, epoch: np.ndarray | int) -> np.ndarray:
        """Return the images of these samples."""
        return synthetic_images(self.spec, (indices % self.num_distinct).astype(np.uint32))


def generated_source(spec: Synthetic, num_samples: int) -> ArraySource:
    """Return a synthetic split whose images the host generates now and sends like real ones."""
    numbers = np.arange(spec.num_distinct, dtype=np.uint32)
    chunks = np.array_split(numbers, -(-len(numbers) // _AT_ONCE))
    images = np.concatenate([synthetic_images(spec, part) for part in chunks])
    return ArraySource(images, synthetic_labels(spec, numbers), num_samples)


# The first samples of a split, for short trials


class SubsetSamples:
    """The first `num_samples` samples of a source."""

    def __init__(self, source: Source, num_samples: int) -> None:
        self._source, self._num_samples = source, num_samples
        self.labels = source.labels[:num_samples]

    @property
    def num_distinct(self) -> int:
        """Return how many different images there are."""
        return min(self._num_samples, self._source.num_distinct)

    @property
    def image_hwc(self) -> tuple[int, int, int]:
        return self._source.image_hwc

    @property
    def nbytes(self) -> int:
        """Return the bytes of the different images."""
        return self._source.nbytes // max(1, self._source.num_distinct) * self.num_distinct

    def __len__(self) -> int:
        return self._num_samples

    def read(self, indices: np.ndarray, epoch: np.ndarray | int) -> np.ndarray:
        """Return the images of these samples."""
        return self._source.read(indices, epoch)


class SubsetDecoded(SubsetSamples):
    """The first samples of a source that decodes directly into a block."""

    def __init__(self, source: DecodingSource, num_samples: int) -> None:
        super().__init__(source, num_samples)
        self._decoding = source

    def read_into(self, indices: np.ndarray, epoch: np.ndarray | int, out: np.ndarray) -> None:
        """Write the images of these samples into `out`."""
        self._decoding.read_into(indices, epoch, out)


def first_samples(source: Source, num_samples: int) -> Source:
    """Return the first samples of a split; the split itself if it has no more."""
    if len(source) <= num_samples:
        return source
    if isinstance(source, SyntheticSource):
        return SyntheticSource(source.spec, num_samples)
    if isinstance(source, DecodingSource):
        return SubsetDecoded(source, num_samples)
    return SubsetSamples(source, num_samples)
