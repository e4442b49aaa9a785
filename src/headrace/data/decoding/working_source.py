"""A source whose images are decoded once, whole, to one working size, and cropped at random on the device.

An image of any shape is resized to a square. A crop keeps its place and its shape: its box is that of the streaming
source, drawn in the original image, scaled to the square in each direction. The device resizes the box
(augmentation/crop_resize.py), so the images can be kept there, or in host memory and sent.
"""

import threading

import numpy as np

from headrace.data.decoding.batch_decoder import FileBackedSamples, batch_decoder
from headrace.data.decoding.crop import CropRule, draws, random_crop
from headrace.data.decoding.image_source import DecodedBytes, ImageSource


class WorkingSource(DecodedBytes):
    """One split as whole images of the working size, and the boxes of its crops in them."""

    def __init__(self, whole: ImageSource, rule: CropRule) -> None:
        assert whole.spec.whole
        self._whole, self._rule, self.labels = whole, rule, whole.labels
        self._kept: np.ndarray | None = None
        self._decoded = np.zeros(len(whole), bool)
        self._lock = threading.Lock()

    @property
    def image_hwc(self) -> tuple[int, int, int]:
        return self._whole.image_hwc

    @property
    def original_hw(self) -> np.ndarray:
        """Return the original height and width of every image, int32 [n, 2]; 0 where it was not decoded yet."""
        return self._whole.original_hw

    def keep(self) -> None:
        """Keep images in host memory once they are decoded."""
        self._kept = np.empty((len(self), *self.image_hwc), np.uint8)  # memory is taken as it is written

    def read_into(self, indices: np.ndarray, epoch: np.ndarray | int, out: np.ndarray) -> None:
        """Write these images into `out`, the same in every epoch."""
        if self._kept is None:
            self._whole.read_into(indices, 0, out)
            return
        # A block may contain a sample twice (balanced sampling, repeated augmentation).
        missing = np.unique(indices[~self._decoded[indices]])
        if len(missing):  # two threads may decode the same image, to the same bytes
            decoded = self._whole.read(missing, 0)
            with self._lock:
                self._kept[missing] = decoded
                self._decoded[missing] = True
        # clip: with the default mode, which checks the indices, NumPy fills a copy of `out` first.
        np.take(self._kept, indices, axis=0, out=out, mode="clip")

    def boxes(self, indices: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Return the crops of these samples in pixels of the working size, float32 [n, 4]: top, left, height, width.

        The images must have been decoded: the original size decides the crop.
        """
        spec, hw = self._whole.spec, self.original_hw[indices]
        assert hw.all(), "an image is cropped before it was decoded"
        decoder = batch_decoder(self._rule, spec.seed, spec.size, spec.channels)
        samples = self._whole.samples
        objects = None, None
        if self._rule.reference and isinstance(samples, FileBackedSamples):
            places = samples.extents(indices)
            objects = places.objects, places.object_ends
        if decoder is not None:
            crops = decoder.crops(hw, indices, epochs, objects)
        else:
            ends = np.zeros(len(indices), int) if objects[1] is None else objects[1]
            known = np.split(np.empty((0, 4)) if objects[0] is None else objects[0], ends)
            crops = np.array(
                [
                    random_crop((height, width), self._rule, draws(spec.seed, epoch, sample), found.tolist())
                    for (height, width), epoch, sample, found in zip(
                        hw.tolist(), epochs.tolist(), indices.tolist(), known, strict=False
                    )
                ]
            ).reshape(-1, 4)
        # Drawn in the original image and then scaled: the same crop as the one a decoder of files would take.
        return (crops * np.tile(spec.size / hw, (1, 2))).astype(np.float32)
