"""Points of curves: the means of their steps, the same however calls cut these, some hundreds in a run."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from headrace.report.curves import PANELS, Curves, draw_panels
from headrace.telemetry.curve_points import CurvePoints, steps_of_point
from headrace.telemetry.records import CurvePoint, TrainRecord
from headrace.telemetry.sinks import open_sinks

EPOCH = 50


def measured(num_steps: int, seed: int = 0) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(seed)
    values = {"loss": numbers.gamma(2.0, 32.0, num_steps), "top1": numbers.integers(0, 32, num_steps)}
    values |= {"count": np.full(num_steps, 32.0), "learning_rate": np.linspace(0.1, 0.0, num_steps)}
    return {name: rows.astype(np.float32) for name, rows in values.items()}


def points_of(metrics: dict[str, np.ndarray], lengths: list[int], resumed_at: int = -1) -> list[CurvePoint]:
    """Return the points of calls of these lengths; a process that ends leaves its sums as JSON."""
    found, made, step = [], CurvePoints(EPOCH), 0
    for length in lengths:
        part = {name: rows[step : step + length] for name, rows in metrics.items()}
        found += made.add(step, part, 100.0)
        step += length
        if step == resumed_at:
            again = CurvePoints(EPOCH)
            again.sums = tuple(json.loads(json.dumps(made.sums)))
            made = again
    return found


def test_a_point_is_the_mean_of_its_steps() -> None:
    metrics = measured(1000)
    points = points_of(metrics, [1000])
    for before, point in pairwise([CurvePoint(step=0, epoch=0, loss=0, accuracy=0, learning_rate=0), *points]):
        rows = slice(before.step, point.step)
        assert point.loss == pytest.approx(
            metrics["loss"][rows].astype(float).sum() / (32 * (point.step - before.step))
        )
        assert point.accuracy == pytest.approx(metrics["top1"][rows].mean() / 32)
        assert point.learning_rate == metrics["learning_rate"][point.step - 1]
        assert point.epoch == point.step / EPOCH
    assert points[-1].step == 1000


@pytest.mark.parametrize("lengths", [[1] * 1000, [7] * 142 + [6], [1, 400, 599], [333, 333, 334]])
def test_points_do_not_depend_on_how_steps_are_cut_into_calls(lengths: list[int]) -> None:
    metrics = measured(1000)
    assert points_of(metrics, lengths) == points_of(metrics, [1000])


def test_a_resumed_run_goes_on_inside_of_a_point() -> None:
    metrics = measured(1000)
    assert points_of(metrics, [803, 197], resumed_at=803) == points_of(metrics, [1000])


@pytest.mark.parametrize("num_steps", [1, 199, 200, 201, 528, 4000, 123_457])
def test_a_run_has_two_hundred_points_or_one_for_each_step(num_steps: int) -> None:
    steps, count = 0, 0
    while steps + steps_of_point(steps) <= num_steps:
        steps += steps_of_point(steps)
        count += 1
        assert steps % steps_of_point(steps - 1) == 0
    assert count >= min(num_steps, 200)
    assert num_steps - steps <= num_steps / 100, "what no point has yet at the end"
    assert count <= 200 + 100 * max(0.0, math.log2(num_steps / 200))


def test_a_step_that_was_skipped_is_in_no_mean_and_alone_leaves_a_gap() -> None:
    metrics = measured(400)
    metrics["loss"][[3, 301]] = np.nan, np.inf
    points = {point.step: point for point in points_of(metrics, [250, 150])}
    assert math.isnan(points[4].loss)
    assert points[302].loss == pytest.approx(metrics["loss"][300] / 32)
    assert points[302].accuracy == pytest.approx(metrics["top1"][300] / 32)


def test_curves_are_drawn_from_points_behind_what_an_earlier_version_recorded(tmp_path: Path) -> None:
    sinks = open_sinks(tmp_path)
    for epoch in (1, 2, 3):
        if epoch == 3:
            sinks.points(
                [
                    CurvePoint(step=step, epoch=step / EPOCH, loss=0.5, accuracy=0.5, learning_rate=0.1)
                    for step in range(101, 151)
                ]
            )
        step = EPOCH * epoch
        sinks.write(TrainRecord(step=step, epoch=epoch, loss=1.0, accuracy=0.1, learning_rate=0.2, elapsed_seconds=1.0))
    sinks.close()
    curves = Curves(tmp_path)
    curves.read_more()
    panels = {panel["title"]: panel["lines"][0] for panel in draw_panels(curves, PANELS)}
    assert panels["Loss"]["x"] == [1.0, 2.0, *(step / EPOCH for step in range(101, 151))]
    assert panels["Loss"]["y"] == [1.0, 1.0, *[0.5] * 50]
    assert panels["Learning rate"]["y"] == [0.2, 0.2, *[0.1] * 50]
    assert len((tmp_path / "training.csv").read_text().splitlines()) == 1 + 3, "tables have records only"
