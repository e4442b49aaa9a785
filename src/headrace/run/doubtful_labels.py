"""Labels that a trained network disagrees with: of images that it was not trained on."""

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from headrace.core.errors import ConfigError
from headrace.data.sets.samples import FileSamples
from headrace.data.survey import Survey, Surveyed
from headrace.report.data_report import Doubt, Doubts
from headrace.run.prediction import predict
from headrace.run.read_weights import find_weights
from headrace.run.sweep import FOLD, fold_file, is_sweep, read_sweep


def doubtful_labels(found: Survey, place: str) -> Doubts:
    """Return the images that a run, or the runs of folds of a sweep, take for another class than their label."""
    if not isinstance(found.images.train, FileSamples) or not isinstance(found.images.validation, FileSamples):
        raise ConfigError(f"The images of {found.images.place} are not files.", remedy="Leave --run out.")
    files = {os.path.abspath(each.name): each for each in found.readable}  # noqa: PTH100 (links stay links)
    shares: dict[str, list[np.ndarray]] = {}
    path = Path(place)
    if is_sweep(path):
        how = _judge_by_folds(path, found, files, shares)
    else:
        _judge(place, found, [name for name, each in files.items() if each.split == 1], shares)
        how = f"The network of {place} judged the validation images, on which it was not trained."
    doubts = []
    for name, rows in shares.items():
        mean, each = np.mean(rows, 0), files[name]
        best = int(mean.argmax())
        if best != each.label:
            doubts.append(
                Doubt(
                    image=each,
                    predicted=found.images.class_names[best],
                    probability=float(mean[best]),
                    own=float(mean[each.label]),
                )
            )
    return Doubts(found=sorted(doubts, key=lambda each: each.own - each.probability), judged=len(shares), how=how)


def _judge_by_folds(path: Path, found: Survey, files: dict[str, Surveyed], shares: dict[str, list[np.ndarray]]) -> str:
    sweep = read_sweep(path)
    runs = [run for run in sweep.runs if FOLD in run.values and sweep.is_done(run)]
    if not runs:
        raise ConfigError(f"{path} has no finished run of a fold.", remedy="headrace sweep IMAGES --folds 5")
    for run in runs:
        with fold_file(path, int(run.values[FOLD])).open(newline="", encoding="utf-8") as lines:
            held_out = [row["path"] for row in csv.DictReader(lines) if row["split"] == "val"]
        _judge(str(sweep.path(run)), found, [name for name in held_out if name in files], shares)
    return f"{len(runs)} networks of {path} judged the images of their folds, on which they were not trained."


def _judge(place: str, found: Survey, names: Sequence[str], shares: dict[str, list[np.ndarray]]) -> None:
    if not names:
        raise ConfigError(
            f"None of these images was held out from {place}.",
            rule="A network says little about images that it was trained on.",
            remedy="Make runs of folds: headrace sweep IMAGES --folds 5",
        )
    weights = find_weights(place, "auto")
    order = _order(weights.class_names, found.images.class_names, place)
    for name, one in zip(names, predict(weights, [Path(name) for name in names], 1, keep_shares=True), strict=True):
        if not one.problem:
            shares.setdefault(name, []).append(np.array(one.shares)[order])


def _order(of_model: Sequence[str], of_data: Iterable[str], place: str) -> list[int]:
    """Return the place of each class of the data among those of the model."""
    places = {name: k for k, name in enumerate(of_model)}
    missing = [name for name in of_data if name not in places]
    if missing:
        raise ConfigError(
            f"{place} does not know the class {missing[0]}.", rule="The run and the images have the same classes."
        )
    return [places[name] for name in of_data]
