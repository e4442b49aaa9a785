"""Reports: their numbers are those of the records, no text gets out of its place, odd runs have one, too."""

import base64
import dataclasses
import hashlib
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli.report import report
from headrace.core.errors import CheckpointError, ConfigError
from headrace.report.curves import Curves, draw_panels, thin
from headrace.report.run_report import write_run_report
from headrace.telemetry.records import Record, RunEnd, RunStart, TrainRecord, ValidationRecord, read_records
from headrace.telemetry.validation_report import validation_report, write_report

HOSTILE = "</script><script>alert(1)</script>\"' onload=x ../../etc/passwd &amp;"


def start(model: str = "net") -> RunStart:
    return RunStart(
        step=0, time="2026-01-01T00:00:00Z", model=model, dataset="digits", num_epochs=4, total_steps=40,
        updates_per_epoch=10, global_batch_size=8, num_parameters=1234,
    )  # fmt: skip


def trained(epoch: float, loss: float = 0.5, **more: Any) -> TrainRecord:
    given: dict[str, Any] = {"accuracy": 0.25, "learning_rate": 0.1, "elapsed_seconds": epoch} | more
    return TrainRecord(step=int(10 * epoch), epoch=epoch, loss=loss, **given)


def validated(epoch: float, top1: float, weights: str = "raw") -> ValidationRecord:
    return ValidationRecord(
        step=int(10 * epoch), epoch=epoch, weights=weights, loss=1, top1=top1, num_samples=10, seconds=1
    )


def end(**more: Any) -> RunEnd:
    return RunEnd(step=40, time="", outcome="finished", epoch=4, time_to_train=12, wall_seconds=12,
                  seconds={"train": 9, "compile": 3}, **more)  # fmt: skip


