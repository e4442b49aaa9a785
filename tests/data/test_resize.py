"""Resizing: antialiased it is Pillow's to the bit; plain it is the four-neighbour formula."""

import numpy as np
import pytest
from PIL import Image

from headrace.data.resize import View, resize_view

RNG = np.random.default_rng(4)
NOISE = RNG.integers(0, 256, (120, 170, 3)).astype(np.uint8)
CROPS = [(0, 0, 120, 170), (10, 20, 64, 64), (3, 5, 100, 33), (7, 9, 20, 31), (0, 0, 1, 1), (119, 0, 1, 170)]


def pillow(pixels: np.ndarray, crop: tuple[int, int, int, int], hw: tuple[int, int]) -> np.ndarray:
    top, left, height, width = crop
    image = Image.fromarray(pixels).crop((left, top, left + width, top + height))
    return np.asarray(image.resize((hw[1], hw[0]), Image.Resampling.BILINEAR))


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("hw", [(64, 64), (48, 50), (150, 9)])
def test_antialiased_resizing_is_pillows(crop: tuple[int, int, int, int], hw: tuple[int, int]) -> None:
    out = np.empty((*hw, 3), np.uint8)
    resize_view(NOISE, View(crop, hw), out)
    assert (out == pillow(NOISE, crop, hw)).all()
    grey = np.empty((*hw, 1), np.uint8)
    resize_view(NOISE[:, :, :1], View(crop, hw), grey)
    assert (grey[:, :, 0] == pillow(NOISE[:, :, 0], crop, hw)).all()


def test_a_window_is_a_part_of_the_resized_picture() -> None:
    out = np.empty((32, 32, 3), np.uint8)
    resize_view(NOISE, View((0, 0, 120, 170), (40, 57), (4, 12)), out)
    assert (out == pillow(NOISE, (0, 0, 120, 170), (40, 57))[4:36, 12:44]).all()


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("hw", [(64, 64), (48, 50)])
def test_plain_resizing_is_the_mean_of_four_neighbours(crop: tuple[int, int, int, int], hw: tuple[int, int]) -> None:
    out = np.empty((*hw, 3), np.uint8)
    resize_view(NOISE, View(crop, hw), out, antialias=False)
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
        resize_view(NOISE, View((10, 20, 64, 64), (64, 64)), out, antialias)
        assert (out == NOISE[10:74, 20:84]).all()
