"""Pages in a real browser: curves have the values of the records, updates arrive, nothing odd in a run disturbs them.

Driven by Chromium's own protocol; skipped where there is no Chromium.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.directory_lock import lock_directory
from headrace.report.run_report import write_run_report
from headrace.report.server import Access
from headrace.telemetry.records import TrainRecord, ValidationRecord, read_records
from headrace.telemetry.validation_report import validation_report, write_report

from .browser import PROGRAM, Browser, Page, start_browser
from .test_board import serving
from .test_run_report import HOSTILE, end, make, start, trained, validated

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")

LOSSES = [3.0, 1.25, float("nan"), 0.5, 0.03125]  # so far apart that the axis is logarithmic
# Reads a chart back: the scales from its grid lines and their labels, then each line from its path.
READ = """(title => {
  const chart = [...document.querySelectorAll(".chart")].find(each => each.querySelector("h3").textContent === title);
  const texts = [...chart.querySelectorAll("svg text")], value = text => Number(text.textContent.replace(/,/g, ""));
  const place = (text, name) => Number(text.getAttribute(name));
  const ups = texts.filter(text => text.getAttribute("text-anchor") === "end").map(t => [place(t, "y") - 4, value(t)]);
  const across = texts.filter(text => text.getAttribute("text-anchor") === "middle" && text.textContent !== "epoch")
    .map(t => [place(t, "x"), value(t)]);
  const labels = [...chart.querySelectorAll(".key span")].map(entry => entry.textContent);
  return {ups, across, labels, lines: [...chart.querySelectorAll("svg path")].map(path => path.getAttribute("d"))};
})"""


ROWS = "[...document.querySelectorAll('#runs tbody tr:not(.group)')]"


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("profile")) as running:
        try:
            running.send("Browser.getVersion")
        except (AssertionError, OSError) as error:  # such as in a container that lacks what it needs
            pytest.skip(f"{PROGRAM} does not start here: {error!r}")
        yield running


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[[str], Page]]:
    """Return a function that opens pages; afterwards none may have complained, or asked for anything elsewhere."""
    pages: list[Page] = []

    def visit(address: str) -> Page:
        pages.append(browser.open(address))
        return pages[-1]

    yield visit
    for page in pages:
        assert page.problems == []
        assert not [address for address in page.requests if not re.match(r"file:|data:|http://127\.0\.0\.1:", address)]
        page.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Return a function that serves a directory and returns its address."""
    with ExitStack() as stack:
        yield lambda place: f"http://127.0.0.1:{stack.enter_context(serving(place))}"


def make_run(path: Path, model: str = "net", losses: list[float] = LOSSES, **options: Any) -> Path:
    """Return a run with a validation after each epoch, averaged weights, and class names that try to be markup."""
    records: list[Any] = [start(model)]
    for k, loss in enumerate(losses):
        records += [trained(k + 1, loss, images_per_second=1000.0 + k), validated(k + 1, 0.5 + k / 10)]
    run = make(path, [*records, validated(2, 0.75, "ema"), end(verdict=HOSTILE)], **options)
    sums = {"confusion": np.array([[3, 1], [2, 4]]), "count": 10, "top1": 7, "top5": 10, "loss": 5}
    write_report(run / "reports" / "step_00000050.json", {"raw": validation_report(sums, [HOSTILE, "<img src=x>"])})
    return run


def curves(page: Page, title: str) -> dict[str, list[tuple[float, float]]]:
    """Return the lines of a chart as (epoch, value), computed from the pixels that are drawn."""
    found = page.evaluate(f"{READ}({json.dumps(title)})")
    is_log = len(found["ups"]) > 2 and not np.allclose(np.diff([value for _, value in found["ups"]], 2), 0)
    (y0, low), (y1, high) = found["ups"][0], found["ups"][-1]
    (x0, first), (x1, last) = found["across"][0], found["across"][-1]

    def point(x: float, y: float) -> tuple[float, float]:
        share = (y - y0) / (y1 - y0)
        value = low * (high / low) ** share if is_log else low + share * (high - low)
        return first + (x - x0) / (x1 - x0) * (last - first), value

    labels = found["labels"] or ["training"]
    return {
        label: [point(*map(float, pair)) for pair in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]
        for label, path in zip(labels, found["lines"], strict=True)
    }


def assert_drawn(points: list[tuple[float, float]], wanted: list[tuple[float, float]], rel: float = 0.02) -> None:
    """Compare drawn points with recorded ones: a tenth of a pixel is what a path is rounded to."""
    finite = [pair for pair in wanted if np.isfinite(pair[1])]
    assert len(points) == len(finite)
    for found, pair in zip(points, finite, strict=True):
        assert found == pytest.approx(pair, rel=rel, abs=0.01)