def make(run: Path, records: list[Record], **options: Any) -> Path:
    run.mkdir(parents=True)
    (run / "config.json").write_text(
        json.dumps({"name": "", "values": options, "origins": {}, "command": ["headrace"]})
    )
    (run / "metrics.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    return run


class Parsed(HTMLParser):
    """The elements of a page, the texts outside scripts and styles, and the data for its script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif not self._inside:
            self.text += data + " "

    @property
    def panels(self) -> dict[str, dict[str, Any]]:
        return {panel["title"]: panel for panel in json.loads(self.scripts[0])["panels"]}


def parsed(run: Path) -> Parsed:
    return Parsed(write_run_report(run).read_text())


def test_curves_have_the_numbers_of_the_records(tmp_path):
    losses = [2.0, 1 / 3, 1e-7, 0.1]
    records = [start(), *(trained(k + 1, loss, images_per_second=100.5 * k) for k, loss in enumerate(losses))]
    records += [validated(2, 0.7), validated(2, 0.8, "ema"), end(verdict="compute-bound")]
    run = make(tmp_path / "run", records)
    page = parsed(run)
    written = [record for record in read_records(run) if isinstance(record, TrainRecord)]
    line = page.panels["Loss"]["lines"][0]
    assert line["y"] == [record.loss for record in written] == losses
    assert line["x"] == [record.epoch for record in written]
    accuracy = page.panels["Top-1 accuracy"]
    assert [line["y"] for line in accuracy["lines"]] == [[0.25] * 4, [0.7], [0.8]]
    assert accuracy["scale"] == 100
    assert page.panels["Throughput"]["lines"][0]["y"] == [0, 100.5, 201, 301.5]
    assert "Loss scale" not in page.panels, "nothing was recorded"
    assert "80.00 %" in page.text
    assert "compute-bound" in page.text
    assert "train 9.0 s (75.0%)" in page.text


def test_the_page_needs_nothing_and_runs_only_its_own_script(tmp_path):
    page = parsed(make(tmp_path / "run", [start(), trained(1), end()]))
    addresses = [attrs.get(name) for _, attrs in page.tags for name in ("src", "href") if attrs.get(name)]
    assert not [address for address in addresses if not (address or "").startswith("data:")]
    assert "url(" not in (tmp_path / "run" / "report.html").read_text()
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv"))
    assert policy is not None
    assert "default-src 'none'" in policy
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy, "a browser would refuse the page's script"


def test_hostile_texts_stay_texts(tmp_path):
    run = make(
        tmp_path / "<b>&'run", [start(HOSTILE), trained(1), validated(1, 0.5), end(verdict=HOSTILE)], label=HOSTILE
    )
    names = [HOSTILE, "</td><img src=x onerror=alert(1)>", "../../secret"]
    sums = {"confusion": np.array([[3, 1, 0], [0, 2, 2], [0, 0, 2]]), "count": 10, "top1": 7, "top5": 10, "loss": 5}
    write_report(run / "reports" / "step_00000010.json", {"raw": validation_report(sums, names)})
    plain = parsed(make(tmp_path / "plain", [start(), trained(1), validated(1, 0.5), end(verdict="v")], label="x"))
    page = parsed(run)
    assert [tag for tag, _ in page.tags].count("script") == [tag for tag, _ in plain.tags].count("script") == 2
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    assert "img" not in [tag for tag, _ in page.tags]
    for name in names:
        assert name in page.text
    assert "../../secret predicted as" in str([attrs.get("title") for _, attrs in page.tags])


def test_the_matrix_and_the_classes_are_those_of_the_best_validation(tmp_path):
    run = make(tmp_path / "run", [start(), validated(1, 0.9), validated(4, 0.5), end()])
    for step, matrix in ((10, [[4, 1], [0, 5]]), (40, [[0, 5], [5, 0]])):
        right = int(np.trace(matrix))
        sums = {"confusion": np.array(matrix), "count": 10, "top1": right, "top5": 10, "loss": 5}
        write_report(run / "reports" / f"step_{step:08d}.json", {"raw": validation_report(sums, ["ant", "bee"])})
    page = parsed(run)
    titles = {attrs["title"] for tag, attrs in page.tags if tag == "td" and attrs.get("title")}
    assert "ant predicted as bee: 1 of 5 (20.0%)" in titles
    assert re.search(r"bee\s+5\s+5\s+100.00 %\s+83.33 %\s+90.91 %", page.text), "2 * 5 / (5 + 6) is 0.9091"


def test_of_many_classes_the_matrix_has_those_with_mistakes_and_no_empty_column(tmp_path):
    run = make(tmp_path / "run", [start(), validated(4, 0.5), end()])
    matrix = np.zeros((100, 100), int)
    matrix[:, 4] = 2  # one answer to nearly everything
    matrix[7, 8] = 3
    sums = {"confusion": matrix, "count": 203, "top1": 2, "top5": 203, "loss": 5}
    report = {"raw": validation_report(sums, [f"c{k}" for k in range(100)])}
    write_report(run / "reports" / "step_00000040.json", report)
    page = parsed(run)
    heads = [attrs["title"] for tag, attrs in page.tags if tag == "th" and attrs.get("title")]
    assert heads[:2] == ["c4", "c8"], "the columns"
    assert len(heads) == 2 + 30
    assert "c4" not in heads[2:], "it has no mistake"
    assert "c7" in heads[2:]
    assert re.search(r"true\s+predicted\s+images\s+c7\s+c8\s+3", page.text)


def test_an_accuracy_stands_beside_its_interval_a_constant_answer_and_the_best_other_run(tmp_path):
    known = dataclasses.replace(start(), dataset_digest="abc")
    run = make(tmp_path / "run", [known, dataclasses.replace(validated(4, 0.8), num_samples=100), end()])
    sums = {"confusion": np.array([[50, 10], [10, 30]]), "count": 100, "top1": 80, "top5": 100, "loss": 5}
    write_report(run / "reports" / "step_00000040.json", {"raw": validation_report(sums, ["ant", "bee"])})
    make(tmp_path / "better", [known, dataclasses.replace(validated(4, 0.9), num_samples=100)])
    make(tmp_path / "others", [dataclasses.replace(known, dataset_digest="x"), validated(4, 1.0)])
    make(tmp_path / "trial", [known, validated(4, 1.0)], dry_run_steps=2)
    text = parsed(run).text
    # Wilson's interval of 80 of 100, as tables have it
    assert "80.00 % of 100 images: 71.1 to 86.7 % with a certainty of 95 %." in text
    assert "A constant answer (ant) has 60.00 %." in text
    assert "The best other run on these images, better, has 90.00 %." in text


def test_a_bin_of_probabilities_says_how_many_images_it_has(tmp_path):
    run = make(tmp_path / "run", [start(), validated(4, 0.5), end()])
    bins = [{"low": 0.9, "high": 1.0, "count": 1, "accuracy": 1.0, "confidence": 0.95}]
    found = {"num_images": 1, "weights": "raw", "checkpoint": "c", "top_k": {"1": 1.0}, "mistakes": [], "hardest": []}
    (run / "images.json").write_text(json.dumps(found | {"calibration": {"ece": 0.05, "bins": bins}}))
    page = write_run_report(run).read_text()
    (svg,) = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert '<text x="277.8" y="283" text-anchor="middle" style="font-size:9px">1</text>' in svg
    # the interval of one right image of one begins at 1 / (1 + 1.96^2), 20.7 %
    (low, high) = re.findall(r'd="M277\.8 ([\d.]+)V([\d.]+)"', svg)[0]
    assert (float(low), float(high)) == pytest.approx((250 - 240 * 0.2065, 10), abs=0.1)


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ([], "not started"),
        ([start().to_json()], "killed"),
        ([start().to_json(), trained(1).to_json(), '{"kind": "train", "epo'], "killed"),
        ([start().to_json(), "not json\n" + trained(1).to_json() + "\n"], "1 damaged lines"),
    ],
)
def test_empty_and_half_written_runs_have_a_report(tmp_path, lines, shown):
    run = make(tmp_path / "run", [])
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n" * (len(lines) == 1))
    assert shown in parsed(run).text


def test_numbers_that_are_not_finite_are_gaps(tmp_path):
    nan, infinite = float("nan"), float("inf")
    run = make(tmp_path / "run", [start(), trained(1, nan), trained(2, 1.0), trained(3, infinite), validated(3, nan)])
    panels = parsed(run).panels
    assert panels["Loss"]["lines"][0]["y"] == [None, 1.0, None]
    assert panels["Top-1 accuracy"]["lines"][1]["y"] == [None]


@pytest.mark.parametrize("name", ["config.json", "plan.json", "machine.json", "schedule.json", "images.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b'{"pipeline": 3, "values": {"a": []}, "devices": 1}', b"\xff"])
def test_a_damaged_file_costs_its_part_only(tmp_path, name, content):
    run = make(tmp_path / "run", [start(), trained(1), end()])
    (run / name).write_bytes(content)
    assert "finished" in parsed(run).text or name == "config.json"


def test_many_records_are_quick_and_no_peak_is_lost(tmp_path):
    run = make(tmp_path / "run", [start()])
    rng = np.random.default_rng(0)
    losses = rng.random(100_000) + 1
    losses[31_415], losses[77_777] = 9.0, 0.01
    template = trained(1, 1.0, images_per_second=3.0).to_json()
    with (run / "metrics.jsonl").open("a") as file:
        for k, loss in enumerate(losses):
            line = template.replace('"epoch": 1.0,', f'"epoch": {k / 1000},')
            file.write(line.replace('"loss": 1.0', f'"loss": {loss}') + "\n")
    began = time.process_time()
    page = parsed(run)
    assert time.process_time() - began < 4, "0.7 s when nothing else runs"
    line = page.panels["Loss"]["lines"][0]
    assert len(line["y"]) <= 1210
    assert {9.0, 0.01} <= set(line["y"])
    assert set(line["y"]) <= set(losses.tolist())
    assert line["x"] == sorted(line["x"])
    assert (line["x"][0], line["x"][-1]) == (0, 99.999)


def test_thinning_keeps_extremes_and_gaps_of_every_pixel():
    rng = np.random.default_rng(1)
    x, y = np.sort(rng.random(5000)), rng.standard_normal(5000)
    y[100:200] = np.nan
    kept = thin(x, y, 50)
    assert len(kept) <= 3 * 50 + 2
    bins = ((x - x[0]) / (x[-1] - x[0]) * (50 - 1e-9)).astype(int)
    for pixel in range(50):
        inside = y[bins == pixel]
        if np.isfinite(inside).any():
            assert {np.nanmin(inside), np.nanmax(inside)} <= set(y[kept][bins[kept] == pixel])
    assert np.isnan(y[kept]).any()


def test_what_is_appended_is_read_from_there_and_a_replaced_file_anew(tmp_path):
    run = make(tmp_path / "run", [start(), trained(1, 2.0)])
    file = run / "metrics.jsonl"
    curves = Curves(run)
    assert curves.read_more()
    assert not curves.read_more()
    whole = trained(2, 1.0).to_json() + "\n"
    with file.open("a") as out:
        out.write(whole[:20])
    assert not curves.read_more(), "half a line is none"
    with file.open("a") as out:
        out.write(whole[20:])
    assert curves.read_more()
    assert draw_panels(curves)[0]["lines"][0]["y"] == [2.0, 1.0]
    (run / "new").write_text(start().to_json() + "\n" + trained(1, 3.0).to_json() + "\n")
    (run / "new").replace(file)  # as a resume rewinds the records
    assert curves.read_more()
    assert draw_panels(curves)[0]["lines"][0]["y"] == [3.0]
    file.unlink()
    assert curves.read_more()
    assert draw_panels(curves) == []


def test_curves_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    def titles(waited: float) -> set[str]:
        rows = [
            {
                "kind": "train",
                "step": step,
                "epoch": step,
                "loss": 1.0,
                "infeed_wait_seconds": waited,
                "elapsed_seconds": 10.0 * step,
                "loss_scale": 1.0,
            }
            for step in (1, 2)
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        curves = Curves(tmp_path)
        curves.read_more()
        return {panel["title"] for panel in draw_panels(curves)}

    assert titles(0.006) - titles(0.004) == {"Waiting for input, since the previous record"}, "0.05 % of 20 s are 0.01"
    assert "Loss scale" not in titles(0.5)


def test_the_schedule_is_drawn_as_planned_and_as_measured(tmp_path):
    run = make(tmp_path / "run", [start(), end()])
    stages = [{"time_share": 0.5}, {"time_share": 0.5}]
    pipeline = {"schedule": "Grouped", "device_mapping": [0, 1], "num_micros": 2, "stages": stages}
    (run / "plan.json").write_text(json.dumps({"pipeline": pipeline}))
    page = parsed(run)
    assert "2 stages on 2 devices, 2 micro batches per step" in page.text
    assert page.text.split().count("F1") >= 2, "a box on each device"
    names = ["0F0", "0F1", "1F0", "1F1", "1B0", "1B1", "0B0", "0B1"]
    events = [
        {"ph": "X", "pid": 1, "tid": int(name[0]), "ts": 1e6 * k, "dur": 1e6, "name": name}
        for k, name in enumerate(names)
    ]
    (run / "schedule.json").write_text(json.dumps({"traceEvents": events}))
    assert "measured 50.0%" in parsed(run).text, "8 of 2 x 8 seconds"


def test_the_command_writes_a_report_or_a_comparison(tmp_path, capsys):
    first = make(tmp_path / "a", [start(), trained(1, 2.0), validated(1, 0.9), end()], learning_rate=0.1)
    second = make(tmp_path / "b", [start(), trained(1, 1.0), validated(1, 0.8), end()], learning_rate=0.2)
    assert report([str(first)]) == 0
    assert (first / "report.html").is_file()
    file = tmp_path / "both.html"
    assert report([str(first), str(second), "-o", str(file)]) == 0
    assert str(file) in capsys.readouterr().out
    page = Parsed(file.read_text())
    assert [line["y"] for line in page.panels["Training, loss"]["lines"]] == [[2.0], [1.0]]
    assert [line["label"] for line in page.panels["Training, loss"]["lines"]] == ["a", "b"]
    assert re.search(r"learning_rate\s+0.1\s+0.2", page.text)
    with pytest.raises(ConfigError, match="there is no directory"):
        report([str(first), "-o", str(tmp_path / "none" / "x.html")])
    with pytest.raises(ConfigError, match="it is a directory"):
        report([str(first), "-o", str(tmp_path)])
    with pytest.raises(CheckpointError, match="cannot be read"):
        report([str(tmp_path / "nothing")])
    with pytest.raises(ConfigError):
        report([str(first)] * 27)
    with pytest.raises(ConfigError, match="without --images"):
        report([str(first), "--platform", "cpu"])


def test_a_folder_is_named_by_its_directory(tmp_path):
    began = dataclasses.replace(start(), dataset="folder")
    run = make(tmp_path / "run", [began, end()], dataset_path="/data/<i>bees/")
    assert "net on <i>bees" in parsed(run).text
    assert "net on folder" in parsed(make(tmp_path / "other", [began, end()])).text
