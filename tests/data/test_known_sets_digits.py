"""The embedded digits: the published values, the enlarging against Pillow's, the split."""

import io
from importlib import resources

import numpy as np
import pytest
from PIL import Image

from headrace.data.sets import digits
from headrace.data.sets.digits import enlarge, read_digits, validation_mask

# From the UCI file optdigits.tes: its first record, the digit 0.
FIRST = """
 0 0 5 13 9 1 0 0    0 0 13 15 10 15 5 0   0 3 15 2 0 11 8 0   0 4 12 0 0 8 8 0
 0 5 8 0 0 9 8 0     0 4 11 0 1 12 7 0     0 2 14 5 10 12 0 0  0 0 6 13 10 0 0 0
"""
CLASS_COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # of the published test part


def shipped() -> tuple[np.ndarray, np.ndarray]:
    data = resources.files("headrace.data").joinpath("files", "digits.npz").read_bytes()
    arrays = np.load(io.BytesIO(data))
    return arrays["images"], arrays["labels"]


def test_the_shipped_file_holds_the_published_values() -> None:
    images, labels = shipped()
    assert images.shape == (1797, 8, 8)
    assert images.max() == 16
    assert images[0].ravel().tolist() == [int(word) for word in FIRST.split()]
    assert np.bincount(labels).tolist() == CLASS_COUNTS
    assert labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_the_file_is_small_and_has_its_licence() -> None:
    files = resources.files("headrace.data").joinpath("files")
    assert len(files.joinpath("digits.npz").read_bytes()) < 100_000
    notice = files.joinpath("NOTICE.txt").read_text()
    assert "CC BY 4.0" in notice
    assert "Alpaydin" in notice


def test_enlarging_is_bilinear() -> None:
    images, _ = shipped()
    ours = enlarge(images[:50])
    assert ours.shape == (50, 32, 32, 1)
    for small, large in zip(images[:50], ours, strict=True):
        image = Image.fromarray(small.astype(np.float32)).resize((32, 32), Image.Resampling.BILINEAR)
        assert np.abs(np.asarray(image) * 255 / 16 - large[..., 0]).max() <= 0.5 + 1e-3


def test_enlarging_keeps_flat_images_flat() -> None:
    flat = np.stack([np.full((8, 8), value, np.uint8) for value in range(17)])
    assert [np.unique(image).tolist() for image in enlarge(flat)] == [[(v * 255 + 8) // 16] for v in range(17)]


def test_the_split_is_stratified_complete_and_disjoint() -> None:
    images, labels = shipped()
    mask = validation_mask(labels.astype(np.int32))
    assert int(mask.sum()) == 360
    held_out = np.bincount(labels[mask])
    assert np.abs(held_out - np.array(CLASS_COUNTS) * 360 / 1797).max() < 1
    parts = read_digits()
    assert len(parts["train"].labels) == 1437
    both = np.concatenate([parts["train"].images, parts["validation"].images])
    ours, true = (sorted(image.tobytes() for image in each) for each in (both, enlarge(images)))
    assert ours == true


def test_the_split_is_the_same_every_time_and_mixes_the_file() -> None:
    _, labels = shipped()
    mask = validation_mask(labels.astype(np.int32))
    assert (mask == validation_mask(labels.astype(np.int32))).all()
    tenths = [part.mean() for part in np.array_split(mask, 10)]
    assert 0.1 < min(tenths) <= max(tenths) < 0.3


def test_a_changed_file_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "_SHA256", "0" * 64)
    (finding,) = read_digits()["train"].findings
    assert "digits.npz" in str(finding)
    assert "install" in finding.problem
