"""The mean or exponential average of weights, summed in float64."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.checkpoint.store import Arrays, list_checkpoints, load, verify, weight_tensors
from headrace.core.errors import CheckpointError, ConfigError, did_you_mean

MODES = ("mean", "exponential")


def choose(directory: Path, last: int | None, discard_last: int = 0) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Return the `last` good checkpoints (None: all) before the newest `discard_last`, and damaged ones."""
    good, damaged = [], []
    for path in list_checkpoints(directory):
        # Every byte is read before anything is averaged: a damaged checkpoint would spoil the whole average.
        problems = verify(path)
        if problems:
            damaged.append((path, "; ".join(problems)))
        else:
            good.append(path)
    good = good[: max(0, len(good) - discard_last)]
    wanted = len(good) if last is None else last
    if wanted > len(good) or not good:
        less = f" after discarding {discard_last}" if discard_last else ""
        raise CheckpointError(
            f"An average of {wanted or 'all'} checkpoints was requested; {directory} has {len(good)} good ones{less}.",
            remedy="Take fewer (--last), or save and keep more while training: --ckpts-per-epoch, --max-ckpts-to-keep.",
        )
    return good[len(good) - wanted :], damaged


def average(paths: Sequence[Path], mode: str = "mean", decay: float = 0.99, weights: str = "raw") -> Arrays:
    """Return the average of the checkpoints' weights and statistics (or of their `ema` ones), as float32.

    mean: (w1 + ... + wn) / n. exponential: v = w1, then v = decay v + (1 - decay) w for each later one.
    """
    if mode not in MODES:
        raise ConfigError(f"There is no average {mode!r}.", remedy=did_you_mean(mode, MODES))
    if not 0 <= decay < 1:
        raise ConfigError(f"decay is {decay}.", rule="It must be at least 0 and less than 1.")
    total: dict[str, Any] = {}
    for number, path in enumerate(paths):
        # One at a time: memory holds the total and one checkpoint, however many are averaged.
        found = _weights(path, weights)
        if number and found.keys() != total.keys():
            raise CheckpointError(f"{path} and {paths[0]} hold different tensors.", remedy="Average one run at a time.")
        for name, array in found.items():
            # A mean of a thousand float32 weights summed in float32 would lose three digits.
            new = array.astype(np.float64)
            if not number:
                total[name] = new
            elif total[name].shape != new.shape:
                raise CheckpointError(f"{name} has another shape in {path} than in {paths[0]}.")
            else:
                total[name] = total[name] + new if mode == "mean" else decay * total[name] + (1 - decay) * new
    count = len(paths) if mode == "mean" else 1
    return {name: (array / count).astype(np.float32) for name, array in total.items()}


def _weights(path: Path, weights: str) -> Arrays:
    found = weight_tensors(load(path)[0], weights)
    if not found:
        raise CheckpointError(f"{path} holds no {weights} weights.", remedy="Average its raw ones: --weights raw.")
    return found
