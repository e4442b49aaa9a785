"""Write a part of CIFAR-10 as JPEG files in class folders, for runs on real images.

    python benchmarks/cifar_images.py --dataset-path FOLDER_OF_BATCHES --output cifar_jpegs --train 5000 --val 1000

The first images of each split, quality 95, no image turned or resized.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from headrace.config.load import config_from
from headrace.data.dataset import open_dataset


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset-path", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--train", type=int, default=5000)
    parser.add_argument("--val", type=int, default=1000)
    args = parser.parse_args()
    dataset = open_dataset(config_from({"dataset": "cifar10", "dataset_path": args.dataset_path}).data, 0)
    for split, source, count in (("train", dataset.train, args.train), ("val", dataset.validation, args.val)):
        for number, image in enumerate(source.read(np.arange(count), 0)):
            folder = args.output / split / dataset.info.class_names[source.labels[number]]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number:05d}.jpg", quality=95)


if __name__ == "__main__":
    main()
