"""Sources: one split of a dataset, as images by sample number."""

from typing import Protocol, runtime_checkable

import numpy as np


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
