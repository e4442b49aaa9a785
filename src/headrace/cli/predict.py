"""`headrace predict`: the classes of images."""

import argparse
import csv
import io
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.options import WHICH, add_model_arguments, check_output, model_and_weights, writing
from headrace.cli.tables import terminal_width
from headrace.config.command_line import Parser
from headrace.core.errors import ConfigError
from headrace.core.files import write_atomic
from headrace.core.local_path import STORES, local_path, local_text
from headrace.core.stored_copy import here
from headrace.core.units import format_percent
from headrace.rows.tasks import CLASSIFICATION, MULTILABEL

if TYPE_CHECKING:
    from headrace.run.prediction import Prediction
    from headrace.weights.weights import Weights


SOME_UNREADABLE = 1
_HALF, _TUNED = "0.5", "tuned"  # of --threshold
_NARROWEST = 20  # characters of a file's name on a terminal
_WIDEST = 60  # characters of a file's name to which others are aligned
_LEAST = 0.00005  # of a probability that is not printed as 0.00 %
DESCRIPTION = (
    "Predict the classes, labels or numbers of images (JPEG, PNG, WebP, TIFF and others), prepared as in validation. "
    f"Images that cannot be read are listed at the end, and the exit code is {SOME_UNREADABLE}."
)


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace predict", description=DESCRIPTION)
    _add_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    for flag, count in (("--top-k", args.top_k), ("--batch-size", args.batch_size)):
        if count < 1:
            raise ConfigError(f"{flag} is {count}.", rule="It must be 1 or more.")
    if args.features and (args.output is None or args.output.suffix not in (".npz", ".csv") or args.format):
        raise ConfigError(
            f"--features with --output {args.output}{f' and --format {args.format}' if args.format else ''}.",
            rule="Features are written to a file, as its suffix says: .npz or .csv.",
            remedy="Add --output features.npz, and leave --format out.",
        )
    form = _format(args.format, None if args.features else args.output)
    for file, flag in ((args.output, "--output"), (args.page, "--page")):
        check_output(file, flag)
    by_name = args.weights not in ("", *WHICH)
    model_path, paths = (None, args.paths) if by_name else (args.paths[0], args.paths[1:])
    name, which = model_and_weights(model_path, args.weights, args.use)
    if not paths:
        raise ConfigError("At least one image is required.", remedy="Name files or folders: RUN_DIR IMAGE ...")
    from headrace.engine.devices import run_in_calling_thread, start_devices
    from headrace.run.prediction import find_images, labels_by_folder, predict, with_flip
    from headrace.run.read_weights import find_weights

    weights = with_flip(find_weights(name, which), args.flip)
    files = find_images([here(local_text(path, "The image", STORES)) for path in paths])
    task = weights.task
    thresholds = _thresholds(weights, args.threshold)
    labels = labels_by_folder(files, weights.class_names) if task is CLASSIFICATION else []
    if args.page and not labels:
        raise ConfigError(
            "--page needs to know the classes of the images.",
            rule="Only classes are known by folders."
            if task is not CLASSIFICATION
            else "The folder of each image names its class: " + ", ".join(weights.class_names[:5]) + " ...",
            remedy="Leave --page out, or sort the images into folders.",
        )
    run_in_calling_thread()  # before the devices start: afterwards it has no effect
    start_devices(args.platform, 1)
    most = min(args.top_k, len(weights.class_names))
    if args.features:
        return _write_features(weights, files, args)
    every = labels or task is not CLASSIFICATION
    found = list(predict(weights, files, most, args.batch_size, keep_shares=bool(every)))
    if task is CLASSIFICATION:
        text = _FORMATS[form](found, weights.class_names, [weights.class_names[label] for label in labels])
    else:
        text = _OUTPUT_FORMATS[form](found, weights, thresholds)
    if args.output is None:
        print(text, end="")
    else:
        with writing(args.output, "--output"):
            write_atomic(args.output, text.encode())
    if labels:
        lines = _evaluate(weights, found, labels, args.page)
        print(*lines, sep="\n", file=sys.stdout if form == "table" and args.output is None else sys.stderr)
    bad = [prediction for prediction in found if prediction.problem]
    for prediction in bad:
        word = "unreadable" if prediction.file.exists() else "missing"
        print(f"{word}: {prediction.file}: {prediction.problem}", file=sys.stderr)
    if bad:
        print(f"{len(bad)} of {len(found)} images could not be read", file=sys.stderr)
    return SOME_UNREADABLE if bad else 0


