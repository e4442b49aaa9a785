"""Crops: the draws are the addressed ones, boxes keep their ranges, and evaluation cuts out the centre."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from headrace.core.rng import bits, name_id
from headrace.data.decoding.crop import CROP_RULES, CropRule, draws, random_crop, valid_view

SIZES = [(375, 500), (500, 333), (224, 224), (90, 1200), (31, 17)]


def test_the_draws_are_the_addressed_bits() -> None:
    for seed, epoch, sample in [(0, 0, 0), (7, 3, 1_281_166), (2**32 - 1, 89, 12345)]:
        mine = list(itertools.islice(draws(seed, epoch, sample), 12))
        purpose = name_id("random resized crop")
        theirs = [float(bits(seed, epoch, sample, purpose, k)[0]) / 2**32 for k in range(12)]
        assert mine == theirs
        assert 0 <= min(mine) <= max(mine) < 1


@pytest.mark.parametrize("name", CROP_RULES)
@pytest.mark.parametrize("hw", SIZES)
def test_boxes_are_inside_and_within_their_ranges(name: str, hw: tuple[int, int]) -> None:
    rule = CROP_RULES[name]
    whole = 0
    for sample in range(300):
        top, left, height, width = random_crop(hw, rule, draws(1, 0, sample))
        assert 0 <= top <= top + height <= hw[0]
        assert 0 <= left <= left + width <= hw[1]
        if (height, width) == hw or hw == (90, 1200):
            whole += 1  # the whole image, or torchvision's centre, when nothing fits
            continue
        slack = 1 / min(height, width)
        area = height * width / (hw[0] * hw[1])
        assert rule.area[0] - 2 * slack <= area <= rule.area[1] + 2 * slack
        assert rule.aspect[0] - 2 * slack <= width / height <= rule.aspect[1] + 2 * slack
    assert whole < 300 or hw == (90, 1200)


def test_torchvision_areas_are_uniform_and_aspects_log_uniform() -> None:
    """A square image and a range whose every box fits: nothing is drawn again, so the moments are the uniform's."""
    rule = CropRule(area=(0.1, 0.5), aspect=(3 / 4, 4 / 3), reference=False)
    boxes = np.array([random_crop((2000, 2000), rule, draws(0, 0, sample)) for sample in range(4000)])
    area = boxes[:, 2] * boxes[:, 3] / 4e6
    assert area.mean() == pytest.approx(0.3, abs=4 * 0.4 / math.sqrt(12 * 4000))
    logs = np.log(boxes[:, 3] / boxes[:, 2])
    width = 2 * math.log(4 / 3)
    assert logs.mean() == pytest.approx(0, abs=4 * width / math.sqrt(12 * 4000))
    assert logs.std() == pytest.approx(width / math.sqrt(12), rel=0.05)
    place = boxes[:, 0] / (2000 - boxes[:, 2])
    assert place.mean() == pytest.approx(0.5, abs=4 / math.sqrt(12 * 4000))


@pytest.mark.parametrize(("name", "reaches_the_end"), [("torchvision", True), ("reference", False)])
def test_every_offset_is_drawn_as_often_as_any_other(name: str, reaches_the_end: bool) -> None:
    """Count the offsets of equal boxes: torchvision draws from all that fit, TensorFlow's sampler never the last one.

    (Its random number excludes the end of its range, which is the difference of the sizes.)
    """
    rule = replace(CROP_RULES[name], area=(0.25, 0.25), aspect=(1.0, 1.0))
    boxes = np.array([random_crop((12, 12), rule, draws(5, 0, sample)) for sample in range(7000)])
    assert (boxes[:, 2:] == 6).all()
    possible = 12 - 6 + reaches_the_end
    for offsets in boxes[:, :2].T:
        counts = np.bincount(offsets, minlength=possible)
        assert len(counts) == possible
        expected = len(boxes) / possible
        assert np.abs(counts - expected).max() < 4.5 * math.sqrt(expected)


def test_the_reference_keeps_a_tenth_of_an_object() -> None:
    """Independent count of what each crop covers; without boxes the object is the whole image."""
    hw, rule = (400, 600), CROP_RULES["reference"]
    object_box = (0.6, 0.7, 0.9, 0.95)  # 120 x 150 pixels at the lower right
    mask = np.zeros(hw, bool)
    mask[240:360, 420:570] = True
    for sample in range(200):
        top, left, height, width = random_crop(hw, rule, draws(5, 2, sample), [object_box])
        assert mask[top : top + height, left : left + width].sum() >= 0.1 * mask.sum() - 1
        top, left, height, width = random_crop(hw, rule, draws(5, 2, sample))
        assert height * width >= 0.1 * 400 * 600 - 1


def test_a_crop_depends_on_seed_epoch_and_sample_alone() -> None:
    rule = CROP_RULES["torchvision"]
    seen = {
        random_crop((375, 500), rule, draws(seed, epoch, sample))
        for seed, epoch, sample in itertools.product(range(3), range(3), range(3))
    }
    assert len(seen) == 27
    assert random_crop((375, 500), rule, draws(2, 1, 0)) in seen


def test_what_does_not_fit_falls_back() -> None:
    tall = CropRule(area=(0.9, 1.0), aspect=(3 / 4, 4 / 3), reference=False)
    assert random_crop((100, 1000), tall, draws(0, 0, 0)) == (0, (1000 - 133) // 2, 100, 133)
    assert random_crop((1000, 100), tall, draws(0, 0, 0)) == ((1000 - 133) // 2, 0, 133, 100)
    assert random_crop((100, 1000), CropRule(area=(0.9, 1.0), aspect=(0.75, 1.33), reference=True), draws(0, 0, 0)) == (
        0,
        0,
        100,
        1000,
    )


@pytest.mark.parametrize(("size", "shorter"), [(224, 256), (380, 434), (32, 36)])
def test_evaluation_resizes_the_shorter_side_and_cuts_out_the_centre(size: int, shorter: int) -> None:
    view = valid_view((375, 500), size)
    assert view.crop == (0, 0, 375, 500)
    assert view.resized_hw == (shorter, int(500 * shorter / 375))
    assert view.offset == ((shorter - size) // 2, (view.resized_hw[1] - size) // 2)
    assert valid_view((500, 375), size).resized_hw == view.resized_hw[::-1]
    assert valid_view((375, 500), size, 400).resized_hw[0] == 400


def test_evaluation_rounds_as_torchvision_does() -> None:
    """Its Resize(235) of 192x285 pixels gives 235x348, and its CenterCrop(224) begins at row 6 (5.5) and column 62."""
    view = valid_view((192, 285), 224, 235)
    assert (view.resized_hw, view.offset) == ((235, 348), (6, 62))


@pytest.mark.parametrize("name", CROP_RULES)
def test_every_offset_that_is_possible_occurs_and_none_outside(name: str) -> None:
    """Brute force in a small image: torchvision's offsets include the last one, TensorFlow's do not."""
    hw, found = (6, 7), {}
    for sample in range(6000):
        top, left, height, width = random_crop(hw, CROP_RULES[name], draws(2, 1, sample))
        found.setdefault((height, width), []).append((top, left))
    tried = 0
    for (height, width), offsets in found.items():
        spare = hw[0] - height, hw[1] - width
        counts = [max(1, side + (name == "torchvision")) for side in spare]
        if len(offsets) < 20 * counts[0] * counts[1] or (height, width) == hw:
            continue  # too few to have met every offset
        tried += min(spare) > 0
        assert {*offsets} == {*itertools.product(range(counts[0]), range(counts[1]))}, (height, width)
    assert tried >= 3
