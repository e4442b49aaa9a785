"""A source whose images are decoded once, whole, to one working size, and cropped at random on the device.

An image of any shape is resized to a square. A crop keeps its place and its shape: its box is that of the streaming
source, drawn in the original image, scaled to the square in each direction. The device resizes the box
(augmentation/crop_resize.py), so the images can be kept there, or in host memory and sent.
"""

from dataclasses import replace

import numpy as np

from headrace.data.decoding.batch_decoder import FileBackedSamples, batch_decoder
from headrace.data.decoding.crop import CropRule, draws, random_crop
from headrace.data.decoding.image_source import ViewSpec, decoded_source
from headrace.data.sets.bad_samples import BadSamples
from headrace.data.sets.samples import Samples
from headrace.data.sets.source import Source


def working_source(samples: Samples, whole: ViewSpec, split: str, bad: BadSamples, rule: CropRule) -> Source:
    """Return one split as whole images of the working size, and the boxes of its crops in them."""
    assert whole.whole
    source = decoded_source(samples, whole, split, bad)
    original_hw = source.original_hw
    assert original_hw is not None

    def boxes(indices: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Return the crops of images that have been decoded: the original size decides the crop."""
        hw = original_hw[indices]
        assert hw.all(), "an image is cropped before it was decoded"
        decoder = batch_decoder(rule, whole.seed, whole.size, whole.channels)
        objects = None, None
        if rule.reference and isinstance(samples, FileBackedSamples):
            places = samples.extents(indices)
            objects = places.objects, places.object_ends
        if decoder is not None:
            crops = decoder.crops(hw, indices, epochs, objects)
        else:
            ends = np.zeros(len(indices), int) if objects[1] is None else objects[1]
            known = np.split(np.empty((0, 4)) if objects[0] is None else objects[0], ends)
            crops = np.array(
                [
                    random_crop((height, width), rule, draws(whole.seed, epoch, sample), found.tolist())
                    for (height, width), epoch, sample, found in zip(
                        hw.tolist(), epochs.tolist(), indices.tolist(), known, strict=False
                    )
                ]
            ).reshape(-1, 4)
        # Drawn in the original image and then scaled: the same crop as the one a decoder of files would take.
        return (crops * np.tile(whole.size / hw, (1, 2))).astype(np.float32)

    return replace(source, boxes=boxes)
