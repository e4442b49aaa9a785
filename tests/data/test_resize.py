"""Resizing: antialiased, it is Pillow's to the bit, with either pass first; plain it is the four-neighbour formula."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from PIL import Image

from headrace.data.decoding import resize
from headrace.data.decoding.crop import CROP_RULES
from headrace.data.decoding.image_source import ViewSpec
from headrace.data.decoding.resize import Resampling, View, resize_view

RNG = np.random.default_rng(4)
NOISE = RNG.integers(0, 256, (120, 170, 3)).astype(np.uint8)
CROPS = [(0, 0, 120, 170), (10, 20, 64, 64), (3, 5, 100, 33), (7, 9, 20, 31), (0, 0, 1, 1), (119, 0, 1, 170)]


EVERY_WAY = tuple(product((False, True), ("across", "down", "quick")))  # bicubic, which pass comes first
METHODS = {False: Image.Resampling.BILINEAR, True: Image.Resampling.BICUBIC}


def pillow(pixels: np.ndarray, crop: tuple[int, ...], hw: tuple[int, int], way: tuple[bool, str] | None = None):
    """Resize as Pillow does, in one call, or in one for each pass: quick is downwards first if it shrinks downwards."""
    top, left, height, width = crop
    image, bicubic = Image.fromarray(pixels).crop((left, top, left + width, top + height)), way is not None and way[0]
    if way is not None:
        down = way[1] == "down" or (way[1] == "quick" and hw[0] < height)
        image = image.resize((width, hw[0]) if down else (hw[1], height), METHODS[bicubic])
    return np.asarray(image.resize((hw[1], hw[0]), METHODS[bicubic]))


def is_across_first(height: int, width: int, hw: tuple[int, int]) -> bool:
    """Say whether every version of Pillow resizes across first; 13 turns it round where the height loses most."""
    return height <= hw[0] or height - hw[0] <= 2 * (width - hw[1])


@pytest.fixture(params=["compiled", "Pillow"], autouse=True)
def resizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Resize with the compiled resizer, where it was built, and without."""
    if request.param == "Pillow":
        monkeypatch.setattr(resize, "native_resize", lambda: None)
    elif resize.native_resize() is None:
        pytest.skip("not compiled")
    return request.param


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("hw", [(64, 64), (48, 50), (150, 9)])
def test_antialiased_resizing_is_pillows(crop: tuple[int, int, int, int], hw: tuple[int, int]) -> None:
    for way in EVERY_WAY:
        how = Resampling(bicubic=way[0], first=way[1])
        out = np.empty((*hw, 3), np.uint8)
        resize_view(NOISE, View(crop, hw), out, how)
        assert (out == pillow(NOISE, crop, hw, way)).all(), way
        grey = np.empty((*hw, 1), np.uint8)
        resize_view(NOISE[:, :, :1], View(crop, hw), grey, how)
        assert (grey[:, :, 0] == pillow(NOISE[:, :, 0], crop, hw, way)).all(), way
    out = np.empty((*hw, 3), np.uint8)
    resize_view(NOISE, View(crop, hw), out)
    assert np.abs(out.astype(int) - pillow(NOISE, crop, hw)).max() <= 1, "in whatever order Pillow's version works"


@pytest.mark.parametrize("bicubic", [False, True])
def test_one_call_of_pillow_is_the_same(bicubic: bool) -> None:
    """Extremes: noise of black and white, whose overshoot is clipped between the passes, lines, a chequerboard."""
    rng, count = np.random.default_rng(7), 0
    hard = np.where(rng.random((200, 260, 3)) < 0.5, 0, 255).astype(np.uint8)
    lines = np.zeros_like(hard)
    lines[:, 131], lines[77] = 255, 255
    board = (np.indices((200, 260)).sum(0)[..., None] % 2 * np.array([255, 128, 3])).astype(np.uint8)
    for pixels in (hard, lines, board):
        for _ in range(40):
            height, width, shorter = (int(side) for side in rng.integers(2, 200, 3))
            hw = height * shorter // min(height, width), width * shorter // min(height, width)  # as in evaluation
            if max(hw) > 400 or not is_across_first(height, width, hw):
                continue
            image = Image.fromarray(pixels[:height, :width])
            out = np.empty((*hw, 3), np.uint8)
            resize_view(pixels[:height, :width], View((0, 0, height, width), hw), out, Resampling(bicubic=bicubic))
            assert (out == np.asarray(image.resize((hw[1], hw[0]), METHODS[bicubic]))).all(), (height, width, hw)
            count += 1
    assert count > 60


def test_the_order_of_the_passes_shows_where_bicubic_overshoots() -> None:
    """So that the tests above would notice the other order: by 15 levels and more, bilinear by one."""
    hard = np.where(np.random.default_rng(8).random((120, 170, 3)) < 0.5, 0, 255).astype(np.uint8)
    for bicubic, least, most in ((False, 1, 1), (True, 15, 255)):
        across, down = np.empty((2, 60, 85, 3), np.uint8)
        resize_view(hard, View((0, 0, 120, 170), (60, 85)), across, Resampling(bicubic=bicubic))
        resize_view(hard, View((0, 0, 120, 170), (60, 85)), down, Resampling(bicubic=bicubic, first="down"))
        assert least <= np.abs(across.astype(int) - down).max() <= most