def test_a_report_draws_the_values_of_the_records(tmp_path, visit):
    run = make_run(tmp_path / "<b>&'run", HOSTILE, label=HOSTILE)
    page = visit(write_run_report(run).as_uri())
    records = read_records(run)
    losses = [(record.epoch, record.loss) for record in records if isinstance(record, TrainRecord)]
    scores = [record for record in records if isinstance(record, ValidationRecord)]
    drawn = curves(page, "Loss")
    assert_drawn(drawn["training"], losses)
    assert_drawn(drawn["validation"], [(record.epoch, 1.0) for record in scores if record.weights == "raw"])
    drawn = curves(page, "Top-1 accuracy, %")
    assert_drawn(
        drawn["validation"], [(each.epoch, 100 * (each.top1 or 0)) for each in scores if each.weights == "raw"]
    )
    assert_drawn(drawn["validation, averaged weights"], [(2, 75)])
    assert_drawn(curves(page, "Throughput, images/s")["training"], [(k + 1, 1000 + k) for k in range(5)])
    # Hovering over an epoch has its numbers, also where they are not finite.
    for epoch, loss in (losses[1], losses[2]):
        assert f"training{loss:g}" in hover(page, epoch).replace("not finite", "nan")
    # No text became markup, and a click sorts the classes.
    assert page.evaluate("[document.scripts.length, document.images.length]") == [2, 0]
    assert page.evaluate("document.body.textContent").count(HOSTILE) >= 3
    recall = "[...document.querySelectorAll('th')].find(head => head.textContent === 'recall')"
    page.evaluate(f"{recall}.click()")
    column = f"[...{recall}.closest('table').tBodies[0].rows].map(row => row.cells[{recall}.cellIndex].textContent)"
    assert page.evaluate(column) == ["66.67 %", "75.00 %"]
    page.evaluate(f"{recall}.click()")
    assert page.evaluate(column) == ["75.00 %", "66.67 %"]


