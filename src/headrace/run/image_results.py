"""The validation images of a run, seen by its best weights: images.json."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from headrace.config.load import override
from headrace.config.schema import Config
from headrace.core.files import write_atomic
from headrace.data.augmentation.preprocess import preprocess
from headrace.data.sets.source import Source
from headrace.engine.devices import start_run_devices
from headrace.engine.objective import SCORES
from headrace.report.images import THUMBNAIL, image_address, thumbnail
from headrace.report.run_files import IMAGES_FILE
from headrace.rows.row import Scale, Task
from headrace.rows.tasks import CLASSIFICATION, MULTILABEL
from headrace.run.calibration import area_under_roc, calibration, notable_images, threshold_table, top_k
from headrace.run.design import Design, design_run, open_data
from headrace.run.directory import read_run
from headrace.run.prediction import Prediction, read_image
from headrace.run.read_weights import read_weights
from headrace.run.validation import only_validating
from headrace.run.validator import predict_all
from headrace.telemetry.validation_report import validation_report
from headrace.weights.input_form import InputForm
from headrace.weights.weights import EMA, RAW, Weights

_WORST = 24  # images of labels or numbers
_TINY = 1e-12  # a smaller probability is taken for this one
_MOSAIC = 16  # training images in the mosaic


def write_image_results(run: Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """Predict every validation image of a run with its best weights; write what its report needs, and return the file.

    The file stays small (a few hundred KB at most): numbers, and thumbnails of some fifty images.
    """
    config = override(read_run(run)[1], {"dry_run_steps": None} | dict(overrides or {})).config
    found, design, train = _predict_validation(read_weights(run).only(), config)
    mosaic = _mosaic(design, train) if len(train) else ""
    write_atomic(run / IMAGES_FILE, json.dumps(found.images | {"mosaic": mosaic}).encode())
    return run / IMAGES_FILE


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What one set of weights says of labelled images: of single ones and in sum."""

    images: dict[str, Any]
    report: dict[str, Any]


def evaluate_validation(checkpoint: Path, overrides: Mapping[str, object], weights: str) -> Evaluated:
    """Predict the validation images with these weights of a checkpoint: raw, ema, or the label of an average."""
    chosen = read_weights(checkpoint).only(weights if weights == EMA else RAW)
    assert chosen.resolved is not None
    config = override(chosen.resolved, {"dry_run_steps": None} | dict(overrides)).config
    return _predict_validation(chosen, config)[0]


def evaluate_files(weights: Weights, found: Sequence[Prediction], labels: Sequence[int]) -> Evaluated:
    """Return what predictions of readable files with these classes amount to."""
    source = _file_source(weights.form, [prediction.file for prediction in found], labels)
    return _evaluated(weights, np.array([prediction.shares for prediction in found], np.float64), source)


def _evaluated(weights: Weights, probabilities: np.ndarray, source: Source) -> Evaluated:
    if weights.task is not CLASSIFICATION:
        return _of_outputs(weights, probabilities, source)
    facts = {"checkpoint": Path(weights.origin).name, "weights": weights.label, "step": weights.step}
    return Evaluated(
        images=facts | image_results(probabilities, source, weights.class_names),
        report=report_of(probabilities, source.labels, weights.class_names),
    )


def _of_outputs(weights: Weights, answers: np.ndarray, source: Source) -> Evaluated:
    """Return the same of labels or numbers: the report, and the images that are the furthest from right."""
    task, scale, names = weights.task, weights.scale, weights.class_names
    if task is MULTILABEL:
        wrong = np.abs(answers - source.labels).max(1)
        logits = np.log(np.maximum(answers, _TINY)) - np.log(np.maximum(1 - answers, _TINY))
    else:
        logits = (answers - np.array(scale.mean)) / np.array(scale.std)
        wrong = np.abs(logits - source.labels).max(1)
    sums = {"count": len(answers), SCORES: {"scores": logits.astype(np.float32), "labels": source.labels}}
    rows = [row for row in task.metrics(scale) if row.of_scores]
    worst = np.argsort(-wrong, kind="stable")[:_WORST]
    images = {
        "checkpoint": Path(weights.origin).name,
        "weights": weights.label,
        "step": weights.step,
        "task": task.name,
        "num_images": len(answers),
        "mistakes": [_worst(source, int(k), answers[k], (task, scale, names)) for k in worst],
        "hardest": [],
    }
    return Evaluated(images=images, report=validation_report(sums, names, rows, (task, scale)))


