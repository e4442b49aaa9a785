"""A set of images that has been listed: its classes and its two splits."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headrace.data.decoding.image import BadImage, read_header
from headrace.data.sets.samples import Samples

_NUM_SIZED = 64  # images whose sizes decide the network's input size


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """A set of images: its path, its classes and its two splits."""

    kind: str
    place: str
    class_names: tuple[str, ...]
    train: Samples
    validation: Samples
    split_by: str = ""  # how the splits were separated
    remarks: tuple[str, ...] = ()  # what the user should know, such as files that are not read

    @cached_property
    def typical_side(self) -> int:
        """The median of the shorter sides of some images, so that a few very large ones do not decide; 0 for none."""
        samples = self.train if len(self.train) else self.validation
        count, sides = len(samples), []
        # Spread over the set: the first ones may all be of one class.
        for sample in np.unique(np.linspace(0, count - 1, min(count, _NUM_SIZED)).astype(int)).tolist():
            try:
                encoded = samples.content(sample).image
                header = None if isinstance(encoded, np.ndarray) else read_header(encoded)
            except BadImage:
                continue
            sides.append(min(encoded.shape[:2]) if header is None else min(header.height, header.width))
        return int(np.median(sides)) if sides else 0
