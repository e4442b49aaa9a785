"""CIFAR-10, or a part of it, as NumPy arrays; the options that all scripts here have."""

import argparse
from typing import Any

import numpy as np

import headrace

CLASS_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def options(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of the data and of training."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="the directory of its files [where Headrace looks for datasets]")
    parser.add_argument("--train", type=int, default=5_000, metavar="N", help="training images [5,000]")
    parser.add_argument("--test", type=int, default=1_000, metavar="N", help="test images [1,000]")
    parser.add_argument("--epochs", type=int, default=2, metavar="N", help="passes over them [2]")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="images per weight update [64]")
    return parser


def load(args: argparse.Namespace) -> tuple[Any, Any, Any, Any]:
    """Return (images, labels, test images, test labels): uint8 [N, 32, 32, 3] and integers [N]."""
    place = {"dataset_path": args.data_dir} if args.data_dir else {}
    config = headrace.config_from({"dataset": "cifar10", **place})
    dataset = headrace.open_dataset(config.data, seed=0)
    train, test = dataset.train.read(np.arange(args.train), 0), dataset.validation.read(np.arange(args.test), 0)
    return train, dataset.train.labels[: args.train], test, dataset.validation.labels[: args.test]
