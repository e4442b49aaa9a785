"""The rules by which options that nobody gave are chosen: one each, from numbers and names alone."""

import math
from collections.abc import Callable, Mapping

from headrace.rows.optimizers import OPTIMIZERS

# The rules: one each, from the number of training images, the optimizer and the device; docs/howto/training.md has them
# as a table, and what was measured with them.


# The square root of the number of images makes as many steps per epoch as there are images in a batch: 15 steps of 16
# for 244 images, 195 of 256 for 50,000, 1,250 of 1,024 for ImageNet.
LARGEST_BATCH = 1024
LEAST_PER_REPLICA = 8  # images, for the statistics of batch norm; a quarter of the dataset is enough

# Rates grow with the square root of the batch. For SGD with momentum 0.9 this is the usual 0.4 for ImageNet at 1,024,
# and between 0.1 and 0.2 for CIFAR at 128 to 256.
USUAL_MOMENTUM = 0.9
# In fewer steps than this, weights from scratch do not recover from the usual rate: a ResNet-18 that trains for 60
# steps of 16 photographs at 0.05 first loses what it starts with (loss 0.7, then 7).
STEPS_OF_USUAL_RATE = 200
LEAST_SHARE = 0.3  # a trial of a few steps should still move the weights

# Photographs from nothing, in few epochs, with the network's parts of Imagenette's leaderboard. On an accelerator Muon,
# whose rate falls in a line to 0: it reached 86 to 88 % where Ranger, the leaderboard's recipe, reached 81 to 82 %. On
# a CPU making its momentum orthogonal takes several times the rest of a step: there Ranger (RAdam with lookahead, at a
# constant rate that falls as a cosine at the end). docs/howto/training.md has the numbers. Smaller and larger sets keep
# SGD.
FEWEST_PHOTOGRAPHS, MOST_PHOTOGRAPHS = 1_000, 30_000
MUON: Mapping[str, object] = {
    "optimizer": "muon",
    "optimizer_params": {"momentum": 0.9, "other_rate": 0.1, "half": True},
    "l2_regularization": 0.0,
    "lr_schedule": "linear",
}
RANGER: Mapping[str, object] = {
    "optimizer": "radam",
    "optimizer_params": {"beta1": 0.95, "beta2": 0.99, "epsilon": 1e-6},
    "lookahead": 6,
    "weight_decay": 0.01,
    "weight_decay_exclude": ("beta$", "gamma$", "bias$"),
    "l2_regularization": 0.0,
    "lr_schedule": "flat_cosine",
}
QUICK_PARTS: Mapping[str, object] = {
    "stem": "deep",
    "shortcut": "projection",
    "downsample": "max-blur",
    "activation": "mish",
    "zero_init_residual": True,
}
QUICK_CROPS = (0.35, 1.0)  # of an image's area
SHORT_CROPS, MOST_SHORT_EPOCHS = (0.5, 1.0), 10  # with Muon: in few epochs there is little to be learnt by heart
MUON_RATE = 0.0031  # for one image; times the root of the batch
LARGEST_MUON_BATCH = 64  # as it was measured
RANGER_RATE = 0.001  # for one image; times the root of the batch
MOST_RANGER_RATE = 0.008
LEAST_BATCH = 32  # of photographs, where few epochs leave few steps

# From trained weights, the last layer is new and learns at the usual rate, the others at a tenth of it; half of
# the steps are enough. benchmarks/dated/2026-11-16-finetuning.md has what was measured.
FINE_TUNING = 0.1

LEAST_EPOCHS, MOST_EPOCHS = 30, 100
MOST_EPOCHS_IN_TIME = 1000  # with a time budget; where the whole curve is passed in more, it is passed slower
LEAST_STEPS = 600  # small datasets get more epochs, up to MOST_EPOCHS
FEWEST_EPOCHS = 10  # from trained weights
MOST_WARMUP = 5.0  # epochs
LEAST_STATISTICS, MOST_STATISTICS = 0.5, 0.9
USUAL_STATISTICS, STEPS_OF_USUAL_STATISTICS = 0.97, 2000

# Fraction of the memory that the plan's estimate may take. XLA takes three quarters of an accelerator; on the CPU a
# step needs twice the estimate (memory.py), and the host has other things to do.
MEMORY_SHARE: Mapping[str, float] = {"cpu": 0.35, "gpu": 0.6, "tpu": 0.6}
ASSUMED_MEMORY = 16 << 30  # of an accelerator whose memory is not known


