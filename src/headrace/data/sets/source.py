"""Sources: one split of a dataset, as images by sample number."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from headrace.data.sets.samples import Samples
    from headrace.data.sets.synthetic import Synthetic

# (samples [n], epochs: one number or [n], where their images are written [n, H, W, C])
ReadInto = Callable[[np.ndarray, np.ndarray | int, np.ndarray], None]

_BYTES = np.dtype(np.uint8)


@dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """One split. Sample `i` is image `i % num_distinct`; only synthetic sets have fewer images than samples."""

    labels: np.ndarray  # of every sample: int32 [n] of classes, else a number for each output [n, C]
    image_hwc: tuple[int, int, int]
    num_distinct: int  # how many different images there are
    read_into: ReadInto  # write the images of samples into memory of `dtype`; safe to call from several threads
    dtype: np.dtype = _BYTES
    # Of a stream: told which samples of which epochs a block is about to read, before threads read them in any order.
    begin: Callable[[np.ndarray, np.ndarray], None] | None = None
    slow: bool = False  # reading an image takes long: a few at a time, by many threads
    name: Callable[[int], str] | None = None  # where a sample is stored
    samples: "Samples | None" = None  # the encoded images, where these are decoded
    synthetic: "Synthetic | None" = None  # what a device can make the images of
    # The crops of samples in these epochs, float32 [n, 4] in pixels: top, left, height, width. The device cuts them out
    # of images that were read before.
    boxes: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    original_hw: np.ndarray | None = None  # int32 [n, 2], of the images that were decoded, else 0

    def __post_init__(self) -> None:
        assert self.labels.dtype == np.int32 or self.labels.ndim == 2
        # On the CPU a device array may share this memory, so it must never be written to.
        self.labels.flags.writeable = False

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of one label."""
        return self.labels.shape[1:]

    def read(self, indices: np.ndarray, epoch: np.ndarray | int) -> np.ndarray:
        """Return the images of these samples [n, H, W, C] of `dtype`; safe to call from several threads."""
        wrong = indices[(indices < 0) | (indices >= len(self))]
        if len(wrong):
            raise IndexError(f"Sample {wrong[0]} of {len(self)}.")
        images = np.empty((len(indices), *self.image_hwc), self.dtype)
        self.read_into(indices, epoch, images)
        return images

    def first(self, num_samples: int) -> "Source":
        """Return the first samples; the split itself if it has no more."""
        if len(self) <= num_samples:
            return self
        # A device makes all different images of a synthetic set.
        distinct = self.num_distinct if self.synthetic is not None else min(num_samples, self.num_distinct)
        return replace(self, labels=self.labels[:num_samples], num_distinct=distinct)


def memory_source(images: np.ndarray, labels: np.ndarray, num_samples: int | None = None) -> Source:
    """Return a split held in memory; with `num_samples` its images are repeated up to that number."""
    assert images.dtype in (np.uint8, np.float32)
    assert len(images) == len(labels)
    count = len(images) if num_samples is None else num_samples
    height, width, channels = images.shape[1:]
    # Of other memory than rows one after the other NumPy would take a whole copy first, each time.
    in_rows = images.flags.c_contiguous and images.flags.aligned

    def read_into(indices: np.ndarray, _epoch: np.ndarray | int, out: np.ndarray) -> None:
        if len(images) < count:
            indices = indices % len(images)
        if in_rows:
            take(images, indices, out)
        else:
            out[...] = images[indices]

    return Source(
        labels=labels[np.arange(count) % len(labels)] if len(images) < count else labels[:count].view(),
        image_hwc=(height, width, channels),
        num_distinct=len(images),
        read_into=read_into,
        dtype=images.dtype,
    )


def kept(source: Source) -> Source:
    """Return the source with its images, the same in every epoch, kept in host memory once they have been read."""
    images = np.empty((len(source), *source.image_hwc), source.dtype)  # memory is taken as it is written
    is_read, lock = np.zeros(len(source), bool), threading.Lock()

    def read_into(indices: np.ndarray, _epoch: np.ndarray | int, out: np.ndarray) -> None:
        # A block may contain a sample twice (balanced sampling, repeated augmentation).
        missing = np.unique(indices[~is_read[indices]])
        if len(missing):  # two threads may read the same image, to the same bytes
            read = source.read(missing, 0)
            with lock:
                images[missing] = read
                is_read[missing] = True
        take(images, indices, out)

    return replace(source, read_into=read_into)


def take(images: np.ndarray, indices: np.ndarray, out: np.ndarray) -> None:
    """Copy these rows into `out`."""
    # clip: with the default mode, which checks the indices, NumPy fills a copy of `out` first.
    np.take(images, indices, axis=0, out=out, mode="clip")