def _write_features(weights: "Weights", files: Sequence[Path], args: argparse.Namespace) -> int:
    from headrace.run.features import features_of_files, write_features

    found = features_of_files(weights, files, args.batch_size)
    with writing(args.output, "--output"):
        write_atomic(args.output, write_features(args.output, [str(file) for file in files], found))
    print(f"written: {args.output} ({found.shape[0]:,} images, {found.shape[1]:,} features each)")
    return 0


def _thresholds(weights: "Weights", asked: str) -> list[float]:
    """Return the probability of each label from which on it is answered."""
    if weights.task is not MULTILABEL:
        if asked != _HALF:
            raise ConfigError(
                f"--threshold {asked} for a network of the task {weights.task.name}.",
                rule="Labels that an image may have or not are answered from a probability on.",
                remedy="Leave --threshold out.",
            )
        return []
    if asked == _TUNED:
        from headrace.run.tuned_thresholds import tuned_thresholds

        return tuned_thresholds(weights)
    try:
        threshold = float(asked)
    except ValueError:
        threshold = math.nan
    if not 0 <= threshold <= 1:
        raise ConfigError(f"--threshold is {asked}.", rule=f"It is a probability from 0 to 1, or the word {_TUNED}.")
    return [threshold] * len(weights.class_names)


def _output_table(found: "Sequence[Prediction]", weights: "Weights", thresholds: Sequence[float]) -> str:
    """Return the labels that each image has, the likeliest first, or the numbers."""
    names, task = weights.class_names, weights.task
    texts = []
    for prediction in found:
        kept = [
            (number, value)
            for number, value in sorted(enumerate(prediction.shares), key=lambda pair: -pair[1] if thresholds else 0)
            if not thresholds or value >= thresholds[number]
        ]
        texts.append(", ".join(f"{names[number]} {task.text(value)}" for number, value in kept) or _nothing(prediction))
    return _aligned(found, texts)


def _nothing(prediction: "Prediction") -> str:
    if not prediction.problem:
        return "(no label)"
    return "(unreadable)" if prediction.file.exists() else "(missing)"


