"""The picture of a run: well-formed SVG whose points lie where the numbers say."""

import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.core.errors import CheckpointError
from headrace.report.curve_svg import Axis, draw_run
from headrace.report.ticks import log_ticks, round_ticks, value_ticks
from headrace.telemetry.records import Record, RunEnd, RunStart, TrainRecord, ValidationRecord
from headrace.telemetry.sinks import open_sinks

SVG = "{http://www.w3.org/2000/svg}"


def write(directory: Path, losses: list[float], *, ema: bool = False) -> str:
    sinks = open_sinks(directory)
    sinks.write(
        RunStart(
            step=0, time="t", model="<toy> & model", dataset="digits", num_epochs=len(losses), total_steps=100,
            updates_per_epoch=10, global_batch_size=32,
        )
    )  # fmt: skip
    for epoch, loss in enumerate(losses, start=1):
        common = {"step": 10 * epoch, "epoch": float(epoch), "loss": loss}
        records: list[Record] = [
            TrainRecord(**common, accuracy=epoch / 10, learning_rate=0.1, elapsed_seconds=1.0),
            ValidationRecord(**common, top1=epoch / 20, num_samples=9, seconds=1.0),
        ]
        if ema:
            records.append(ValidationRecord(**common, weights="ema", top1=epoch / 16, num_samples=9, seconds=1.0))
        for record in records:
            sinks.write(record)
    sinks.write(RunEnd(step=100, time="t", outcome="finished", epoch=10.0, time_to_train=41.2))
    sinks.close()
    return draw_run(directory)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def paths_of(svg: str, color: str) -> list[str]:
    return [p.get("d", "") for p in ET.fromstring(svg).iter(f"{SVG}path") if p.get("stroke") == color and p.get("fill")]


def test_the_picture_names_the_run_the_lines_and_the_best(tmp_path: Path) -> None:
    found = texts(write(tmp_path, [2.0, 1.0, 0.5, 0.25], ema=True))
    assert found[0] == "<toy> & model on digits"
    assert "best top-1 25.00 % (EMA)" in found[1]
    assert "trained in 41.2 s" in found[1]
    assert {"training", "validation", "validation, averaged weights", "epoch", "Loss", "best 25.00 %"} <= set(found)


def test_points_are_proportional_to_the_numbers(tmp_path: Path) -> None:
    """The loss axis begins at 0, so heights above the base line are proportional to the losses; epochs are even."""
    losses = [2.0, 1.0, 0.5, 0.25]
    svg = write(tmp_path, losses)
    places = [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", paths_of(svg, "#9aa5b1")[0])]
    base = 2 * places[1][1] - places[0][1]  # where loss 0 lies if 2.0 and 1.0 are right
    for (_, y), loss in zip(places, losses, strict=True):
        assert base - y == pytest.approx((base - places[1][1]) * loss, abs=0.15)
    gaps = [b[0] - a[0] for a, b in pairwise(places)]
    assert gaps == pytest.approx([gaps[0]] * 3, abs=0.15)


def test_a_run_without_ema_shows_no_ema(tmp_path: Path) -> None:
    assert "validation, averaged weights" not in texts(write(tmp_path, [1.0, 0.5]))


def test_a_number_that_is_not_finite_breaks_the_line(tmp_path: Path) -> None:
    svg = write(tmp_path, [2.0, 1.0, math.nan, math.inf, 0.5, 0.25])
    assert [letter for letter in paths_of(svg, "#9aa5b1")[0] if letter in "ML"] == ["M", "L", "M", "L"]
    assert "nan" not in svg.lower().replace("nance", "")
    assert "inf" not in svg


def test_one_epoch_and_no_finite_number_at_all_still_draw(tmp_path: Path) -> None:
    assert ET.fromstring(write(tmp_path / "one", [0.5])).tag == f"{SVG}svg"
    assert ET.fromstring(write(tmp_path / "nan", [math.nan, math.nan])).tag == f"{SVG}svg"


def test_a_run_without_records_is_an_error_for_people(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no training or validation records"):
        draw_run(tmp_path)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 2.3, (0, 0.5, 1.0, 1.5, 2.0, 2.5)),
        (0, 20, (0, 5, 10, 15, 20)),
        (11, 100, (0, 20, 40, 60, 80, 100)),
        (98.04, 100, (98.0, 98.5, 99.0, 99.5, 100.0)),
        (0, 0.049, (0, 0.01, 0.02, 0.03, 0.04, 0.05)),
        (0, 0, (0, 0.2)),
    ],
)
def test_ticks_are_round_and_cover_the_range(low: float, high: float, expected: tuple[float, ...]) -> None:
    assert round_ticks(low, high) == pytest.approx(expected)


def test_losses_over_many_sizes_get_a_logarithmic_axis() -> None:
    ticks, is_log = value_ticks("log", [9.8, 0.5, 0.02])
    axis = Axis(start=0, end=300, ticks=ticks, high=ticks[-1], is_log=is_log)
    assert axis.ticks == pytest.approx((0.01, 0.1, 1, 10))
    assert [axis.at(value) for value in (0.01, 0.1, 1.0, 10.0)] == pytest.approx([0, 100, 200, 300])
    assert not value_ticks("log", [2.3, 0.1])[1]
    assert not value_ticks("log", [2.3, 0.0])[1]  # zero has no logarithm
    assert value_ticks("log", [])[0][0] == 0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.03, 2.4, (0.01, 0.1, 1, 10)),
        (0.15, 9.0, (0.1, 0.2, 0.5, 1, 2, 5, 10)),
        (0.4, 30.0, (0.1, 1, 10, 100)),
        (0.001, 1.0, (0.001, 0.01, 0.1, 1)),
    ],
)
def test_logarithmic_ticks(low: float, high: float, expected: tuple[float, ...]) -> None:
    assert log_ticks(low, high) == pytest.approx(expected)


def test_a_line_of_many_points_keeps_its_peaks(tmp_path: Path) -> None:
    """Means of neighbours flattened them."""
    svg = write(tmp_path, [1.0] * 4000 + [4.0] + [1.0] * 999)
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", paths_of(svg, "#9aa5b1")[0])]
    assert len(heights) <= 3 * 180 + 2
    assert (min(heights), heights.count(min(heights))) == (108.0, 1), "4 is the last tick, at the top"


@pytest.mark.parametrize("values", [[], [0.0, 40.0], [97.5, 99.9], [100.0, 100.0]])
def test_an_axis_of_accuracies_ends_at_100_percent(values: list[float]) -> None:
    ticks, _ = value_ticks("percent", values)
    assert ticks[-1] == pytest.approx(100)
    assert ticks[0] <= min(values, default=0.0)
    assert ticks[0] < ticks[-1]


@pytest.mark.parametrize(("low", "high"), [(0.02, 9e19), (2, 1.1e8), (1e-7, 3.0), (0.02, 1.3)])
def test_a_logarithmic_axis_has_room_for_its_ticks(low: float, high: float) -> None:
    """A loss that diverged spans twenty powers of ten: a label at each was written over the next."""
    ticks = list(log_ticks(low, high))
    assert len(ticks) <= 10
    assert ticks[0] <= low
    assert ticks[-1] >= high
