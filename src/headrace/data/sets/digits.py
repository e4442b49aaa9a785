"""The embedded digits: 1,797 handwritten digits of 8 x 8 values from 0 to 16, enlarged to 32 x 32 grey images.

For source and licence see files/NOTICE.txt. Enlarging and splitting use whole numbers only, so every machine has the
same images and the same split, whatever the run's seed.
"""

import hashlib
import io
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np

from headrace.core.rng import bits, name_id
from headrace.data.sets.catalog import DIGITS
from headrace.data.sets.file_problem import FileProblem, SplitPart, empty_part

_FILE = "digits.npz"
_SHA256 = "56691635b5c95f315ed55907c4fe83309809b3b822ee0b8d68e84bba3ffd4ca3"
_FACTOR = 4


def read_digits() -> dict[str, SplitPart]:
    """Return the two splits, with a finding if the shipped file has changed."""
    file = resources.files("headrace.data").joinpath("files", _FILE)
    path = Path(str(file))
    try:
        data = file.read_bytes()
    except OSError as error:
        return _damaged(path, f"cannot be read: {error.strerror}")
    # Accuracies of the demo and of the tests belong to these very images.
    if hashlib.sha256(data).hexdigest() != _SHA256:
        return _damaged(path, "not the file that belongs to this version; install Headrace again")
    images, labels, held_out = _unpack(data)
    return {
        "train": SplitPart(images=images[~held_out], labels=labels[~held_out]),
        "validation": SplitPart(images=images[held_out], labels=labels[held_out]),
    }


@lru_cache(maxsize=1)  # for the next run of the process; what is selected from these arrays are copies
def _unpack(data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return images, labels, and which samples are held out."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        values, labels = arrays["images"], arrays["labels"].astype(np.int32)
    return enlarge(values), labels, validation_mask(labels)


def enlarge(values: np.ndarray) -> np.ndarray:
    """Return [n, 8, 8] values of 0..16 as [n, 32, 32, 1] bytes: bilinear, pixel centres aligned, edges repeated."""
    # Whole numbers up to 1,024 are exact as floats, whose products are ten times as fast.
    weights = _weights(values.shape[1]).astype(np.float32)
    sums = (weights @ values.astype(np.float32) @ weights.T).astype(np.int32)  # 64 times the value between 0 and 16
    return ((sums * 255 + 512) // 1024).astype(np.uint8)[..., None]


def validation_mask(labels: np.ndarray) -> np.ndarray:
    """Return which samples are held out: the wanted number of each class, drawn by sample number."""
    draw = bits(name_id("digits/validation"), np.arange(len(labels), dtype=np.uint32))
    held_out = np.zeros(len(labels), bool)
    for label, count in enumerate(DIGITS.validation_counts):
        members = np.flatnonzero(labels == label)
        held_out[members[np.argsort(draw[members], kind="stable")[:count]]] = True
    return held_out


def _weights(size: int) -> np.ndarray:
    """Return the bilinear weights [4 * size, size] in eighths."""
    weights = np.zeros((size * _FACTOR, size), np.int64)
    for out in range(size * _FACTOR):
        low, part = divmod(2 * out + 1 - _FACTOR, 2 * _FACTOR)  # position (out + 1/2) / 4 - 1/2, in eighths
        weights[out, max(low, 0)] += 2 * _FACTOR - part
        weights[out, min(low + 1, size - 1)] += part
    return weights


def _damaged(path: Path, problem: str) -> dict[str, SplitPart]:
    part = empty_part(DIGITS.image_hwc, FileProblem(path=path, problem=problem))
    return {"train": part, "validation": empty_part(DIGITS.image_hwc)}
