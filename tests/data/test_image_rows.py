"""Rows cut out of a JPEG are the rows that decoding all of it gives."""

import numpy as np
import pytest

from headrace.data.decoding.image import BadImage, decode, read_header
from headrace.data.decoding.jpeg_rows import cut_rows

from .image_files import encode, smooth


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("hw", [(200, 150), (203, 77), (300, 33)])
def test_cut_rows_decode_to_the_same_pixels(subsampling: int, grey: bool, hw: tuple[int, int]) -> None:
    pixels = smooth(*hw, seed=7)
    data = encode(pixels[:, :, 0] if grey else pixels, subsampling=subsampling, restart_marker_rows=1)
    whole = decode(data, read_header(data), quick=True)
    cuts = 0
    for top, bottom in [(0, 1), (0, 40), (17, 90), (100, hw[0]), (hw[0] - 1, hw[0]), (64, 128)]:
        cut = cut_rows(data, top, bottom)
        assert cut is not None
        small, first = cut
        part = decode(small, read_header(small), quick=True)
        assert first <= top
        assert first + len(part) >= bottom
        assert len(part) <= bottom - top + 32
        assert (part == whole[first : first + len(part)]).all()
        cuts += len(small) < len(data)
    assert cuts == 6
    assert cut_rows(data, 0, hw[0]) is None, "all of it is wanted"


def test_jpegs_without_a_marker_for_each_row_are_left_alone() -> None:
    pixels = smooth(200, 150)
    assert cut_rows(encode(pixels), 0, 10) is None
    assert cut_rows(encode(pixels, restart_marker_rows=2), 0, 10) is None
    assert cut_rows(encode(pixels, progressive=True), 0, 10) is None
    assert cut_rows(encode(pixels, "PNG"), 0, 10) is None
    assert cut_rows(b"\xff\xd8", 0, 10) is None


def quick_pixels(data: bytes) -> np.ndarray | None:
    """Return the pixels, or None for a broken image."""
    try:
        return decode(data, read_header(data), quick=True)
    except BadImage:
        return None


def test_damaged_jpegs_are_refused_or_cut() -> None:
    """What libjpeg finds in order as a whole has the same pixels when it is cut."""
    data, rng = encode(smooth(120, 90), restart_marker_rows=1), np.random.default_rng(0)
    same = bad = 0
    for _ in range(300):
        changed = bytearray(data[: int(rng.integers(2, len(data)))] if rng.random() < 0.3 else data)
        for _ in range(int(rng.integers(1, 6))):
            changed[int(rng.integers(0, len(changed)))] = int(rng.integers(0, 256))
        cut, whole = cut_rows(bytes(changed), 10, 50), quick_pixels(bytes(changed))
        if cut is None:
            continue
        part = quick_pixels(cut[0])
        bad += part is None
        if whole is not None:
            assert part is not None
            assert (part == whole[cut[1] : cut[1] + len(part)]).all()
            same += 1
    assert same > 20
    assert bad > 20
