"""Average the weights of a run's checkpoints into one with a label that says so, by command or after training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.checkpoint.store import Arrays, list_checkpoints, load, save, verify, weight_tensors
from headrace.config.schema import Config
from headrace.core.errors import CheckpointError, ConfigError, did_you_mean
from headrace.core.files import parse_json
from headrace.run.directory import layout, read_run

# Mean or exponential average, summed in float64.


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


# The average as a checkpoint below RUN.


FOLDER = "averages"
_FROM_NEWEST = ("step", "epoch", "seed", "config", "plan", "class_names", "input", "elapsed_seconds")


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """An average that was written: where, its label, its members, and damaged checkpoints that were skipped."""

    path: Path
    label: str
    members: tuple[str, ...]
    damaged: tuple[tuple[Path, str], ...]


@dataclass(frozen=True, kw_only=True)
class AverageOptions:
    """Which checkpoints are averaged, and how."""

    mode: str = "mean"
    last: int | None = None
    decay: float = 0.99
    discard_last: int = 0
    weights: str = "raw"
    name: str | None = None


def average_run(run: Path, options: AverageOptions) -> Averaged:
    """Average the checkpoints of a run (or of a directory of them); an earlier average of that name is replaced."""
    folder, home = (run, run.parent) if list_checkpoints(run) else _of_run(run)
    for what, number in (("last", options.last), ("discard_last", options.discard_last)):
        if number is not None and number < (1 if what == "last" else 0):
            raise ConfigError(f"{what} is {number}.", rule="It must be a count.")
    paths, damaged = choose(folder, options.last, options.discard_last)
    arrays = average(paths, options.mode, options.decay, options.weights)
    _, manifest = load(paths[-1])
    label = f"{'mean' if options.mode == 'mean' else 'exp'} {len(paths)}"
    how = options.mode if options.mode == "mean" else f"{options.mode}-{options.decay:g}"
    ema = "" if options.weights == "raw" else f"-{options.weights}"
    name = options.name or f"{how}{ema}-{len(paths)}-{paths[-1].name}"
    if Path(name).name != name or name.startswith("."):
        raise ConfigError(f"The name {name!r} cannot be the name of a directory.", remedy="Leave slashes out.")
    given = {key: manifest[key] for key in _FROM_NEWEST if key in manifest}
    members = tuple(path.name for path in paths)
    made = {"mode": options.mode, "of": list(members), "weights": options.weights}
    made |= {"decay": options.decay} if options.mode != "mean" else {}
    path = save(home / FOLDER, name, arrays, given | {"weights": label, "averaged": made})
    return Averaged(path=path, label=label, members=members, damaged=tuple(damaged))


def _of_run(run: Path) -> tuple[Path, Path]:
    directory, resolved = read_run(run)
    return layout(directory.path, resolved.config).checkpoints, directory.path


def averages_after(run: Path, config: Config) -> Iterator[Averaged]:
    """Make the means over the last epochs and the exponential averages of all checkpoints that were asked for."""
    for epochs in config.checkpoint.average_last_epochs or ():
        last = _newest_of(layout(run, config).checkpoints, epochs)
        yield average_run(run, AverageOptions(last=last, name=f"weight_avg_N_{epochs:g}"))
    for decay in config.checkpoint.average_decays or ():
        yield average_run(run, AverageOptions(mode="exponential", decay=decay, name=f"weight_avg_exp_{decay:g}"))


def _newest_of(checkpoints: Path, epochs: float) -> int:
    """Return how many of the newest checkpoints lie in the last epochs, rounded to a tenth as the reference does."""
    manifests = [path / "manifest.json" for path in list_checkpoints(checkpoints)]
    ends = [round(float(parse_json(file.read_bytes())["epoch"]), 1) for file in manifests if file.is_file()]
    return max(1, sum(end >= round(ends[-1] - epochs, 1) for end in ends)) if ends else 1