def test_many_sizes_of_both_resizers_are_pillows() -> None:
    rng = np.random.default_rng(1)
    for number in range(300):
        height, width, new_height, new_width = (int(side) for side in rng.integers(1, 110, 4))
        if number % 10 == 0:  # a side that keeps its length is not resized, and its other side is
            new_width = width
        crop = (int(rng.integers(0, 121 - height)), int(rng.integers(0, 171 - width)), height, width)
        top, left = int(rng.integers(0, new_height)), int(rng.integers(0, new_width))
        out = np.empty(
            (int(rng.integers(1, new_height - top + 1)), int(rng.integers(1, new_width - left + 1)), 3), np.uint8
        )
        way = EVERY_WAY[number % len(EVERY_WAY)]
        view = View(crop, (new_height, new_width), (top, left))
        resize_view(NOISE, view, out, Resampling(bicubic=way[0], first=way[1]))
        want = pillow(NOISE, crop, (new_height, new_width), way)[top : top + out.shape[0], left : left + out.shape[1]]
        assert (out == want).all(), (way, view)


def test_pixels_that_a_crop_divides_are_weighted_as_pillow_does() -> None:
    """Pillow's `box` in the pixels that the crop touches: the result is the same to the bit, pass by pass."""
    rng = np.random.default_rng(2)
    for number in range(90):
        y0, x0 = rng.integers(0, 40 * 8, 2) / 8
        height, width = rng.integers(4, 78 * 8, 2) / 8
        hw = int(rng.integers(1, 110)), int(rng.integers(1, 110))
        out = np.empty((*hw, 3), np.uint8)
        bicubic, first = EVERY_WAY[number % len(EVERY_WAY)]
        resize_view(NOISE, View((y0, x0, height, width), hw), out, Resampling(bicubic=bicubic, first=first))
        touched = NOISE[int(y0) : int(np.ceil(y0 + height)), int(x0) : int(np.ceil(x0 + width))]
        y0, x0 = y0 % 1, x0 % 1
        image = Image.fromarray(touched)
        down = first == "down" or (first == "quick" and hw[0] < image.height)
        for vertical in [True, False] if down else [False, True]:
            size = (image.width, hw[0]) if vertical else (hw[1], image.height)
            box = (0, y0, image.width, y0 + height) if vertical else (x0, 0, x0 + width, image.height)
            image = image.resize(size, METHODS[bicubic], box=box)
        assert (out == np.asarray(image)).all()
        whole = Image.fromarray(touched).resize(
            (hw[1], hw[0]), Image.Resampling.BILINEAR, box=(x0, y0, x0 + width, y0 + height)
        )
        assert bicubic or np.abs(out.astype(int) - np.asarray(whole)).max() <= 1


def test_a_window_is_a_part_of_the_resized_image() -> None:
    out = np.empty((32, 32, 3), np.uint8)
    resize_view(NOISE, View((0, 0, 120, 170), (40, 57), (4, 12)), out)
    assert (out == pillow(NOISE, (0, 0, 120, 170), (40, 57))[4:36, 12:44]).all()


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("hw", [(64, 64), (48, 50)])
def test_plain_resizing_is_the_mean_of_four_neighbours(crop: tuple[int, int, int, int], hw: tuple[int, int]) -> None:
    out = np.empty((*hw, 3), np.uint8)
    resize_view(NOISE, View(crop, hw), out, Resampling(antialias=False))
    part = NOISE[crop[0] : crop[0] + crop[2], crop[1] : crop[1] + crop[3]].astype(float)
    for row, column in [(0, 0), (hw[0] - 1, hw[1] - 1), (hw[0] // 2, hw[1] // 3), (5, 7)]:
        y = min(max((row + 0.5) * crop[2] / hw[0] - 0.5, 0), crop[2] - 1)
        x = min(max((column + 0.5) * crop[3] / hw[1] - 0.5, 0), crop[3] - 1)
        y0, x0 = int(y), int(x)
        y1, x1 = min(y0 + 1, crop[2] - 1), min(x0 + 1, crop[3] - 1)
        top = part[y0, x0] * (1 - (x - x0)) + part[y0, x1] * (x - x0)
        bottom = part[y1, x0] * (1 - (x - x0)) + part[y1, x1] * (x - x0)
        assert out[row, column] == pytest.approx(top * (1 - (y - y0)) + bottom * (y - y0), abs=0.51)


def test_nothing_is_resized_when_it_fits() -> None:
    for antialias in (True, False):
        out = np.empty((64, 64, 3), np.uint8)
        resize_view(NOISE, View((10, 20, 64, 64), (64, 64)), out, Resampling(antialias=antialias))
        assert (out == NOISE[10:74, 20:84]).all()


def test_views_of_evaluation_are_resized_as_pillow_does_and_crops_quickly() -> None:
    spec = ViewSpec(size=32, bicubic=True)
    assert spec.resampling() == Resampling(bicubic=True, first="across")
    assert spec.resampling(orientation=6) == Resampling(bicubic=True, first="down"), "stored sideways"
    for other in ({"crop": CROP_RULES["torchvision"]}, {"whole": True}):
        assert replace(spec, **other).resampling(orientation=6) == Resampling(first="quick")
