"""The model card of a run: README.md of a repository on the Hugging Face hub, from what the run recorded.

Nothing of the machine that it was trained on is in it but its devices: no paths, no names of runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from headrace.config.field import DEFAULT
from headrace.config.schema import all_options
from headrace.core.units import format_count, format_duration, format_percent
from headrace.report.run_files import RunFiles, read_mapping
from headrace.report.run_summary import wilson_interval
from headrace.rows.values import PATH
from headrace.telemetry.records import ValidationRecord
from headrace.telemetry.validation_report import report_file

CARD_FILE = "README.md"
# A card without it was edited by hand, and is left as it is.
MARK = "<!-- Made by `headrace push`, which replaces this file unless this line is removed. -->"
_TOLD = ("run", "data", "augment", "model", "weights", "batch", "numerics", "learning")  # sections of options
_UNTOLD = ("dataset_path", "platform", "first_device", "compilation_cache_dir", "profile", "distributed", "download")
_MOST_CLASSES = 50  # with a row of their own


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a card is made from; `files` are those of the run, None for weights from elsewhere."""

    repository: str  # OWNER/NAME
    described: Mapping[str, Any]  # the part of config.json that is ours
    num_parameters: int
    architecture: str = ""  # timm's name, where timm loads the weights
    license: str = ""
    files: RunFiles | None = None

    @property
    def measured(self) -> ValidationRecord | None:
        """The validation of exactly these weights, where the run made one on its whole validation part."""
        run = self.files.summary if self.files else None
        if run is None or run.is_trial:
            return None
        said = (self.described["step"], self.described["weights"])
        return next((each for each in run.validations if (each.step, each.weights) == said), None)


def card_text(card: Card) -> str:
    """Return the text of the card."""
    parts = (_head(card), _title(card), _accuracy(card), _use(card), _data(card), _recipe(card), MARK)
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(card: Card) -> str:
    """Return the card's metadata, by which the hub files it."""
    head: dict[str, Any] = {"library_name": "timm" if card.architecture else "headrace"}
    if card.license:
        head["license"] = card.license
    head["pipeline_tag"] = "image-classification"
    head["tags"] = ["image-classification", "headrace", *(["timm"] if card.architecture else [])]
    measured, files = card.measured, card.files
    if measured is not None and files is not None:
        data = {"name": files.summary.dataset, "type": files.summary.dataset, "split": "validation"}
        values = {"accuracy": measured.top1, "loss": measured.loss}
        metrics = [{"type": name, "value": value} for name, value in values.items() if value == value]
        task = {"type": "image-classification", "name": "Image Classification"}
        results = [{"task": task, "dataset": data, "metrics": metrics}]
        head["model-index"] = [{"name": card.repository.partition("/")[2], "results": results}]
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---"


def _title(card: Card) -> str:
    about = card.described
    height, width, channels = about["image_hwc"]
    kind = "grey" if channels == 1 else "colour"
    run = card.files.summary if card.files else None
    on = f", trained on {_plain(run.dataset)}" if run and run.start else ""
    lines = [
        f"# {card.repository.partition('/')[2]}",
        "",
        f"{about['model']} with {format_count(card.num_parameters)} parameters{on}: {len(about['class_names']):,} "
        f"classes of {kind} images of {height}x{width} pixels.",
    ]
    verdict = run.end.model_verdict if run and run.end else ""
    return "\n".join([*lines, *(["", f"**{verdict}**"] if verdict else [])])


