"""The confidence of a network in a run's report."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.units import format_count, format_percent
from headrace.report.markup import Html, element, rows_table, section
from headrace.report.run_files import RunFiles
from headrace.report.run_summary import wilson_interval

_SIZE, _LEFT, _TOP, _RIGHT, _BOTTOM = 300, 46, 10, 290, 250


def draw_scores(files: RunFiles) -> Html:
    """Return the section of calibration, top-k and thresholds."""
    found = files.images
    if not found or "calibration" not in found:
        return Html("")
    calibration = found["calibration"]
    ranks = ", ".join(f"top-{k} {format_percent(share)}" for k, share in found["top_k"].items())
    facts = f"{found['num_images']:,} images, {found['weights']} weights of {found['checkpoint']}: {ranks}. "
    facts += f"Expected calibration error {format_percent(calibration['ece'])}."
    diagram = element("div", element("h3", "Reliability"), _reliability(calibration["bins"]))
    parts = [diagram]
    if "thresholds" in found:
        rows = [
            (
                f"{row['threshold']:.2f}",
                *(format_percent(row[name]) for name in ("precision", "recall", "f1", "accuracy")),
            )
            for row in found["thresholds"]
        ]
        heading = ("probability at least", "precision", "recall", "F1", "accuracy")
        title = f"Thresholds for {found['positive']}"
        auc = "" if found["auc"] is None else f"Area under the ROC curve: {found['auc']:.4f}."
        table = rows_table(rows, heading, (0, 1, 2, 3, 4))
        parts.append(element("div", element("h3", title), table, element("p", auc, class_="note")))
    return section("scores", "Probabilities", element("p", facts), element("div", *parts, class_="pair"))


def _reliability(bins: Sequence[Mapping[str, Any]]) -> Html:
    """Return the diagram: accuracy of the images in each bin of probability; on the diagonal, they are equal."""

    def across(share: float) -> float:
        return _LEFT + share * (_RIGHT - _LEFT)

    def up(share: float) -> float:
        return _BOTTOM - share * (_BOTTOM - _TOP)

    marks = []
    for tick in (0, 0.2, 0.4, 0.6, 0.8, 1):
        text = f"{100 * tick:.0f}"
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>')
        marks.append(f'<text x="{_LEFT - 7}" y="{up(tick) + 4:.1f}" text-anchor="end">{text}</text>')
        marks.append(f'<text x="{across(tick):.1f}" y="{_BOTTOM + 17}" text-anchor="middle">{text}</text>')
    for each in bins:
        if each["count"]:
            left, right = across(each["low"]) + 1, across(each["high"]) - 1
            top = up(each["accuracy"])
            tip = (
                f"{each['count']:,} images: accuracy {each['accuracy']:.1%}, mean probability {each['confidence']:.1%}"
            )
            box = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{max(_BOTTOM - top, 1):.1f}"'
            marks.append(f'<rect {box} style="fill:var(--c0)" opacity="0.75"><title>{tip}</title></rect>')
            low, high = wilson_interval(each["accuracy"], each["count"])
            middle = (left + right) / 2
            marks.append(f'<path d="M{middle:.1f} {up(low):.1f}V{up(high):.1f}" style="stroke:var(--ink)"/>')
            count = format_count(each["count"], short=True)
            place = f'x="{middle:.1f}" y="{_BOTTOM + 33}" text-anchor="middle"'
            marks.append(f'<text {place} style="font-size:9px">{count}</text>')
    marks.append(f'<path d="M{_LEFT} {_BOTTOM}L{_RIGHT} {_TOP}" style="stroke:var(--c1)" stroke-dasharray="5 4"/>')
    axis = "predicted probability in %, and images"
    marks.append(f'<text x="{across(0.5):.0f}" y="{_BOTTOM + 49}" text-anchor="middle">{axis}</text>')
    label = 'role="img" aria-label="accuracy by predicted probability"'
    svg = f'<svg viewBox="0 0 {_SIZE} {_BOTTOM + 55}" {label} style="max-width:340px">{"".join(marks)}</svg>'
    note = (
        "Accuracy in % (vertical) of the images in each bin, with its 95 % interval, wide where there are few. "
        "Below the dashed line the network is too sure of itself."
    )
    return element("div", Html(svg), element("p", note, class_="note"), class_="chart")
