"""The validation part of a report for tasks whose labels have a number for each output: labels, and numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.units import format_percent
from headrace.report.markup import Html, element, rows_table, section
from headrace.report.run_files import RunFiles
from headrace.report.ticks import value_ticks
from headrace.rows.row import NO_SCALE
from headrace.rows.tasks import MULTILABEL, TASKS

_MOST_ROWS = 1_000
_MOST_PLOTS = 12
_SIZE, _LEFT, _RIGHT, _TOP, _BOTTOM = 340, 62, 330, 10, 278


def draw_outputs(files: RunFiles) -> Html:
    """Return the section of the best validation."""
    report = files.report
    task = TASKS[report["task"]]
    epoch = next((r.epoch for r in files.summary.validations if r.step == files.report_step), None)
    where = f"{files.report_weights} weights at step {files.report_step:,}" + (f", epoch {epoch:.4g}" if epoch else "")
    rows = [row for row in task.metrics(NO_SCALE) if row.name in report["metrics"]]
    facts = f"{report['num_samples']:,} images, {where}: "
    facts += ", ".join(f"{row.title} {row.text(report['metrics'][row.name])}" for row in rows) + "."
    make = _labels if task is MULTILABEL else _targets
    return section("validation", "Validation", element("p", facts), *make(report))


def _labels(report: Mapping[str, Any]) -> list[Html]:
    rows = [
        (
            row["name"],
            f"{row['num_samples']:,}",
            f"{row['num_predicted']:,}",
            *(format_percent(row[name]) for name in ("average_precision", "precision", "recall", "f1")),
            "-" if row["threshold"] is None else f"{row['threshold']:.3f}",
            format_percent(row["f1_at_threshold"]),
        )
        for row in report["classes"][:_MOST_ROWS]
    ]
    heading = ("label", "images", "answers", "AP", "precision", "recall", "F1", "best threshold", "F1 there")
    exact = f"All labels of an image are right for {format_percent(report['exact_match'])} of the images; an image has "
    exact += f"{report['labels_per_image']:.2f} labels on average. "
    note = (
        "A label is answered where its probability is above one half. The best threshold is the one with the highest "
        "F1 on these images: on others, the F1 there will be lower."
    )
    return [
        element("h3", "Labels"),
        rows_table(rows, heading, tuple(range(1, len(heading)))),
        element("p", exact + note, class_="note"),
    ]


def _targets(report: Mapping[str, Any]) -> list[Html]:
    targets: Sequence[Mapping[str, Any]] = report["targets"]
    rows = [
        (
            row["name"],
            *(
                "-" if row[name] is None else f"{row[name]:.4g}"
                for name in ("mae", "rmse", "r2", "mean_error", "deviation")
            ),
        )
        for row in targets
    ]
    heading = ("target", "MAE", "RMSE", "R2", "mean error", "RMSE of a constant answer")
    plots = [
        element("div", element("h3", f"{row['name']}: answer by target"), _scatter(row), class_="chart")
        for row in targets[:_MOST_PLOTS]
    ]
    note = "Each point is a validation image; on the dashed line, the answer is the target. Errors are in its units."
    shown = min(len(row["points"]) for row in targets) if targets else 0
    if shown < report["num_samples"]:
        note += f" {shown:,} of the {report['num_samples']:,} images are drawn."
    return [
        element("h3", "Targets"),
        rows_table(rows, heading, tuple(range(1, len(heading)))),
        element("div", *plots, class_="pair"),
        element("p", note, class_="note"),
    ]


def _scatter(row: Mapping[str, Any]) -> Html:
    """Return the plot of answers over targets, both on one scale."""
    points = [(float(target), float(answer)) for target, answer in row["points"]]
    values = [value for point in points for value in point]
    ticks, _ = value_ticks("fitted", values or [0.0, 1.0])
    low, high = min([*ticks, *values]), max([*ticks, *values])
    span = (high - low) or 1.0

    def across(value: float) -> float:
        return _LEFT + (value - low) / span * (_RIGHT - _LEFT)

    def up(value: float) -> float:
        return _BOTTOM - (value - low) / span * (_BOTTOM - _TOP)

    marks = []
    for tick in ticks:
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>')
        marks.append(f'<text x="{_LEFT - 7}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
        marks.append(f'<text x="{across(tick):.1f}" y="{_BOTTOM + 17}" text-anchor="middle">{tick:.4g}</text>')
    line = f"M{across(low):.1f} {up(low):.1f}L{across(high):.1f} {up(high):.1f}"
    marks.append(f'<path d="{line}" style="stroke:var(--c1)" stroke-dasharray="5 4"/>')
    for target, answer in points:
        tip = f"<title>target {target:.4g}, answer {answer:.4g}</title>"
        place = f'cx="{across(target):.1f}" cy="{up(answer):.1f}" r="2.6"'
        marks.append(f'<circle {place} style="fill:var(--c0)" opacity="0.55">{tip}</circle>')
    marks.append(f'<text x="{across((low + high) / 2):.0f}" y="{_BOTTOM + 34}" text-anchor="middle">target</text>')
    label = 'role="img" aria-label="answers by targets"'
    return Html(f'<svg viewBox="0 0 {_SIZE} {_BOTTOM + 42}" {label} style="max-width:420px">{"".join(marks)}</svg>')