def hover(page: Page, epoch: float) -> str:
    """Point at an epoch of the first chart; return what is shown."""
    page.evaluate("document.querySelector('.chart svg').scrollIntoView({block: 'center'})")
    box = "document.querySelector('.chart svg').getBoundingClientRect()"
    left, top, width = page.evaluate(f"[{box}.left, {box}.top, {box}.width]")
    page.point(left + 58 + (width - 68) * epoch / len(LOSSES), top + 60)
    page.wait(f"document.querySelector('.tip')?.textContent.startsWith('epoch {epoch:g}')")
    return page.evaluate("document.querySelector('.tip').textContent")


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_cut_off_and_colors_follow_the_system(tmp_path, visit, width, dark):
    page = visit(write_run_report(make_run(tmp_path / "run")).as_uri())
    page.look(width, dark=dark)
    page.wait("document.querySelector('.chart svg').clientWidth <= innerWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    colors = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    back, front = (sum(map(int, re.findall(r"\d+", each)[:3])) / 3 for each in page.evaluate(colors))
    assert (back < 80 < 160 < front) if dark else (front < 80 < 160 < back)


def test_the_live_page_follows_a_run(tmp_path, visit, serve):
    run = make(tmp_path / "run", [start()])
    file = run / "metrics.jsonl"
    with lock_directory(run):
        page = visit(f"{serve(tmp_path)}/run?id=run")
        assert "Nothing has been recorded yet" in page.evaluate("document.body.textContent")
        assert "running" in page.evaluate("document.getElementById('summary').textContent")
        losses, took = [], []
        for epoch in (1, 2):
            losses.append((epoch, 2.0 / epoch))
            line = trained(epoch, 2.0 / epoch).to_json() + "\n"
            with file.open("a") as out:
                out.write(line[:30])
                out.flush()
                time.sleep(0.1)  # half a line is seen and left alone
                out.write(line[30:])
            points = "document.querySelector('.chart svg path')?.getAttribute('d').match(/[ML]/g)?.length"
            took.append(page.wait(f"{points} === {epoch}", 30))
        assert min(took) < 3, "pages ask every two seconds; a busy machine may be late once"
        assert_drawn(curves(page, "Loss")["training"], losses)
    with file.open("a") as out:
        out.write(end(verdict="compute-bound").to_json() + "\n")
    page.wait("document.getElementById('summary').textContent.includes('compute-bound')", 30)


def test_the_list_is_filtered_and_runs_are_compared(tmp_path, visit, serve):
    make_run(tmp_path / "first", seed=1)
    make_run(tmp_path / "odd '&<i>", losses=[2.0, 1.0], seed=2)
    make(tmp_path / "empty", [])
    address = serve(tmp_path)
    page = visit(f"{address}/")
    shown = f"{ROWS}.filter(row => !row.hidden).map(row => row.cells[1].textContent)"
    assert set(page.evaluate(shown)) == {"first", "odd '&<i>", "empty"}
    typed = "const box = document.getElementById('filter'); box.value = %s; box.dispatchEvent(new Event('input'))"
    page.evaluate("{" + typed % "'ODD'" + "}")
    assert page.evaluate(shown) == ["odd '&<i>"]
    page.evaluate("{" + typed % "''" + "}")
    make(tmp_path / "later", [start()])
    page.wait(f"{shown}.includes('later')", 30)
    for name in ("first", "odd '&<i>"):
        box = f'input[aria-label="select {name}"]'
        page.evaluate(f"document.querySelector({json.dumps(box)}).click()")
    page.evaluate("document.getElementById('compare').click()")
    page.wait("location.pathname === '/compare' && document.readyState === 'complete'")
    drawn = curves(page, "Training, loss")
    assert_drawn(drawn["first"], [(k + 1, loss) for k, loss in enumerate(LOSSES)])
    assert_drawn(drawn["odd '&<i>"], [(1, 2.0), (2, 1.0)])
    assert re.search(r"seed\s*1\s*2", page.evaluate("document.body.innerText"))


def test_runs_are_grouped_labelled_renamed_and_deleted(tmp_path, visit):
    for name, rate, top1 in (("x1", 0.1, 0.5), ("x2", 0.1, 0.7), ("y", 0.2, 0.6)):
        make(tmp_path / name, [start(), trained(1), validated(1, top1), end()], learning_rate=rate)
    with serving(tmp_path, Access(token="wheel"), edits=True) as port:
        page = visit(f"http://127.0.0.1:{port}/?token=wheel")
        choose = "{const s = document.getElementById('group'); s.value = %s; s.dispatchEvent(new Event('change'))}"
        page.evaluate(choose % "'learning_rate'")
        heads = "[...document.querySelectorAll('#runs tr.group')].map(row => row.textContent)"
        assert page.evaluate(heads) == [
            "learning_rate 0.1  2 runs, best top-1 70.00 %",
            "learning_rate 0.2  1 run, best top-1 60.00 %",
        ]
        # sorted by top-1, each group by itself
        page.evaluate("[...document.querySelectorAll('#runs thead th')].find(h => h.textContent === 'top-1').click()")
        names = page.evaluate(f"{ROWS}.map(row => row.cells[1].querySelector('a').textContent)")
        assert names == ["x1", "x2", "y"]
        # a note, tags and another name
        page.evaluate("document.querySelector('button[aria-label=\"edit x2\"]').click()")
        fill = "document.getElementById('%s').value = %s"
        for field, value in (("note", HOSTILE), ("tags", "paper, best"), ("name", "x1")):
            page.evaluate(fill % (field, json.dumps(value)))
        page.evaluate("document.getElementById('save').click()")
        page.wait("!document.getElementById('refused').hidden")
        assert "There is a x1 already" in page.evaluate("document.getElementById('refused').textContent")
        page.evaluate(fill % ("name", "'x9'"))
        page.evaluate("document.getElementById('save').click()")
        page.wait(f"{ROWS}.some(row => row.textContent.startsWith('x9'))")
        page.evaluate(choose % "'tag'")
        assert [text.split("  ")[0] for text in page.evaluate(heads)] == ["best", "no tag", "paper"]
        assert page.evaluate("document.querySelector('.said').textContent") == HOSTILE.strip()
        # deleted after a question
        page.evaluate("window.confirm = text => { window.asked = text; return true; }")
        page.evaluate("document.querySelector('input[aria-label=\"select y\"]').click()")
        page.evaluate("document.getElementById('delete').click()")
        page.wait(f"!{ROWS}.some(row => row.textContent.startsWith('y'))")
        assert page.evaluate("window.asked").startswith("Delete y with all checkpoints?")
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["x1", "x9"]


def test_many_runs_and_records_are_quick(tmp_path, visit, serve):
    run = make(tmp_path / "long", [start()])
    short, line = (run / "metrics.jsonl").read_text(), trained(1, 7.5).to_json()
    with (run / "metrics.jsonl").open("a") as out:
        out.writelines(line.replace('"epoch": 1.0', f'"epoch": {k / 1000}') + "\n" for k in range(100_000))
    for number in range(999):
        make(tmp_path / f"run{number:03}", []).joinpath("metrics.jsonl").write_text(short)
    address = serve(tmp_path)
    page = visit(f"{address}/")
    assert page.evaluate("document.getElementById('count').textContent") == "1000 runs"
    began = time.monotonic()
    page.go(f"{address}/run?id=long")
    assert time.monotonic() - began < 20, "1 s when nothing else runs"
    points = curves(page, "Loss")["training"]
    assert_drawn([points[0], points[-1]], [(0, 7.5), (99.999, 7.5)])
