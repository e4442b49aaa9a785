"""Measure what packing costs in pixels: the same views from the images and from a packed file of them.

    python benchmarks/pack_cost.py --images FOLDER_OF_JPEGS --shorter-side 256 --quality 90

Prints, for validation views and for training crops (area 0.08 to 1) of 224 pixels: the peak signal-to-noise ratio
(median, and the worst tenth) and the mean difference in levels of 255; and the share of the bytes that is left. Views
come from the code that training runs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from input_rates import link_folders

from headrace.config.load import config_from
from headrace.data.dataset import open_dataset


def compare(one: np.ndarray, two: np.ndarray) -> dict[str, float]:
    """Return how much views differ."""
    difference = one.astype(np.float64) - two
    error = np.maximum((difference**2).mean((1, 2, 3)), 1e-3)
    ratio = 10 * np.log10(255**2 / error)
    return {
        "psnr_median_db": round(float(np.median(ratio)), 1),
        "psnr_worst_tenth_db": round(float(np.percentile(ratio, 10)), 1),
        "mean_levels": round(float(np.abs(difference).mean()), 2),
    }


def main() -> None:
    """Print one line of JSON for each form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--shorter-side", type=int, nargs="+", default=[256])
    parser.add_argument("--quality", type=int, nargs="+", default=[90])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folders = link_folders(args.images, Path(work))
        before = sum(path.stat().st_size for path in (folders / "train").rglob("*.*"))
        options = {"dataset": "auto", "image_size": 224, "train_crop": "torchvision"}
        plain = open_dataset(config_from(options | {"dataset_path": str(folders)}).data, 0)
        index = np.arange(len(plain.train))
        for side in args.shorter_side:
            for quality in args.quality:
                packed = Path(work) / f"{side}-{quality}.hrp"
                words = [sys.executable, "-m", "headrace", "data", "pack", "--dataset-path", str(folders)]
                words += ["--output", str(packed), "--shorter-side", str(side), "--quality", str(quality)]
                subprocess.run(words, check=True, capture_output=True)
                other = open_dataset(config_from(options | {"dataset_path": str(packed)}).data, 0)
                row = {"shorter_side": side, "quality": quality, "size": round(packed.stat().st_size / before / 2, 3)}
                row["validation"] = compare(plain.validation.read(index, 0), other.validation.read(index, 0))
                row["training"] = compare(plain.train.read(index, 1), other.train.read(index, 1))
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