def _worst(
    source: Source, number: int, answers: np.ndarray, known: tuple[Task, Scale, Sequence[str]]
) -> dict[str, Any]:
    task, scale, names = known
    label = source.labels[number]
    if task is MULTILABEL:
        worst = int(np.abs(answers - label).argmax())
        text, truth = f"{names[worst]} {task.text(answers[worst])}", ", ".join(np.array(names)[label > 0]) or "no label"
    else:
        true = task.answer(label[None], scale)[0]
        worst = int((np.abs(answers - true) / np.array(scale.std)).argmax())
        text, truth = f"{names[worst]} {task.text(answers[worst])}", task.text(true[worst])
    return {
        "file": source.name(number) if source.name else f"image {number}",
        "text": text,
        "truth": truth,
        "image": thumbnail(source.read(np.array([number]), 0)[0]),
    }


def _file_source(form: InputForm, files: Sequence[Path], labels: Sequence[int]) -> Source:
    """Return image files, read as the model reads them."""

    def read_into(indices: np.ndarray, _epoch: np.ndarray | int, out: np.ndarray) -> None:
        for index, image in zip(indices, out, strict=True):
            read_image(form, files[index], image)

    return Source(
        labels=np.array(labels, np.int32),
        image_hwc=form.image_hwc,
        num_distinct=len(files),
        read_into=read_into,
        slow=True,
        name=lambda number: str(files[number]),
    )


def _predict_validation(weights: Weights, config: Config) -> tuple[Evaluated, Design, Source]:
    """Predict the validation split; return what is said of its images, the design, and the training split."""
    design = design_run(only_validating(config))
    dataset = open_data(design)
    devices = start_run_devices(config.run, design.plan.validation.num_devices)
    logits = predict_all(design, dataset, devices, weights.raw)
    return _evaluated(weights, weights.answers(logits), dataset.validation), design, dataset.train


def report_of(probabilities: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Return the validation report of these probabilities [N, classes]."""
    every = np.arange(len(labels))
    ranked = np.argsort(-probabilities, axis=1, kind="stable")[:, :5]
    confusion = np.zeros((len(names), len(names)), np.int64)
    np.add.at(confusion, (labels, ranked[:, 0]), 1)
    sums = {
        "count": len(labels),
        "top1": (ranked[:, 0] == labels).sum(),
        "top5": (ranked == labels[:, None]).any(1).sum(),
        # A probability that underflowed to 0 would make the mean infinite.
        "loss": -np.log(np.maximum(probabilities[every, labels], np.finfo(np.float64).tiny)).sum(),
        "confusion": confusion,
    }
    return validation_report(sums, names)


def image_results(probabilities: np.ndarray, source: Source, names: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of these probabilities [N, classes], and the notable images of the source."""
    labels = source.labels
    chosen = notable_images(probabilities, labels)
    found: dict[str, Any] = {
        "num_images": len(labels),
        "calibration": calibration(probabilities, labels),
        "top_k": top_k(probabilities, labels),
        "mistakes": [_notable(source, k, probabilities[k], names) for k in chosen.mistakes],
        "hardest": [_notable(source, k, probabilities[k], names) for k in chosen.hardest],
    }
    if len(names) == 2:
        score, positive = probabilities[:, 1], labels == 1
        found["positive"] = names[1]
        found["thresholds"], found["auc"] = threshold_table(score, positive), area_under_roc(score, positive)
    return found


def _notable(source: Source, number: int, shares: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    true, predicted = int(source.labels[number]), int(shares.argmax())
    return {
        # Images in memory have a number only.
        "file": source.name(number) if source.name else f"image {number}",
        "true": names[true],
        "predicted": names[predicted],
        "probability": float(shares[predicted]),
        "true_probability": float(shares[true]),
        "image": thumbnail(source.read(np.array([number]), 0)[0]),
    }


def _mosaic(design: Design, train: Source) -> str:
    """Return some training images as the network gets them: cropped and augmented, colors mapped back."""
    spec = design.plan.feed.preprocess
    # From the whole set, whose order is that of the classes.
    index = np.linspace(0, len(train) - 1, min(_MOSAIC, len(train))).astype(np.int64)
    images = train.read(index, 0).astype(np.float32)
    # There are several normalisations: where black and white end up tells how to map any of them back.
    ends = [preprocess(np.full_like(images, level), index, 0, spec, train=False) for level in (0.0, 255.0)]
    values = np.asarray(preprocess(images, index.astype(np.uint32), 0, spec, train=True))
    black, white = (end.reshape(-1, end.shape[-1])[0] for end in ends)
    levels = np.clip((values - black) / np.where(white == black, 1, white - black) * 255, 0, 255)
    height, width, channels = levels.shape[1:]
    across = min(8, len(index))
    sheet = np.zeros((-(-len(index) // across) * height, across * width, channels), np.float32)
    for k, each in enumerate(levels):
        top, left = k // across * height, k % across * width
        sheet[top : top + height, left : left + width] = each
    image = Image.fromarray(np.rint(sheet[..., 0] if channels == 1 else sheet[..., :3]).astype(np.uint8))
    image.thumbnail((8 * THUMBNAIL, 8 * THUMBNAIL))
    return image_address(image, "PNG")
