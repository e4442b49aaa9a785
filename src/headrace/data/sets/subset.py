"""The first samples of a split, for short trials."""

import numpy as np

from headrace.data.sets.source import DecodingSource, Source
from headrace.data.sets.synthetic import SyntheticSource


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