def _accuracy(card: Card) -> str:
    lines = ["## Accuracy", ""]
    measured = card.measured
    if measured is None:
        return "\n".join([*lines, "Not measured: no validation of exactly these weights is recorded."])
    count = measured.num_samples
    if measured.top1 is None:
        rows = [(name, f"{value:.4g}, of {count:,} images") for name, value in (measured.metrics or {}).items()]
        return "\n".join([*lines, *(f"- {name}: {text}" for name, text in [*rows, ("loss", f"{measured.loss:.4g}")])])
    low, high = wilson_interval(measured.top1, count)
    metrics = measured.metrics or {}
    rows = [
        ("top-1", f"{format_percent(measured.top1)}: {round(measured.top1 * count):,} of {count:,} images"),
        ("with a certainty of 95 %", f"{100 * low:.1f} to {100 * high:.1f} %"),
        ("top-5", format_percent(measured.top5) if len(card.described["class_names"]) > 5 else ""),
        ("balanced accuracy", _share(metrics.get("balanced_accuracy"))),
        ("macro F1", _share(metrics.get("macro_f1"))),
        ("cross entropy", f"{measured.loss:.4g}"),
    ]
    classes = _classes(card, measured)
    if classes and count:
        largest = max(classes, key=lambda row: row["num_samples"])
        share = largest["num_samples"] / sum(row["num_samples"] for row in classes)
        rows.append((f"an answer that is always {_plain(largest['name'])}", format_percent(share)))
    lines += ["| on the validation images | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows if text)]
    lines += ["", "Where the best of several checkpoints was chosen by these images, it is a little optimistic."]
    if classes and len(classes) <= _MOST_CLASSES:
        lines += ["", "| class | images | recall | precision |", "|---|---|---|---|"]
        for row in classes:
            shares = f"{_share(row.get('recall'))} | {_share(row.get('precision'))}"
            lines.append(f"| {_plain(row['name'])} | {row['num_samples']:,} | {shares} |")
    return "\n".join(lines)


def _classes(card: Card, measured: ValidationRecord) -> list[Mapping[str, Any]]:
    assert card.files is not None
    report = read_mapping(report_file(card.files.summary.path, measured.step)).get(measured.weights)
    found = report.get("classes") if isinstance(report, dict) else None
    return found if isinstance(found, list) else []


def _share(value: float | None) -> str:
    return format_percent(value) if isinstance(value, int | float) else ""


def _use(card: Card) -> str:
    about, name = card.described, card.repository
    code = f'import headrace as hr\n\nmodel = hr.Model.load("hf:{name}")\nprint(model.predict("image.jpg"))'
    parts = ["## Use", f"```\nheadrace predict --weights hf:{name} image.jpg\n```", f"```python\n{code}\n```"]
    if card.architecture:
        call = f'model = timm.create_model("hf_hub:{name}", pretrained=True).eval()'
        parts.append(f"```python\nimport timm\n\n{call}\n```")
    parts.append(f"To train it further: `headrace train photos/ --weights hf:{name}`.")
    pixels = {
        "per-channel": f"divided by 255, less {_numbers(about, 'mean')}, divided by {_numbers(about, 'std')}",
        "zero-one": "divided by 255",
        "per-image": "less the mean of the image, divided by its standard deviation",
        "centred": "less 255 times the mean of the channel",
        "none": "as they are",
    }
    side, height = about["resize_shorter_side"], about["image_hwc"][0]
    parts.append(
        f"Images are resized ({about['interpolation']}, antialiased) to a shorter side of {side} pixels and cropped at "
        f"the centre to {height}; their pixels are {pixels[about['normalization']]}. "
        "Names of the classes, in the order of the outputs, are in `config.json`."
    )
    return "\n\n".join(parts)


def _numbers(about: Mapping[str, Any], name: str) -> str:
    return ", ".join(f"{value:.4g}" for value in about.get(name, ()))


def _data(card: Card) -> str:
    names = [_plain(name) for name in card.described["class_names"]]
    more = len(names) - _MOST_CLASSES
    shown = ", ".join(names[:_MOST_CLASSES]) + (f" and {more:,} more" if more > 0 else "")
    run = card.files.summary if card.files else None
    lines = ["## Data", ""]
    if run and run.start and run.start.num_train is not None and run.start.num_validation is not None:
        lines += [
            f"{_plain(run.dataset)}: {run.start.num_train:,} images to train on, {run.start.num_validation:,} to "
            "validate with.",
            "",
        ]
    return "\n".join([*lines, f"Classes: {shown}."])


def _recipe(card: Card) -> str:
    run = card.files.summary if card.files else None
    if card.files is None or run is None or run.start is None:
        return ""
    start, described = run.start, card.described
    trained = f"step {described['step']:,}"
    if start.num_epochs:
        trained = f"{described['epoch']:.4g} of {start.num_epochs} epochs, {trained}"
    took = f" in {format_duration(run.seconds)}" if run.seconds is not None and run.end else ""
    averaged = " Its weights are an average over the steps (ema)." if described["weights"] == "ema" else ""
    lines = [
        "## Recipe",
        "",
        f"Trained with Headrace {start.version}: {trained}, {start.global_batch_size} images a step; the whole run "
        f"took {start.total_steps:,} steps{took} on {start.num_replicas} x {start.device}.{averaged}",
        "",
        "| option | value | from |",
        "|---|---|---|",
        *(f"| `{name}` | {value} | {origin} |" for name, value, origin in _options(card.files.config)),
    ]
    return "\n".join(lines)


def _options(saved: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the options of the run that somebody or something chose: name, value and who."""
    values, origins = saved.get("values", {}), saved.get("origins", {})
    for name, option in all_options().items():
        origin = origins.get(name)
        if (
            origin is None
            or origin.get("kind") == DEFAULT.kind
            or name not in values
            or option.section not in _TOLD
            or name in _UNTOLD
        ):
            continue
        if option.kind is PATH or name == "weights":  # a path may say who trained it, and where
            continue
        where = {"chosen": f"chosen {origin.get('where', '')}".strip(), "recipe": "recipe"}
        yield name, f"`{_code(str(values[name]))}`", where.get(origin.get("kind", ""), "given")


def _plain(text: str) -> str:
    """Return a text that is one cell of a table, whatever is in a name: no markup, no lines."""
    escaped = "".join(f"\\{letter}" if letter in "\\|<>[]`*_" else letter for letter in text)
    return " ".join("".join(letter if letter.isprintable() else " " for letter in escaped).split())


def _code(text: str) -> str:
    """Return a text that is code in a cell of a table, where a backslash would be shown."""
    return " ".join("".join(letter if letter.isprintable() and letter not in "|`" else " " for letter in text).split())
