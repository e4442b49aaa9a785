"""What random changes of training images cost on this machine: the fetch of a micro-batch, with and without them.

    python benchmarks/augmentation_cost.py --batch 128 --size 32 --rounds 7

All are measured in turn, `--rounds` times, so that a busy machine troubles them alike; the best round counts. One JSON
line per option: milliseconds for a micro-batch on the device, and on the host (NumPy, one thread) for the images alone.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from headrace.config.load import config_from
from headrace.config.section_augment import AUTO_AUGMENT_POLICIES
from headrace.data.augmentation.preprocess import preprocess, preprocess_spec
from headrace.data.dataset import describe_dataset
from headrace.data.feeding.fetch import fetch

WAYS: dict[str, dict[str, Any]] = {
    "normalise alone": {},
    "flip-crop": {"train_augmentation": "flip-crop"},
    "flip-crop, color_jitter": {"train_augmentation": "flip-crop", "color_jitter": 0.4},
    "flip-crop, hue_jitter": {"train_augmentation": "flip-crop", "hue_jitter": 0.1},
    "flip-crop, random_erasing": {"train_augmentation": "flip-crop", "random_erasing": 0.25},
    "flip-crop, rand_augment 2": {"train_augmentation": "flip-crop", "rand_augment": 2},
    **{
        f"flip-crop, {name}": {"train_augmentation": "flip-crop", "auto_augment": name}
        for name in AUTO_AUGMENT_POLICIES
    },
    "flip-crop, grayscale": {"train_augmentation": "flip-crop", "grayscale": 0.2},
    "flip-crop, gaussian_blur": {"train_augmentation": "flip-crop", "gaussian_blur": 0.2},
    "flip-crop, vertical_flip": {"train_augmentation": "flip-crop", "vertical_flip": True},
    "flip-crop, rotation": {"train_augmentation": "flip-crop", "rotation": 15.0},
    "flip-crop, mixup": {"train_augmentation": "flip-crop", "mixup_alpha": 0.2},
    "flip-crop, cutmix": {"train_augmentation": "flip-crop", "cutmix_alpha": 1.0},
    "flip-crop, mixup, cutmix": {"train_augmentation": "flip-crop", "mixup_alpha": 0.2, "cutmix_alpha": 1.0},
    "flip-crop, half the size": {"train_augmentation": "flip-crop", "half": True},
}


def make(options: dict[str, Any], batch: int, size: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return two functions that do the work once: on the device, and by NumPy."""
    given = {key: value for key, value in options.items() if key != "half"}
    shown = {"dataset": "synthetic", "image_size": size, "micro_batch_size": batch}
    config = config_from(shown | given)
    spec = preprocess_spec(config.data, config.augment, describe_dataset(config.data), 3)
    spec = spec.at_size((size // 2, size // 2)) if "half" in options else spec
    images = np.random.default_rng(0).integers(0, 256, (4 * batch, size, size, 3), np.uint8)
    labels, index = np.zeros(4 * batch, np.int32), np.arange(batch, dtype=np.int32)
    resident = jax.device_put({"images": images, "labels": labels})
    block = jax.device_put({"index": index, "epoch": np.uint32(1)})
    run = jax.jit(lambda resident, block: fetch(resident, block, spec, train=True))
    return (
        lambda: jax.block_until_ready(run(resident, block)),
        lambda: preprocess(images[index], index, 1, spec, True),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    for name, default in (("--batch", 128), ("--size", 32), ("--rounds", 7)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    works = {name: make(way, options.batch, options.size) for name, way in WAYS.items()}
    best: dict[str, list[float]] = {name: [np.inf, np.inf] for name in works}
    for _ in range(options.rounds + 1):  # the first compiles
        for name, pair in works.items():
            for side, work in enumerate(pair):
                begin = time.perf_counter()
                work()
                best[name][side] = min(best[name][side], time.perf_counter() - begin)
    about = {"batch": options.batch, "size": options.size, "rounds": options.rounds}
    about |= {"device": jax.devices()[0].device_kind, "machine": platform.machine(), "jax": jax.__version__}
    print(json.dumps(about))
    for name, (device, host) in best.items():
        print(json.dumps({"what": name, "device_ms": round(device * 1e3, 2), "host_ms": round(host * 1e3, 2)}))


if __name__ == "__main__":
    main()
