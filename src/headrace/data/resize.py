"""Resize a crop of a picture: bilinear, with antialiasing as Pillow does it, or plain as TensorFlow's default is."""

from typing import NamedTuple

import numpy as np

from headrace.data.native import native_resize

Box = tuple[int, int, int, int]  # top, left, height, width


class View(NamedTuple):
    """What is seen of a picture: a crop, the size it is resized to, and where in that the result is cut out."""

    crop: Box
    resized_hw: tuple[int, int]
    offset: tuple[int, int] = (0, 0)  # top, left


def resize_view(pixels: np.ndarray, view: View, out: np.ndarray, antialias: bool = True) -> None:
    """Write a view of uint8 [h, w, C] pixels into `out` [H, W, C]. The crop's edge is an edge.

    With antialiasing each of the two passes is Pillow's, bit for bit; a picture that shrinks downwards is resized
    downwards first, others across first. Without it, each pixel is the mean of its four neighbours, weighted by
    distance, pixel centres aligned.
    """
    top, left, height, width = view.crop
    crop = pixels[top : top + height, left : left + width]
    rows, columns = (slice(start, start + size) for start, size in zip(view.offset, out.shape, strict=False))
    if crop.shape[:2] == view.resized_hw:
        out[...] = crop[rows, columns]
    elif antialias and (native := native_resize()) is not None and _fits(crop, out):
        native(crop, view.resized_hw, view.offset, out)
    elif antialias:
        out[...] = pillow_resize(crop, view.resized_hw)[rows, columns]
    else:
        _plain(crop, view, out)


def _fits(crop: np.ndarray, out: np.ndarray) -> bool:
    """Say whether pixels lie as the compiled resizer takes them."""
    return crop.strides[1:] == (crop.shape[2], 1) and crop.strides[0] > 0 and out.flags.c_contiguous


def pillow_resize(crop: np.ndarray, hw: tuple[int, int]) -> np.ndarray:
    """Return a picture resized by Pillow, the two passes in our order."""
    from PIL import Image

    grey = crop.shape[2] == 1
    image = Image.fromarray(np.ascontiguousarray(crop[:, :, 0] if grey else crop))
    between = (image.width, hw[0]) if hw[0] < image.height else (hw[1], image.height)
    # One call would take the passes in an order that depends on Pillow's version; the fewer rows across, the faster.
    for size in (between, (hw[1], hw[0])):
        image = image.resize(size, Image.Resampling.BILINEAR)
    resized = np.asarray(image)
    return resized[:, :, None] if grey else resized


def _plain(crop: np.ndarray, view: View, out: np.ndarray) -> None:
    low_y, high_y, part_y = _taps(crop.shape[0], view.resized_hw[0], view.offset[0], out.shape[0])
    low_x, high_x, part_x = _taps(crop.shape[1], view.resized_hw[1], view.offset[1], out.shape[1])
    above, below = crop[low_y].astype(np.float32), crop[high_y].astype(np.float32)
    rows = above + (below - above) * part_y[:, None, None]
    left, right = rows[:, low_x], rows[:, high_x]
    out[...] = np.floor(left + (right - left) * part_x[None, :, None] + np.float32(0.5)).astype(np.uint8)


def _taps(size: int, resized: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the two neighbours of each place and the second one's weight."""
    centre = np.maximum((np.arange(first, first + count) + 0.5) * (size / resized) - 0.5, 0)
    low = np.minimum(centre.astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    return low, high, (centre - low).astype(np.float32)
