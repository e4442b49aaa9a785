"""Fill the made parts of docs/documents: `python -m tests.seeds.page` writes them; a test keeps them in step.

A page is written by hand. Between `<!-- options 000: HEADING -->` (or `commands 001: LINE LINE`, `defaults`,
`translated`, `checklist 000: all`, `summary`, `figures`) and `<!-- end -->` stands what this file makes of options.yml,
proofs.yml, figures.yml and commands.yml, of the schema and, for the checklist, of the pages themselves.
"""

import re
import sys
from collections.abc import Callable, Mapping

from headrace.cli.options_text import options_markdown
from headrace_reference.entrance import REFERENCE
from tests.seeds.checklist import FOLDER, checklist_markdown, command_status, summary_markdown
from tests.seeds.figures import figures_markdown
from tests.seeds.option_tables import defaults_markdown, options_of_heading
from tests.seeds.reading import SeedCommand, read_commands

PART = re.compile(r"<!-- (?P<kind>\w+)(?: (?P<document>\d+): (?P<what>[^>]*?))? -->\n.*?<!-- end -->", re.DOTALL)


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
        f"```\n{found[line].text}\n```\n\nLine {line}: {_shown(found[line])}{numbers(found[line])}"
        for line in lines.split()
    )


def _shown(command: SeedCommand) -> str:
    typed = f" Type {command.here}." if command.here else ""
    status = command_status(command)
    return f"{status}{typed}" if status.endswith(command.does) else f"{status}. {command.does}{typed}"


MADE: Mapping[str, Callable[[str, str], str]] = {
    "options": options_of_heading,
    "commands": commands,
    "checklist": lambda document, what: checklist_markdown(document),
    "summary": lambda document, what: summary_markdown(),
    "figures": lambda document, what: figures_markdown(),
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
    for path in sorted(FOLDER.glob("*.md")):  # the checklist last: it is made from the pages
        path.write_text(filled(path.read_text()))
    sys.exit(0)