def choose_batch(num_images: int, num_replicas: int, accumulation: int) -> int:
    """Return the images of one step: the power of two nearest to the root of their number, and whole micro batches."""
    root = 2 ** round(math.log2(max(1, num_images)) / 2)
    wanted = max(min(root, LARGEST_BATCH), min(LEAST_PER_REPLICA * num_replicas, num_images // 4))
    unit = num_replicas * accumulation
    return max(1, round(wanted / unit)) * unit


def choose_micro_batch(images_per_replica: int, fits: Callable[[int], bool]) -> int:
    """Return the largest micro batch that fits: all images of a replica, or a half, a quarter, ... of them."""
    micro = images_per_replica
    while micro % 2 == 0 and not fits(micro):
        micro //= 2
    return micro


def choose_short_batch(batch: int, num_images: int, num_epochs: float) -> int:
    """Return the batch halved until so many epochs have enough steps, but no less than `LEAST_BATCH`."""
    while batch % 2 == 0 and batch // 2 >= LEAST_BATCH and num_images // batch * num_epochs < LEAST_STEPS:
        batch //= 2
    return batch


def choose_muon_rate(batch: int) -> float:
    return float(f"{MUON_RATE * math.sqrt(batch):.2g}")


def choose_ranger_rate(batch: int) -> float:
    return float(f"{min(RANGER_RATE * math.sqrt(batch), MOST_RANGER_RATE):.2g}")


def choose_epochs(steps_per_epoch: int, *, fine_tuning: bool = False) -> int:
    least, steps, most = LEAST_EPOCHS, LEAST_STEPS, MOST_EPOCHS
    if fine_tuning:
        least, steps, most = FEWEST_EPOCHS, steps // 2, most // 2
    return min(max(least, math.ceil(steps / steps_per_epoch)), most)


def choose_rate(optimizer: str, momentum: float | None, batch: int) -> float:
    """Return the peak learning rate of a step. Less momentum makes each gradient count less often: the rate grows."""
    rate = OPTIMIZERS[optimizer].usual_rate * math.sqrt(batch / 1024)
    if momentum is not None and optimizer in ("sgd", "momentum"):
        rate *= min(1 - momentum, 0.5) / (1 - USUAL_MOMENTUM)  # without any, ten times the rate is too much at first
    return float(f"{rate:.2g}")


def choose_short_rate(rate: float, num_steps: int) -> float:
    """Return the peak learning rate of a run of so many steps, given that of a long one."""
    return float(f"{rate * min(max(math.sqrt(num_steps / STEPS_OF_USUAL_RATE), LEAST_SHARE), 1.0):.2g}")


def choose_statistics_momentum(num_steps: int) -> float:
    """Return the share of batch norm's running statistics that a step keeps: they are means over a 30th of a short run.

    While the rate is high, statistics that are ten steps old are those of another network, and each norm multiplies
    the error of those before it: 0.9 gave validation losses of thousands after 15 steps of a ResNet-18, 0.5 of tens.
    """
    if num_steps >= STEPS_OF_USUAL_STATISTICS:
        return USUAL_STATISTICS
    return min(max(round(1 - 30 / num_steps, 1), LEAST_STATISTICS), MOST_STATISTICS)


def choose_warmup(num_epochs: int) -> float:
    """Return the epochs of the warm-up: a tenth of the run."""
    return min(MOST_WARMUP, num_epochs / 10)


def memory_allowed(platform: str, memory_bytes: int | None) -> int | None:
    """Return how many bytes the plan's estimate may take on a device; None for a host whose memory is not known."""
    if memory_bytes is None and platform == "cpu":
        return None
    return int((memory_bytes or ASSUMED_MEMORY) * MEMORY_SHARE.get(platform, 0.6))


def choose_precision(platform: str, *, bfloat16: bool) -> tuple[str, str]:
    """Return the precision and why."""
    name = {"gpu": "GPU", "tpu": "TPU", "cpu": "CPU"}.get(platform, platform)
    if platform == "cpu":
        return "32.32", name
    return ("16.32", f"{name}, bfloat16") if bfloat16 else ("32.32", f"{name} without bfloat16")
