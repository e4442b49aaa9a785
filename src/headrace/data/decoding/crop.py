"""Where to crop: random boxes addressed by (seed, epoch, sample) for training, the centre for evaluation.

The draws are `core.rng.bits` of the address, written for single whole numbers: an image needs a handful, and for so
few NumPy would take ten times as long, with the interpreter lock held.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.core.rng import GOLDEN, M1, M2, name_id
from headrace.data.decoding.resize import Box, View

_MASK = 0xFFFFFFFF
_GOLDEN, _M1, _M2 = map(int, (GOLDEN, M1, M2))  # Python's numbers do not wrap around: the mask does that
PURPOSE = name_id("random resized crop")
MIN_CROPPED = 96  # images of a smaller side are not cropped: there is too little of them to spare


@dataclass(frozen=True, kw_only=True)
class CropRule:
    """How training crops are drawn."""

    area: tuple[float, float]  # of the image
    aspect: tuple[float, float]  # width to height
    reference: bool  # TensorFlow's sampler, which takes object boxes into account; else torchvision's


CROP_RULES = {
    "reference": CropRule(area=(0.05, 1.0), aspect=(0.75, 1.33), reference=True),
    "torchvision": CropRule(area=(0.08, 1.0), aspect=(3 / 4, 4 / 3), reference=False),
}
# At drawing a box that fits, as in the two libraries.
ATTEMPTS = {True: 100, False: 10}
MIN_COVERED = 0.1  # of an object's box, or of the whole image where none is known


def mix(h: int) -> int:
    """Scramble a 32-bit number as `core.rng.mix` does."""
    h ^= h >> 16
    h = h * _M1 & _MASK
    h ^= h >> 13
    h = h * _M2 & _MASK
    return h ^ h >> 16


def draws(seed: int, epoch: int, sample: int) -> Iterator[float]:
    """Yield numbers in [0, 1): draw k is bits(seed, epoch, sample, purpose, k) / 2^32."""
    h = 0
    for part in (seed, epoch, sample, PURPOSE):
        h = mix((h ^ (part & _MASK)) * _GOLDEN + _GOLDEN & _MASK)
    k = 0
    while True:
        yield mix((h ^ k) * _GOLDEN + _GOLDEN & _MASK) / 2**32
        k += 1


def random_crop(hw: tuple[int, int], rule: CropRule, draw: Iterator[float], boxes: Sequence[tuple] = ()) -> Box:
    """Return a training crop of an image; `boxes` are (top, left, bottom, right) of its objects, from 0 to 1."""
    for _ in range(ATTEMPTS[rule.reference]):
        box = _reference_box(hw, rule, draw) if rule.reference else _torchvision_box(hw, rule, draw)
        if box is not None and (not rule.reference or _covers(hw, box, boxes)):
            return box
    # What each library does when all attempts fail.
    return (0, 0, *hw) if rule.reference else _centre_box(hw, rule)


def usual_shorter_side(size: int) -> int:
    """Return the shorter side to which images are resized for a centre crop of this side, as is usual for ImageNet."""
    return size * 256 // 224


def uncropped_side(size: int) -> int | None:
    """Return the shorter side for images that are too small to crop; None for others, which have the usual one."""
    return size if size < MIN_CROPPED else None


def valid_view(hw: tuple[int, int], size: int, shorter: int | None = None) -> View:
    """Return the view of evaluation: the shorter side becomes `shorter`, then the centre is cropped."""
    shorter = shorter or usual_shorter_side(size)
    # Rounded as torchvision and timm do, down and then to an even offset: published weights were measured with that.
    least = min(hw)
    height, width = (side * shorter // least for side in hw)
    return View((0, 0, *hw), (height, width), (round((height - size) / 2), round((width - size) / 2)))


def _torchvision_box(hw: tuple[int, int], rule: CropRule, draw: Iterator[float]) -> Box | None:
    height, width = hw
    area = height * width * _between(rule.area, next(draw))
    low, high = (math.log(limit) for limit in rule.aspect)
    aspect = math.exp(low + (high - low) * next(draw))
    down, right = next(draw), next(draw)
    # Both places are drawn before it is known whether the box fits: C and Python then use up the same draws in every
    # attempt.
    w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
    if not (0 < w <= width and 0 < h <= height):
        return None
    return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w


def _reference_box(hw: tuple[int, int], rule: CropRule, draw: Iterator[float]) -> Box | None:
    """Draw the aspect, then the height from those whose area is in range, then the place."""
    height, width = hw
    aspect = _between(rule.aspect, next(draw))
    least, most = (limit * height * width for limit in rule.area)
    lowest = round(math.sqrt(least / aspect))
    highest = min(round(math.sqrt(most / aspect)), int((width + 0.4999999) / aspect), height)
    lowest = min(lowest, highest)
    h = lowest + int(next(draw) * (highest - lowest + 1))
    down, right = next(draw), next(draw)
    if round(h * aspect) * h < least:
        h += 1  # so that a rounding error does not fail the attempt
    if round(h * aspect) * h > most:
        h -= 1
    w = round(h * aspect)
    if not (least <= w * h <= most and 0 < w <= width and 0 < h <= height):
        return None
    return int(down * (height - h)), int(right * (width - w)), h, w


def _covers(hw: tuple[int, int], box: Box, boxes: Sequence[tuple]) -> bool:
    """Say whether the crop covers enough of at least one object."""
    top, left, h, w = box
    for object_top, object_left, object_bottom, object_right in boxes or ((0.0, 0.0, 1.0, 1.0),):
        y0, x0, y1, x1 = object_top * hw[0], object_left * hw[1], object_bottom * hw[0], object_right * hw[1]
        common = max(0.0, min(top + h, y1) - max(top, y0)) * max(0.0, min(left + w, x1) - max(left, x0))
        if common >= MIN_COVERED * (y1 - y0) * (x1 - x0) and common > 0:
            return True
    return False


def _centre_box(hw: tuple[int, int], rule: CropRule) -> Box:
    """Return as much of the centre as the aspects allow."""
    height, width = hw
    aspect = width / height
    if aspect < rule.aspect[0]:
        height = min(height, round(width / rule.aspect[0]))
    elif aspect > rule.aspect[1]:
        width = min(width, round(height * rule.aspect[1]))
    return (hw[0] - height) // 2, (hw[1] - width) // 2, height, width


def _between(limits: tuple[float, float], fraction: float) -> float:
    return limits[0] + (limits[1] - limits[0]) * fraction
