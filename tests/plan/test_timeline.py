"""Diagrams of schedules. The golden files make any change of a schedule visible; to regenerate them:

python tests/plan/test_timeline.py
"""

import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageColor

from headrace.core.errors import ConfigError
from headrace.plan.draw.diagram import Box, chrome_trace, draw_marks, draw_png, draw_svg, write_diagram
from headrace.plan.draw.text import draw_timeline
from headrace.plan.schedule import Work
from headrace.plan.simulation import equal_stages, make_table, per_stage
from headrace.plan.timeline import Timetable

GOLDEN = Path(__file__).parent / "golden"
FOUR = Work((0, 1, 2, 3), 8)

TABLES: dict[str, Timetable] = {
    "grouped": make_table("Grouped", FOUR),
    "interleaved": make_table("Interleaved", FOUR),
    "gpipe": make_table("GPipe", FOUR),
    "zero-bubble": make_table("ZeroBubble", FOUR),
    "sequential": make_table("Sequential", Work((0, 1, 2, 3), 3)),
    "interleaved-backward-twice": make_table("Interleaved", Work((0, 1, 2), 4), equal_stages(1, 2)),
    "interleaved-unequal": make_table("Interleaved", Work((0, 1, 2), 3), per_stage([0.3, 0.4, 0.5], [0.6, 0.8, 0.9])),
    "interleaved-folded": make_table("Interleaved", Work((0, 1, 1, 0), 4)),
    "grouped-folded": make_table("Grouped", Work((0, 1, 1, 0), 4)),
    "sequential-one-device": make_table("Sequential", Work((0, 0, 0, 0), 2)),
    "interleaved-concurrent": make_table("Interleaved", Work((0, (1, 2), 3), 4)),
    "interleaved-concurrent-shared": make_table("Interleaved", Work((0, (1, 2), 2), 3)),
    "interleaved-long": make_table("Interleaved", Work((0, 1, 2, 3), 128)),
    "inference": make_table("Grouped", Work((0, 1, 2, 3), 8, training=False)),
}


@pytest.mark.parametrize("name", TABLES)
def test_golden_diagrams(name):
    assert draw_timeline(TABLES[name], name) + "\n" == (GOLDEN / f"{name}.txt").read_text()


def test_no_golden_diagram_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(TABLES)


def test_a_diagram_by_hand():
    text = draw_timeline(make_table("Interleaved", Work((0, 1), 2), equal_stages(1, 2)), "two")
    assert text.splitlines() == [
        "two",
        "dev 0 |F0|F1|. |. |B0---|. |B1---|",
        "dev 1 |. |F0|B0---|F1|B1---|. |. |",
        "F0 forward of micro batch 0, B0 its backward, . idle. Stage s is on dev s.",
        "9 ticks, idle 33.3%, stored at most by stage: 2 1 micro batches.",
    ]


def test_a_diagram_of_swapped_devices_says_where_stages_are():
    text = draw_timeline(make_table("Grouped", Work((1, 0), 1)))
    assert text.splitlines()[:3] == [
        "dev 0 |. |F0|B0|. |",
        "dev 1 |F0|. |. |B0|",
        "F0 forward of micro batch 0, B0 its backward, . idle. Devices of the stages: 1 0.",
    ]


@given(st.sampled_from(["Grouped", "Sequential"]), st.integers(1, 12), st.integers(1, 150), st.integers(60, 100))
@settings(max_examples=40)
def test_diagrams_stay_narrow_and_say_what_they_leave_out(name, num_stages, num_micros, width):
    work = Work(tuple(range(num_stages)), num_micros)
    table = make_table(name, work)
    rows = [line for line in draw_timeline(table, max_width=width).splitlines() if line.startswith("dev ")]
    assert len(rows) == num_stages
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= width
    left_out = re.search(r"Columns (\d+) to (\d+) of (\d+) are left out", draw_timeline(table, max_width=width))
    assert (left_out is not None) == (" ... " in rows[0])
    shown = sum(row.count("F") for row in rows) + sum(row.count("B") for row in rows)
    if left_out is None:
        assert shown == 2 * num_stages * num_micros
    else:
        first, last = int(left_out[1]) - 1, int(left_out[2])
        assert int(left_out[3]) == table.total_time
        assert shown == sum(not first <= cell.start < last for cell in table.cells)