def _output_csv(found: "Sequence[Prediction]", weights: "Weights", thresholds: Sequence[float]) -> str:
    """Return a column for each label or target; of labels, another one with those that are answered."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = weights.class_names
    writer.writerow(["file", *(["labels"] if thresholds else []), *names, "problem"])
    for prediction in found:
        values = [f"{value:.6f}" if thresholds else f"{value:.9g}" for value in prediction.shares] or [""] * len(names)
        answered = [" | ".join(_answered(prediction, names, thresholds))] if thresholds else []
        writer.writerow([prediction.file, *answered, *values, prediction.problem])
    return text.getvalue()


def _answered(prediction: "Prediction", names: Sequence[str], thresholds: Sequence[float]) -> list[str]:
    pairs = zip(names, prediction.shares, thresholds, strict=False)
    return [name for name, share, threshold in pairs if share >= threshold]


def _output_json(found: "Sequence[Prediction]", weights: "Weights", thresholds: Sequence[float]) -> str:
    names = weights.class_names
    rows = [
        {"file": str(prediction.file)}
        | ({"labels": _answered(prediction, names, thresholds)} if thresholds else {})
        | {weights.task.answers: dict(zip(names, prediction.shares, strict=False))}
        | ({"problem": prediction.problem} if prediction.problem else {})
        for prediction in found
    ]
    return json.dumps(rows, indent=1) + "\n"


def _table(found: "Sequence[Prediction]", names: Sequence[str], truth: Sequence[str]) -> str:
    del truth  # the accuracy is printed below
    texts = []
    for prediction in found:
        kept = [place for place in prediction.best if place is prediction.best[0] or place[1] >= _LEAST]
        best = [f"{names[number]} {format_percent(share)}" for number, share in kept]
        texts.append(", ".join(best) or _nothing(prediction))
    return _aligned(found, texts)


def _aligned(found: "Sequence[Prediction]", texts: Sequence[str]) -> str:
    """Return a line for each image."""
    files = [str(prediction.file) for prediction in found]
    wide = min(max(map(len, files)), _WIDEST)
    if width := terminal_width():  # a long name keeps its end there, and the line is not broken
        room = max(width - 2 - max(map(len, texts)), _NARROWEST)
        files = [file if len(file) <= room else f"...{file[3 - room :]}" for file in files]
        wide = min(wide, room)
    return "".join(f"{file:{wide}}  {text}\n" for file, text in zip(files, texts, strict=True))


def _evaluate(weights: "Weights", found: "Sequence[Prediction]", labels: Sequence[int], page: Path | None) -> list[str]:
    """Write the page, if any; return how good the predictions are, in lines."""
    from headrace.report.run_report import evaluation_lines, write_evaluation
    from headrace.run.image_results import evaluate_files

    pairs = [(prediction, label) for prediction, label in zip(found, labels, strict=True) if prediction.best]
    if not pairs:
        return []
    done = evaluate_files(weights, [prediction for prediction, _ in pairs], [label for _, label in pairs])
    right = sum(row["num_correct"] for row in done.report["classes"])
    text = f"accuracy {format_percent(right / len(pairs))}: {right:,} of {len(pairs):,} images are of the class "
    lines = [text + "that their folder names", *evaluation_lines(done.images, done.report)]
    if page:
        with writing(page, "--page"):
            write_evaluation(page, done.images, done.report, f"{len(pairs):,} images in folders")
        lines.append(f"written: {page}")
    return lines


def _csv(found: "Sequence[Prediction]", names: Sequence[str], truth: Sequence[str]) -> str:
    count = max((len(prediction.best) for prediction in found), default=0)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = [f"{word}_{place}" for place in range(1, count + 1) for word in ("class", "probability")]
    writer.writerow(["file", *columns, "problem", *(["true_class"] if truth else [])])
    for prediction, *true_class in zip(found, truth, strict=True) if truth else zip(found, strict=True):
        cells = [cell for number, share in prediction.best for cell in (names[number], f"{share:.6f}")]
        writer.writerow([prediction.file, *cells, *[""] * (2 * count - len(cells)), prediction.problem, *true_class])
    return text.getvalue()


def _json(found: "Sequence[Prediction]", names: Sequence[str], truth: Sequence[str]) -> str:
    rows = [
        {
            "file": str(prediction.file),
            "predictions": [
                {"class": names[label], "label": label, "probability": share} for label, share in prediction.best
            ],
        }
        | ({"problem": prediction.problem} if prediction.problem else {})
        | ({"true_class": truth[number]} if truth else {})
        for number, prediction in enumerate(found)
    ]
    return json.dumps(rows, indent=1) + "\n"


_FORMATS = {"table": _table, "csv": _csv, "json": _json}
_OUTPUT_FORMATS = {"table": _output_table, "csv": _output_csv, "json": _output_json}
_SUFFIXES = {".csv": "csv", ".json": "json", ".txt": "table"}


def _format(given: str | None, output: Path | None) -> str:
    """Return the format of the result: the one given, or that of the file's suffix; they may not contradict."""
    by_suffix = _SUFFIXES.get(output.suffix.lower()) if output else None
    if given and by_suffix and given != by_suffix:
        raise ConfigError(
            f"--format {given} with --output {output}.",
            rule=f"A file that ends in {output.suffix if output else ''} has the format {by_suffix}.",
            remedy="Leave --format out, or give the file another suffix.",
        )
    return given or by_suffix or "table"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        help="a run (its best weights) or checkpoint, unless --weights names some; then images, and folders of images",
    )
    parser.add_argument("--top-k", type=int, default=5, metavar="K", help="how many classes of each image [5]")
    parser.add_argument(
        "--format", choices=tuple(_FORMATS), help="format of the result [by --output's suffix, else table]"
    )
    parser.add_argument("--output", type=local_path, metavar="FILE", help="file to write it to [the console]")
    parser.add_argument(
        "--page",
        type=local_path,
        metavar="FILE",
        help="write an HTML page too, of images in folders named after classes",
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--features",
        action="store_true",
        help="write what the last layer scores, a row of numbers for each image, into --output (.npz or .csv)",
    )
    parser.add_argument(
        "--threshold",
        default=_HALF,
        metavar=f"X|{_TUNED}",
        help="of several labels: the probability from which on a label is answered, or each label's with the best F1 "
        f"in the run's validation [{_HALF}]",
    )
    parser.add_argument(
        "--flip",
        action=argparse.BooleanOptionalAction,
        help="mean scores of an image and of its mirror image, in twice the time [as the run validates]",
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="images at a time [32]")
