"""The checklist: every item of the five documents with what to type and its status, gathered from docs/documents.

A page is the master: its tables `item | what to type | status`, which are written by hand, and the options and commands
that page.py puts there. docs/documents/checklist.md has them all in one table for each document.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.seeds.option_tables import STATED, example_of, option_status
from tests.seeds.reading import NOT_OURS, SeedCommand, read_commands

FOLDER = Path(__file__).parents[2] / "docs" / "documents"
DOCUMENTS = ("000", "001", "002", "003", "004")
HEAD = "| item | what to type | status |"
LONG = 100  # a command of more characters is on its page only
MARK = re.compile(
    r"^## (?P<heading>.+)$|^<!-- (?P<kind>options|commands) \d+: (?P<what>.+?) -->$|^(?P<row>\|.+\|)$", re.MULTILINE
)
# What a status begins with, and what it is called in the summary.
KINDS = {
    "works": "works, in the suite",
    "partly: ": "partly",
    "ran ": "slow: ran on the date given",
    "no counterpart: ": "no counterpart",
    "not measured: ": "not measured",
}
NOT_TYPED = "none"


@dataclass(frozen=True, kw_only=True)
class Item:
    """One row of the checklist."""

    document: str
    heading: str
    name: str
    typed: str
    status: str
    by_hand: bool = False

    @property
    def kind(self) -> str:
        return next((name for start, name in KINDS.items() if self.status.startswith(start)), "")


def command_status(command: SeedCommand) -> str:
    """Return whether a command of a document works here, and how that is known."""
    if command.kind == NOT_OURS and not command.here:
        return f"no counterpart: {command.does}"
    if command.partly:
        return f"partly: {command.partly} (`tests/test_seed_commands.py`)"
    if command.test:
        return f"works (`tests/{command.test}`)"
    if command.kind == "variable" or command.refused or command.run == "quick" or command.kind == "help":
        how = ", refused as the document says" if command.refused else ""
        return f"works{how} (`tests/test_seed_commands.py`)"
    assert command.ran, f"{command.name} was never executed"
    by = "" if command.kind == NOT_OURS else ", planned in the suite (`tests/test_seed_commands.py`)"
    return f"ran {command.ran}{by}"


def items_of(document: str) -> Iterator[Item]:
    """Yield the items of a document in the order of its page."""
    text = (FOLDER / f"{document}.md").read_text()
    commands = {str(command.line): command for command in read_commands() if command.seed == document}
    heading, by_hand = "", False
    for found in MARK.finditer(text):
        if found["heading"]:
            heading, by_hand = found["heading"], False
        elif found["row"]:
            by_hand = found["row"] == HEAD or (by_hand and " option " not in found["row"])
            if by_hand and found["row"] != HEAD and not set(found["row"]) <= set("|-"):
                name, typed, status = (part.strip() for part in found["row"].strip("|").split(" | "))
                yield Item(document=document, heading=heading, name=name, typed=typed, status=status, by_hand=True)
        elif found["kind"] == "options":
            for row in STATED[document][found["what"]]:
                name, typed = f"`--{row['option']}`", f"`{example_of(document, row['option']).typed}`"
                status = option_status(document, row["option"])
                yield Item(document=document, heading=heading, name=name, typed=typed, status=status)
        else:
            for line in found["what"].split():
                yield _item_of(commands[line], heading)


def _item_of(command: SeedCommand, heading: str) -> Item:
    typed = command.here or f"`{command.text}`"
    typed = f"as it is: line {command.line} of [{command.seed}.md]({command.seed}.md)" if len(typed) > LONG else typed
    status, name = command_status(command), f"line {command.line}: {command.does}"
    return Item(document=command.seed, heading=heading, name=name, typed=typed, status=status)


def all_items() -> list[Item]:
    """Return the items of all documents."""
    return [item for document in DOCUMENTS for item in items_of(document)]


def summary_markdown() -> str:
    """Return how many items there are of each status, by document."""
    lines = [f"| document | items | {' | '.join(KINDS.values())} |", f"|---|---|{'---|' * len(KINDS)}"]
    totals: Counter[str] = Counter()
    for document in DOCUMENTS:
        counts = Counter(item.kind for item in items_of(document))
        totals += counts
        numbers = " | ".join(str(counts[name]) for name in KINDS.values())
        lines.append(f"| [{document}]({document}.md) | {counts.total()} | {numbers} |")
    lines.append(f"| all | {totals.total()} | {' | '.join(str(totals[name]) for name in KINDS.values())} |")
    return "\n".join(lines)


def checklist_markdown(document: str) -> str:
    """Return the table of a document."""
    lines = ["| | under | item | what to type | status |", "|---|---|---|---|---|"]
    for number, item in enumerate(items_of(document), 1):
        lines.append(f"| {number} | {item.heading} | {item.name} | {item.typed} | {item.status} |")
    return "\n".join(lines)
