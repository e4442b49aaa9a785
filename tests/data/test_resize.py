"""Resizing: antialiased, each pass is Pillow's to the bit; plain it is the four-neighbour formula."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from headrace.data.decoding import resize
from headrace.data.decoding.image_source import ViewSpec
from headrace.data.decoding.resize import CROP_RULES, View, resize_view

RNG = np.random.default_rng(4)
NOISE = RNG.integers(0, 256, (120, 170, 3)).astype(np.uint8)
CROPS = [(0, 0, 120, 170), (10, 20, 64, 64), (3, 5, 100, 33), (7, 9, 20, 31), (0, 0, 1, 1), (119, 0, 1, 170)]


def pillow(pixels: np.ndarray, crop: tuple[int, int, int, int], hw: tuple[int, int], passes: int = 2) -> np.ndarray:
    """Resize as Pillow does, in one call, or in two: downwards first if it shrinks downwards, else across first."""
    top, left, height, width = crop
    image = Image.fromarray(pixels).crop((left, top, left + width, top + height))
    if passes == 2:
        image = image.resize((width, hw[0]) if hw[0] < height else (hw[1], height), Image.Resampling.BILINEAR)
    return np.asarray(image.resize((hw[1], hw[0]), Image.Resampling.BILINEAR))


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
    out = np.empty((*hw, 3), np.uint8)
    resize_view(NOISE, View(crop, hw), out)
    assert (out == pillow(NOISE, crop, hw)).all()
    grey = np.empty((*hw, 1), np.uint8)
    resize_view(NOISE[:, :, :1], View(crop, hw), grey)
    assert (grey[:, :, 0] == pillow(NOISE[:, :, 0], crop, hw)).all()
    assert np.abs(out.astype(int) - pillow(NOISE, crop, hw, passes=1)).max() <= 1, "the bound that the docs state"


def test_many_sizes_of_both_resizers_are_pillows() -> None:
    rng = np.random.default_rng(1)
    for _ in range(150):
        height, width, new_height, new_width = (int(side) for side in rng.integers(1, 110, 4))
        crop = (int(rng.integers(0, 121 - height)), int(rng.integers(0, 171 - width)), height, width)
        top, left = int(rng.integers(0, new_height)), int(rng.integers(0, new_width))
        out = np.empty(
            (int(rng.integers(1, new_height - top + 1)), int(rng.integers(1, new_width - left + 1)), 3), np.uint8
        )
        resize_view(NOISE, View(crop, (new_height, new_width), (top, left)), out)
        want = pillow(NOISE, crop, (new_height, new_width))[top : top + out.shape[0], left : left + out.shape[1]]
        assert (out == want).all()


def test_pixels_that_a_crop_divides_are_weighted_as_pillow_does() -> None:
    """Pillow's `box` in the pixels that the crop touches: the result is the same to the bit, pass by pass."""
    rng = np.random.default_rng(2)
    for _ in range(60):
        y0, x0 = rng.integers(0, 40 * 8, 2) / 8
        height, width = rng.integers(4, 78 * 8, 2) / 8
        hw = int(rng.integers(1, 110)), int(rng.integers(1, 110))
        out = np.empty((*hw, 3), np.uint8)
        resize_view(NOISE, View((y0, x0, height, width), hw), out)
        touched = NOISE[int(y0) : int(np.ceil(y0 + height)), int(x0) : int(np.ceil(x0 + width))]
        y0, x0 = y0 % 1, x0 % 1
        image = Image.fromarray(touched)
        for vertical in [True, False] if hw[0] < image.height else [False, True]:
            size = (image.width, hw[0]) if vertical else (hw[1], image.height)
            box = (0, y0, image.width, y0 + height) if vertical else (x0, 0, x0 + width, image.height)
            image = image.resize(size, Image.Resampling.BILINEAR, box=box)
        assert (out == np.asarray(image)).all()
        whole = Image.fromarray(touched).resize(
            (hw[1], hw[0]), Image.Resampling.BILINEAR, box=(x0, y0, x0 + width, y0 + height)
        )
        assert np.abs(out.astype(int) - np.asarray(whole)).max() <= 1


def test_a_window_is_a_part_of_the_resized_image() -> None:
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


def test_bicubic_views_are_pillows_in_evaluation_alone() -> None:
    out = np.empty((48, 50, 3), np.uint8)
    resize_view(NOISE, View((0, 0, 120, 170), (48, 50)), out, bicubic=True)
    image = Image.fromarray(NOISE).resize((170, 48), Image.Resampling.BICUBIC)
    assert (out == np.asarray(image.resize((50, 48), Image.Resampling.BICUBIC))).all()
    spec = ViewSpec(size=32, bicubic=True)
    assert spec.is_bicubic
    assert not any(
        replace(spec, **other).is_bicubic for other in ({"crop": CROP_RULES["torchvision"]}, {"whole": True})
    )
