"""Fill the made parts of docs/reference: `python -m tests.seeds.page` writes them; a test keeps them in step.

A page is written by hand. Between `<!-- options 000: HEADING -->` (or `commands 001: LINE LINE`, `defaults`,
`translated`) and `<!-- end -->` stands what this file makes of options.yml, commands.yml and the schema.
"""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.config.describe import options_markdown
from headrace.reference.entrance import REFERENCE
from tests.seeds.option_tables import defaults_markdown, options_of_heading
from tests.seeds.reading import NOT_OURS, SeedCommand, read_commands

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
PART = re.compile(r"<!-- (?P<kind>\w+)(?: (?P<document>\d+): (?P<what>[^>]*?))? -->\n.*?<!-- end -->", re.DOTALL)


def status(command: SeedCommand) -> str:
    """Return in a few words whether a command runs here, and how that is known."""
    if command.kind == NOT_OURS:
        return "not ours"
    if command.kind == "variable":
        return "is read"
    if command.refused:
        return "is refused, as the document says"
    if command.run == "quick":
        return "runs, in the suite"
    return f"runs, in the slow tests ({command.ran})" if command.ran else "planned in the suite, slow test not run yet"


def numbers(command: SeedCommand) -> str:
    """Return the numbers of the plan, as far as the document states them."""
    plan = command.plan
    if not {"micro_batch", "replicas", "accumulation", "global_batch"} <= plan.keys():
        return ""
    batch = f"{plan['micro_batch']} x {plan['replicas']} x {plan['accumulation']} = {plan['global_batch']:,} images"
    stages = f", {plan['stages']} stages" if plan.get("stages", 1) > 1 else ""
    devices = f", {plan['devices']} device{'s' * (plan['devices'] != 1)}" if "devices" in plan else ""
    return f" (micro batch x replicas x accumulation: {batch}{stages}{devices})"


def commands(document: str, lines: str) -> str:
    """Return the commands at these lines of a document, each with what it does and its status."""
    found = {str(command.line): command for command in read_commands() if command.seed == document}
    return "\n\n".join(
        f"```\n{found[line].text}\n```\n\nLine {line}: {status(found[line])}. {found[line].does}{numbers(found[line])}"
        for line in lines.split()
    )


MADE: Mapping[str, Callable[[str, str], str]] = {
    "options": options_of_heading,
    "commands": commands,
    "defaults": lambda document, what: defaults_markdown(),
    "translated": lambda document, what: options_markdown(REFERENCE.sections),
}


def filled(text: str) -> str:
    """Return a page with its made parts as they should be."""

    def part(found: re.Match[str]) -> str:
        head = found[0].partition("\n")[0]
        return f"{head}\n\n{MADE[found['kind']](found['document'] or '', found['what'] or '')}\n\n<!-- end -->"

    return PART.sub(part, text)


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.md")):
        path.write_text(filled(path.read_text()))
    sys.exit(0)
