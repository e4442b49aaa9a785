"""docs/explanation/schedules.md: its diagrams are those of the schedules, its numbers are right, its code
runs. To regenerate them:

python tests/plan/test_docs_schedules.py
"""

import re
from pathlib import Path

import pytest

from headrace.plan.draw.diagram import draw_svg
from headrace.plan.schedule import Work
from headrace.plan.simulation import equal_stages, make_table

DOCS = Path(__file__).parents[2] / "docs"
PAGE, DIAGRAM = DOCS / "explanation" / "schedules.md", DOCS / "plots" / "schedule-four-stages.svg"
GOLDEN = Path(__file__).parent / "golden"
SHOWN = re.compile(r"(<!-- (.*?) -->\n```\n)(.*?)(```)", re.DOTALL)


def diagram(name: str) -> str:
    """Return the golden diagram without its title."""
    return (GOLDEN / f"{name}.txt").read_text().split("\n", 1)[1]


def drawing() -> str:
    work = Work((0, 1, 2, 3), 8)
    return draw_svg({name: make_table(name, work) for name in ("Grouped", "Interleaved", "Sequential")})


def test_the_page_shows_the_schedules_as_they_are():
    shown = SHOWN.findall(PAGE.read_text())
    assert len(shown) >= 6
    assert all(text == diagram(name) for _, name, text, _ in shown)
    assert DIAGRAM.read_text() == drawing()


@pytest.mark.parametrize(("num_micros", "percent"), [(8, 27), (16, 16), (64, 4)])
def test_idle_shares_of_the_page(num_micros, percent):
    bubble = make_table("Interleaved", Work((0, 1, 2, 3), num_micros), equal_stages(1, 2)).bubble
    assert round(100 * bubble) == percent


@pytest.mark.parametrize(
    ("name", "transfer", "percent"),
    [("Interleaved", 0, 4.5), ("Interleaved", 10, 9.0), ("Grouped", 0, 4.5), ("Grouped", 10, 4.8)],
)
def test_transfers_of_the_page(name, transfer, percent):
    bubble = make_table(name, Work((0, 1, 2, 3), 64), equal_stages(100, 200), transfer).bubble
    assert round(100 * bubble, 1) == percent


def test_the_code_runs(capsys):
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    exec(code[1], {})
    assert capsys.readouterr().out.startswith(f"{19 * 3} {3 / 19}"[:8])


if __name__ == "__main__":
    PAGE.write_text(SHOWN.sub(lambda found: found[1] + diagram(found[2]) + found[4], PAGE.read_text()))
    DIAGRAM.write_text(drawing())
