"""Crops decoded at 1/2, 1/4 and 1/8: no worse than Pillow's reduced decoding with the exact box, turned or not."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from headrace.data.decoding import image_source
from headrace.data.decoding.crop import CROP_RULES, draws, random_crop
from headrace.data.decoding.image_source import ViewSpec, decode_into

from .image_files import ObjectSamples, encode, smooth

BILINEAR = Image.Resampling.BILINEAR
SIZE, SEED = 24, 3
SPEC = ViewSpec(size=SIZE, crop=CROP_RULES["torchvision"], seed=SEED)
MIRRORED = {2: "x", 3: "xy", 4: "y", 6: "x", 7: "xy", 8: "y"}  # of the image, its rows and columns swapped from 5 on


def detailed(height: int, width: int) -> np.ndarray:
    """Return an image with edges of all directions: what is shifted by part of a pixel differs by tens of levels."""
    y, x = np.mgrid[0:height, 0:width].astype(float)
    rings = np.sin(np.hypot(y - height / 3, x - width / 2) / 5)
    stripes = np.sign(np.sin((x + 2 * y) / 11))
    return np.clip(smooth(height, width) / 2 + 60 * (rings + stripes)[..., None] + 60, 0, 255).astype(np.uint8)


def exact(data: bytes, orientation: int, box: tuple[float, ...], factor: int) -> np.ndarray:
    """Let Pillow decode at 1/factor and resize the exact box of the stored image, then turn the result."""
    image = Image.open(io.BytesIO(data))
    height, width = (image.width, image.height) if orientation >= 5 else (image.height, image.width)
    top, left, tall, wide = box
    if "x" in MIRRORED.get(orientation, ""):
        left = width - left - wide
    if "y" in MIRRORED.get(orientation, ""):
        top = height - top - tall
    edges = (top, left, top + tall, left + wide) if orientation >= 5 else (left, top, left + wide, top + tall)
    image.draft(None, (image.width // factor, image.height // factor))
    x0, y0, x1, y1 = (edge / factor for edge in edges)
    view = image.resize((SIZE, SIZE), BILINEAR, box=(x0, y0, x1, y1))
    exif = Image.Exif()
    exif[0x0112] = orientation
    view.info["exif"] = exif.tobytes()
    view.getexif()[0x0112] = orientation
    return np.asarray(ImageOps.exif_transpose(view)).astype(int)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_reduced_crops(orientation: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(image_source, "jpeg_decoder", lambda: None)
    exif = Image.Exif()
    exif[0x0112] = orientation
    factors = set()
    ours, pillows = [], []
    for number, hw in enumerate([(101, 131), (165, 94), (331, 237)]):  # no side is a multiple of a factor
        data = encode(detailed(*hw), exif=exif)
        whole = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        for epoch in range(4):
            top, left, height, width = random_crop(
                (whole.height, whole.width), CROP_RULES["torchvision"], draws(SEED, epoch, 0)
            )
            factor = next((f for f in (8, 4, 2) if min(height, width) >= f * SIZE), 1)
            if factor == 1:
                continue
            out = np.empty((SIZE, SIZE, 3), np.uint8)
            decode_into(ObjectSamples([(data, 0)]), 0, epoch, SPEC, out, None)
            crop = whole.crop((left, top, left + width, top + height))
            want = np.asarray(crop.resize((SIZE, SIZE), BILINEAR)).astype(int)
            bound = np.abs(exact(data, orientation, (top, left, height, width), factor) - want)
            difference = np.abs(out - want)
            factors.add(factor)
            ours.append(difference.mean())
            pillows.append(bound.mean())
            assert difference.mean() <= bound.mean() + 0.3, (number, epoch, factor)  # the fast transform of colours
            assert difference.max() <= bound.max() + 6
    assert factors >= {2, 4}
    assert np.mean(ours) <= np.mean(pillows) + 0.2
