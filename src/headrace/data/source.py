"""Sources: one split of a data set, as images by sample number."""

from typing import Protocol, runtime_checkable

import numpy as np

from headrace.data.made_up import MadeUp, made_up_images, made_up_labels

_AT_ONCE = 16  # images made together: they stay in the processor's cache, four times faster than all at once


class Source(Protocol):
    """One split. Sample `i` shows image `i % num_distinct`; only made-up sets have fewer images than samples."""

    @property
    def num_distinct(self) -> int:
        """Return how many different images there are."""
        ...

    @property
    def image_hwc(self) -> tuple[int, int, int]:
        """Return the shape of an image."""
        ...

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
    """A source whose images are worth decoding straight into the block that they are sent in."""

    def read_into(self, indices: np.ndarray, epoch: np.ndarray | int, out: np.ndarray) -> None:
        """Write the images of these samples into `out`, uint8 [n, H, W, C]; safe to call from several threads."""
        ...


class ArraySource:
    """A split that lies in memory; with `num_samples` its images are shown again and again."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, num_samples: int | None = None) -> None:
        assert images.dtype in (np.uint8, np.float32)
        assert labels.dtype == np.int32
        assert len(images) == len(labels)
        self._num_samples = len(images) if num_samples is None else num_samples
        # On the CPU a device array may share this memory: nobody may write to it.
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
        """Return the shape of an image."""
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
    """A split that the device makes for itself; the host can make the same images when it must show them."""

    def __init__(self, spec: MadeUp, num_samples: int) -> None:
        self.spec, self._num_samples = spec, num_samples
        distinct = made_up_labels(spec, np.arange(spec.num_distinct, dtype=np.uint32))
        self.labels = distinct[np.arange(num_samples) % spec.num_distinct]

    @property
    def num_distinct(self) -> int:
        """Return how many different images there are."""
        return self.spec.num_distinct

    @property
    def image_hwc(self) -> tuple[int, int, int]:
        """Return the shape of an image."""
        return self.spec.image_hwc

    @property
    def nbytes(self) -> int:
        """Return the bytes of the different images."""
        return self.num_distinct * int(np.prod(self.image_hwc))

    def __len__(self) -> int:
        return self._num_samples

    def read(self, indices: np.ndarray, epoch: np.ndarray | int) -> np.ndarray:
        """Return the images of these samples."""
        return made_up_images(self.spec, (indices % self.num_distinct).astype(np.uint32), np)


def generated_source(spec: MadeUp, num_samples: int) -> ArraySource:
    """Return a made-up split whose images the host makes now and sends like real ones."""
    numbers = np.arange(spec.num_distinct, dtype=np.uint32)
    few = np.array_split(numbers, -(-len(numbers) // _AT_ONCE))
    images = np.concatenate([made_up_images(spec, part, np) for part in few])
    return ArraySource(images, made_up_labels(spec, numbers), num_samples)
