"""Real image files for the tests: made with Pillow, small, different from each other."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from headrace.data.decoding.image import BadImage
from headrace.data.sets.samples import Content


def smooth(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return an RGB image without hard edges, so that JPEG and resizing change it little."""
    rng = np.random.default_rng(seed)
    y, x = np.arange(height, dtype=np.float64)[:, None], np.arange(width, dtype=np.float64)[None, :]
    waves = [
        128 + 60 * np.sin(a * x / width * 6 + b) * np.cos(c * y / height * 6 + d) + 30 * np.sin(e + x / 17)
        for a, b, c, d, e in rng.uniform(0.3, 1.5, (3, 5))
    ]
    return np.clip(np.stack(waves, axis=2), 0, 255).astype(np.uint8)


def encode(pixels: np.ndarray, kind: str = "JPEG", **options: Any) -> bytes:
    """Return the pixels as a file's bytes."""
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    if kind == "JPEG":
        options = {"quality": 92} | options
    image.save(file, kind, **options)
    return file.getvalue()


def write_classes(root: Path, counts: dict[str, int], hw: tuple[int, int] = (40, 50), first_seed: int = 0) -> None:
    """Write class folders; every image is another one."""
    seed = first_seed
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            (root / name / f"{number}.jpg").write_bytes(encode(smooth(*hw, seed=seed)))
            seed += 1


class ObjectSamples:
    """Images from a Python object: `len(it)` samples, `it.get(i)` (or `it[i]`) an image and its label.

    An image is encoded bytes, or pixels as uint8 [h, w] or [h, w, C].
    """

    def __init__(self, source: Any, labels: np.ndarray | None = None) -> None:
        self._get = source.get if hasattr(source, "get") else source.__getitem__
        found = [self._get(number)[1] for number in range(len(source))] if labels is None else labels
        self.labels = np.asarray(found).astype(np.int32)

    def __len__(self) -> int:
        return len(self.labels)

    def content(self, sample: int) -> Content:
        """Return the object's image."""
        image = self._get(sample)[0]
        if isinstance(image, bytes | bytearray | memoryview):
            return Content(bytes(image))
        pixels = np.asarray(image)
        if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
            raise BadImage(f"an array of {pixels.dtype} {list(pixels.shape)}, not uint8 [height, width, channels]")
        return Content(pixels if pixels.ndim == 3 else pixels[:, :, None])

    def name(self, sample: int) -> str:
        """Return the sample's number."""
        return f"sample {sample:,}"