@pytest.mark.parametrize("name", TABLES)
def test_svg_shows_every_cell_at_its_place(name):
    table = TABLES[name]
    root = ET.fromstring(draw_svg({name: table, "again": table}))
    space = "{http://www.w3.org/2000/svg}"
    boxes = [box for box in root.iter(f"{space}rect") if box.find(f"{space}title") is not None]
    titles = [next(box.iter(f"{space}title")).text or "" for box in boxes]
    assert [title.split(":")[0] for title in titles] == [str(cell.action) for cell in table.cells] * 2
    left = min(float(box.get("x", 0)) for box in boxes)
    right = max(float(box.get("x", 0)) + float(box.get("width", 0)) for box in boxes)
    scale = (right - left) / table.total_time
    for box, cell in zip(boxes, table.cells, strict=False):
        assert float(box.get("x", 0)) - left == pytest.approx(cell.start * scale, abs=0.15)
        assert float(box.get("width", 0)) == pytest.approx((cell.end - cell.start) * scale, abs=0.15)
    assert right < float(root.get("width", 0)) < 1300


def test_svg_escapes_titles():
    assert "a &lt;b&gt; &amp; c" in draw_svg({"a <b> & c": TABLES["grouped"]})


def test_png_has_the_colours_of_the_cells_at_their_places():
    table = TABLES["interleaved"]
    drawing = draw_marks({"a": table})
    boxes = [mark for mark in drawing.marks if isinstance(mark, Box) and mark.tip]
    assert len(boxes) == len(table.cells)
    image = Image.open(io.BytesIO(draw_png({"a": table}))).convert("RGB")
    assert image.size == (round(2 * drawing.width), round(2 * drawing.height))
    for box in boxes:
        pixel = np.array(image.getpixel((round(2 * box.x) + 12, round(2 * box.y) + 8)))
        assert np.abs(pixel - ImageColor.getrgb(box.fill)).max() < 12  # a palette of 64 colours


@pytest.mark.parametrize("suffix", [".svg", ".png", ".json", ".txt"])
def test_a_diagram_is_written_as_its_suffix_says(tmp_path, suffix):
    path = tmp_path / f"schedule{suffix}"
    write_diagram(path, {"a": TABLES["interleaved"]})
    start = {".svg": b"<svg", ".png": b"\x89PNG", ".json": b'{"displayTimeUnit"', ".txt": b"a\n"}[suffix]
    assert path.read_bytes().startswith(start)
    with pytest.raises(ConfigError, match="no suffix of a diagram"):
        write_diagram(tmp_path / "schedule.gif", {"a": TABLES["interleaved"]})


def test_actions_of_no_length_can_be_drawn():
    cells = [cell._replace(end=cell.start) if cell.start == 3 else cell for cell in TABLES["grouped"].cells]
    table = Timetable(cells=tuple(cells), work=FOUR, unit="seconds")
    assert draw_svg({"a": table}).count("<title>") == len(cells)
    assert draw_timeline(table).count("dev") >= 4


def test_chrome_trace_holds_the_cells():
    table = TABLES["interleaved-concurrent"]
    measured = Timetable(
        cells=tuple(c._replace(start=c.start / 50, end=c.end / 50) for c in table.cells), work=table.work
    )
    measured = Timetable(cells=measured.cells, work=table.work, unit="seconds")
    trace = json.loads(json.dumps(chrome_trace({"planned": table, "measured": measured})))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    planned = [event for event in events if event["pid"] == 0]
    assert {e["name"]: (e["ts"], e["dur"], e["tid"]) for e in planned} == {
        str(cell.action): (1000 * cell.start, 1000 * (cell.end - cell.start), cell.device) for cell in table.cells
    }
    assert sorted(e["ts"] for e in events if e["pid"] == 1) == pytest.approx([20 * e["ts"] for e in planned])
    first = next(e for e in planned if e["name"] == "1bB2")
    assert (first["cat"], first["args"]) == ("backward", {"stage": "1b", "micro": 2})
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert names == [x for title in ("planned", "measured") for x in (title, *(f"device {d}" for d in range(4)))]


if __name__ == "__main__":
    for name, table in TABLES.items():
        (GOLDEN / f"{name}.txt").write_text(draw_timeline(table, name) + "\n")
