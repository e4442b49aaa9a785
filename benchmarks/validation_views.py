"""Measure what validation sees of photographs, and what it costs: the exact view, the reduced one, and Pillow's.

    python benchmarks/validation_views.py --images FOLDER_OF_JPEGS --size 128 224

Prints, for each size and interpolation: how many photographs are at least twice as large as needed; how many levels (of
255) each view differs from Pillow's full decode, `resize` and centre crop; and the milliseconds of processor time that
an image takes each, the least of `--rounds` rounds, measured in turns, and Pillow's beside them.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from headrace.data.decoding.image_source import ViewSpec, decoded_source
from headrace.data.sets.bad_samples import BadSamples
from headrace.data.sets.samples import FileSamples

METHODS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def pillows_view(path: Path, size: int, shorter: int, method: Image.Resampling) -> np.ndarray:
    """Return torchvision's and timm's view of an image, by Pillow alone, across first as up to its version 12."""
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    hw = [side * shorter // min(image.size) for side in (image.height, image.width)]
    if image.height - hw[0] > max(0, 2 * (image.width - hw[1])):  # Pillow 13 would resize down first
        image = image.resize((hw[1], image.height), method)
    top, left = (round((side - size) / 2) for side in hw)
    return np.asarray(image.resize((hw[1], hw[0]), method))[top : top + size, left : left + size]


def measure(work: dict[str, Callable[[], np.ndarray]], rounds: int) -> dict[str, tuple[np.ndarray, float]]:
    """Return what each piece of work gives, and the least processor time that it took."""
    found: dict[str, tuple[np.ndarray, float]] = {}
    for _ in range(rounds):
        for name, run in work.items():
            start = time.process_time()
            made = run()
            took = time.process_time() - start
            found[name] = made, min(took, found.get(name, (made, took))[1])
    return found


def main() -> None:
    """Print one line of JSON for each size and interpolation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--size", type=int, nargs="+", default=[128, 224])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    paths = sorted(path for path in args.images.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    samples = FileSamples(args.images, [path.name for path in paths], np.zeros(len(paths), np.int32))
    sides = [min(Image.open(path).size) for path in paths]
    for size in args.size:
        shorter = size * 256 // 224
        for name, method in METHODS.items():
            work: dict[str, Callable[[], np.ndarray]] = {}
            for reduced in (False, True):
                spec = ViewSpec(size=size, shorter_side=shorter, bicubic=name == "bicubic", reduced=reduced)
                source = decoded_source(samples, spec, "validation", BadSamples("photographs", len(paths), 0))
                every = np.arange(len(paths))
                work["reduced" if reduced else "exact"] = lambda source=source, every=every: source.read(every, 0)
            work["pillow"] = lambda size=size, shorter=shorter, method=method: np.stack(
                [pillows_view(path, size, shorter, method) for path in paths]
            )
            found = measure(work, args.rounds)
            row: dict[str, object] = {"size": size, "interpolation": name, "photographs": len(paths)}
            row["twice_as_large"] = sum(side >= 2 * shorter for side in sides)
            for kind in ("exact", "reduced"):
                off = np.abs(found[kind][0].astype(int) - found["pillow"][0])
                row[f"{kind}_levels"] = {"mean": round(float(off.mean()), 3), "max": int(off.max())}
            row["milliseconds"] = {kind: round(seconds / len(paths) * 1e3, 2) for kind, (_, seconds) in found.items()}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
