"""The checklist: every item of the five documents with what to type and its status, gathered from docs/documents.

A page is the master: its tables `item | what to type | status`, which are written by hand, and the options and commands
that page.py puts there. docs/documents/checklist.md has them all in one table for each document.
"""

import ast
import functools
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
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
ACTS, REFUSED, PLANNED = "acts", "refused", "planned"
AT_NIGHT, BY_HAND = "planned; acts at night", "acted, by hand"
PARTLY, CANNOT, NOT_MEASURED = "partly", "cannot mean anything", "not measured"
EVIDENCE = (ACTS, REFUSED, PLANNED, AT_NIGHT, BY_HAND, PARTLY, CANNOT, NOT_MEASURED)
NOT_TYPED = "none"
SUITE = "works: all of `tests/`"
HOW = ("headrace ", "python ", "python3 ")
# Commands that end at once, without data; the first only says what would be done.
BY_THEMSELVES = ("plan", "configs", "models", "devices", "bench")


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

    @property
    def evidence(self) -> str:
        """How it is known that the row is true, in one of the words of EVIDENCE."""
        if self.kind == KINDS["ran "]:
            return AT_NIGHT if "at night" in self.status else BY_HAND
        if self.kind != KINDS["works"]:
            others = {"partly: ": PARTLY, "no counterpart: ": CANNOT, "not measured: ": NOT_MEASURED}
            return others[next(start for start in others if self.status.startswith(start))]
        if "refused with" in self.status or "::test_refusal`" in self.status:
            return REFUSED
        executed = [words for words in self.commands if is_executed(words)]
        if self.tests and all(is_slow(*test) for test in self.tests):
            return AT_NIGHT
        if self.tests or self.status == SUITE or any(words[:2] != ["headrace", "plan"] for words in executed):
            return ACTS
        return PLANNED

    @property
    def tests(self) -> list[tuple[str, str]]:
        """The tests that the row names: (file, function)."""
        return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", self.status)

    @property
    def commands(self) -> list[list[str]]:
        """The commands that the row types, in words."""
        return [shlex.split(text) for text in re.findall(r"`([^`]+)`", self.typed) if text.startswith(HOW)]


@functools.cache
def functions_of(file: str) -> Mapping[str, bool]:
    """Return the tests of a file, and whether each is left to the night."""
    tree = ast.parse((FOLDER.parents[1] / file).read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {node.name: any(ast.unparse(mark) == "pytest.mark.slow" for mark in node.decorator_list) for node in found}


def is_slow(file: str, name: str) -> bool:
    """Say whether a test is left to the night."""
    return functions_of(file).get(name, False)


def is_executed(words: list[str]) -> bool:
    """Say whether test_checklist.py executes a command as it is; of others it has the test that the row names."""
    if words[0] != "headrace":
        return words[1] in ("verify_dataset.py", "dataset_benchmark.py")
    return (words[1] in BY_THEMSELVES and not {"--entry", "IMAGENET"} & set(words)) or words[1:] in _OF_DIGITS


_OF_DIGITS = (
    ["data", "verify", "--dataset", "digits"],
    ["data", "bench", "--dataset", "digits", "--parts", "block", "--threads", "1", "--seconds", "0.05"],
)


def command_status(command: SeedCommand) -> str:
    """Return whether a command of a document works here, and how that is known."""
    if command.kind == NOT_OURS and not command.here:
        return f"no counterpart: {command.does}"
    if command.partly:
        return f"partly: {command.partly} (`{SEED_TESTS}::test_plan`)"
    if command.test:
        return f"works (`tests/{command.test}`)"
    if command.refused:
        return f"works, refused as the document says (`{SEED_TESTS}::test_refusal`)"
    if command.kind == "variable" and "TF_CONFIG" in command.text:
        return f"works (`{SEED_TESTS}::test_workers_named_by_tf_config`)"
    if command.kind in TESTS_OF_KINDS and command.kind != "validate":
        return f"works (`{SEED_TESTS}::{TESTS_OF_KINDS[command.kind]}`)"
    if command.run == "quick":
        return f"works (`{SEED_TESTS}::test_execution`)"
    assert command.ran, f"{command.name} was never executed"
    if command.kind == NOT_OURS:
        return f"ran {command.ran}"
    planned = TESTS_OF_KINDS.get(command.kind) or ("test_measurement" if command.bench else "test_plan")
    if command.kind in ("mpirun", "profile"):
        return f"ran {command.ran}; executed at night (`tests/test_seed_commands_slow.py`)"
    return f"ran {command.ran}; planned in the suite (`{SEED_TESTS}::{planned}`), executed at night"


SEED_TESTS = "tests/test_seed_commands.py"
TESTS_OF_KINDS = {
    "variable": "test_data_dir",
    "help": "test_help_of_a_model_has_its_options",
    "restore": "test_restore",
    "validate": "test_validation",
}


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
    """Return how many rows there are of each kind of evidence, by document."""
    lines = [f"| document | items | {' | '.join(EVIDENCE)} |", f"|---|---|{'---|' * len(EVIDENCE)}"]
    totals: Counter[str] = Counter()
    for document in DOCUMENTS:
        counts = Counter(item.evidence for item in items_of(document))
        totals += counts
        numbers = " | ".join(str(counts[name]) for name in EVIDENCE)
        lines.append(f"| [{document}]({document}.md) | {counts.total()} | {numbers} |")
    lines.append(f"| all | {totals.total()} | {' | '.join(str(totals[name]) for name in EVIDENCE)} |")
    return "\n".join(lines)


def checklist_markdown(document: str) -> str:
    """Return the table of a document."""
    lines = ["| | under | item | what to type | evidence | status |", "|---|---|---|---|---|---|"]
    for number, item in enumerate(items_of(document), 1):
        lines.append(f"| {number} | {item.heading} | {item.name} | {item.typed} | {item.evidence} | {item.status} |")
    return "\n".join(lines)
