"""Changes of colours against Pillow, and random erasing and jitter against loops; host and device alike."""

import colorsys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from headrace.data.augmentation import colors
from headrace.data.augmentation.erase import AREA, ASPECT, erase, rectangles

RNG = np.random.default_rng(3)
# smooth images, noise, a flat one and one with few levels
IMAGES = np.stack(
    [
        (np.add.outer(np.arange(20) * 6, np.arange(24) * 5)[:, :, None] + np.array([0, 10, 20])) % 256,
        RNG.integers(0, 256, (20, 24, 3)),
        np.full((20, 24, 3), 77),
        RNG.integers(100, 120, (20, 24, 3)),
    ]
).astype(np.uint8)

Operation = tuple[Callable[..., Any], Any, Callable[[Image.Image], Image.Image], int]
OPERATIONS: dict[str, Operation] = {
    "brighter": (colors.brightness, 1.6, lambda im: ImageEnhance.Brightness(im).enhance(1.6), 1),
    "darker": (colors.brightness, 0.3, lambda im: ImageEnhance.Brightness(im).enhance(0.3), 1),
    "contrast": (colors.contrast, 1.7, lambda im: ImageEnhance.Contrast(im).enhance(1.7), 1),
    "flatter": (colors.contrast, 0.2, lambda im: ImageEnhance.Contrast(im).enhance(0.2), 1),
    "saturation": (colors.saturation, 1.8, lambda im: ImageEnhance.Color(im).enhance(1.8), 1),
    "greyer": (colors.saturation, 0.1, lambda im: ImageEnhance.Color(im).enhance(0.1), 1),
    "sharper": (colors.sharpness, 1.9, lambda im: ImageEnhance.Sharpness(im).enhance(1.9), 1),
    "smoother": (colors.sharpness, 0.1, lambda im: ImageEnhance.Sharpness(im).enhance(0.1), 1),
    "posterize": (colors.posterize, 32, lambda im: ImageOps.posterize(im, 3), 0),
    "solarize": (colors.solarize, 128, lambda im: ImageOps.solarize(im, 128), 0),
    "invert": (colors.invert, None, ImageOps.invert, 0),
    "autocontrast": (colors.autocontrast, None, ImageOps.autocontrast, 1),
    "equalize": (colors.equalize, None, ImageOps.equalize, 0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_against_pillow(name: str) -> None:
    apply, strength, theirs, within = OPERATIONS[name]
    x = IMAGES.astype(np.float32)
    if isinstance(strength, float):  # a factor may differ from image to image
        strength = np.full((len(x), 1, 1, 1), colors.exact(strength), np.float32)
    host = apply(x, strength)
    device = np.asarray(jax.jit(lambda x: apply(x, strength))(x))
    assert host.dtype == np.float32
    assert (host == np.round(host)).all()
    assert (host >= 0).all()
    assert (host <= 255).all()
    for ours, image in zip(host, IMAGES, strict=True):
        wanted = np.asarray(theirs(Image.fromarray(image))).astype(np.float32)
        assert np.abs(ours - wanted).max() <= within
    assert np.abs(host - device).max() <= 1
    assert (host == device).mean() > 0.999


def test_histograms_of_both_kinds_of_device() -> None:
    x = IMAGES.astype(np.float32)
    wanted = [[np.bincount(image[..., c].ravel(), minlength=256) for c in range(3)] for image in IMAGES]
    for count in (colors._histogram_by_adding, colors._histogram_by_comparing, colors._histogram):
        np.testing.assert_array_equal(jax.jit(count)(x), wanted)


def test_grey_images_have_one_channel() -> None:
    x = IMAGES[..., :1].astype(np.float32)
    for name, (apply, strength, theirs, within) in OPERATIONS.items():
        ours = apply(x, strength)
        for found, image in zip(ours, IMAGES[..., 0], strict=True):
            colourless = name in ("saturation", "greyer")
            wanted = image if colourless else np.asarray(theirs(Image.fromarray(image)))
            assert np.abs(found[..., 0] - wanted.astype(np.float32)).max() <= within, name


@pytest.mark.parametrize("turn", [-0.4, 0.0, 0.1, 0.5])
def test_hue_against_colorsys(turn: float) -> None:
    x = IMAGES[:2].astype(np.float32)
    host = colors.turn_hue(x, np.float32(turn))
    device = np.asarray(jax.jit(lambda x: colors.turn_hue(x, np.float32(turn)))(x))
    for found in (host, device):
        for pixel, ours in zip(x.reshape(-1, 3)[::7], found.reshape(-1, 3)[::7], strict=True):
            hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
            wanted = np.array(colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)) * 255
            assert np.abs(ours - wanted).max() <= 0.51
    if turn == 0:
        assert (host == x).all()


def test_jitter_is_the_operations_with_drawn_factors() -> None:
    x, index = IMAGES.astype(np.float32), np.array([5, 900, 2, 41], np.int32)
    found = colors.jitter(x, index, 3, (0.4, 0.1), 17)
    device = jax.jit(lambda x, i, e: colors.jitter(x, i, e, (0.4, 0.1), 17))(x, index, np.uint32(3))
    assert np.abs(found - np.asarray(device)).max() <= 2
    assert (found == np.asarray(device)).mean() > 0.999
    again = colors.jitter(x[::-1], index[::-1], 3, (0.4, 0.1), 17)
    assert (again[::-1] == found).all()
    assert (colors.jitter(x, index, 4, (0.4, 0.1), 17) != found).any()


def test_jitter_factors_are_uniform() -> None:
    """A brightness of 1 - s to 1 + s on an image of 100: levels from 60 to 140, evenly."""
    count = 20_000
    x = np.full((count, 1, 1, 1), 100, np.float32)
    found = colors.jitter(x, np.arange(count, dtype=np.int32), 0, (0.4, 0.0), 1).ravel()
    assert (found.min(), found.max()) == (60, 140)
    assert found.mean() == pytest.approx(100, abs=1)
    assert found.std() == pytest.approx(80 / np.sqrt(12), abs=0.5)


def test_erasing_against_a_loop() -> None:
    values = RNG.normal(size=(40, 18, 30, 3)).astype(np.float32)
    index = np.arange(100, 140, dtype=np.int32)
    found = erase(values, index, 2, 0.5, 9)
    wanted = values.copy()
    for n, (chosen, top, left, height, width) in enumerate(zip(*rectangles(index, 2, 0.5, 9, (18, 30)), strict=True)):
        for y in range(top, top + height):
            for x in range(left, left + width):
                wanted[n, y, x] = 0 if chosen else wanted[n, y, x]
    assert (found == wanted).all()
    assert (found == 0).any()
    device = jax.jit(lambda v, i, e: erase(v, i, e, 0.5, 9))(values, index, np.uint32(2))
    assert (np.asarray(device) == wanted).all()


def test_rectangles_have_the_share_the_areas_and_the_aspects() -> None:
    count = 20_000
    index = np.arange(count, dtype=np.int32)
    chosen, top, left, height, width = rectangles(index, 0, 0.25, 3, (100, 100))
    assert chosen.mean() == pytest.approx(0.25, abs=0.02)
    assert top.min() == left.min() == 0
    assert (top + height).max() == (left + width).max() == 100
    area, aspect = height * width / 1e4, height / width
    assert (area.min(), area.max()) == (pytest.approx(AREA[0], abs=0.01), pytest.approx(AREA[1], abs=0.01))
    assert area.mean() == pytest.approx(sum(AREA) / 2, abs=0.01)
    whole = np.log(aspect[(height < 100) & (width < 100)])
    assert (whole.min(), whole.max()) == (
        pytest.approx(np.log(ASPECT[0]), abs=0.2),
        pytest.approx(np.log(ASPECT[1]), abs=0.2),
    )
    assert not erase(np.ones((5, 8, 8, 1), np.float32), index[:5], 0, 1.0, 3).all((1, 2, 3)).any()
