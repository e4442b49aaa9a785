"""Make docs/seeds.md from commands.yml: `python -m tests.seeds.page` writes it; a test keeps it in step."""

import sys
from pathlib import Path

from tests.seeds.reading import NOT_OURS, SeedCommand, read_commands

PAGE = Path(__file__).parents[2] / "docs" / "seeds.md"

OPENING = """# The commands of the seeds

Headrace follows five documents on training convolutional networks, the seeds. Four of them contain commands to type;
each of these commands is listed here, with what it does in a clone of this repository and how that was checked. The
scripts (`train.py`, `validation.py`, ...) are at the repository's root. They run `headrace train` and the other
commands with the option names and defaults of the application that a command line is written for;
[seed_options.md](seed_options.md) lists all of them.

`poprun` is a command of Headrace ([hosts.md](hosts.md)). A plan needs no devices: put `headrace plan` in the place of
`python train.py` to see what a command comes to, or add `--dry-run-steps 1` to try it. On a machine with fewer devices
than a command asks for, `--platform cpu` makes virtual ones.

How the status is checked: the suite passes every command, unchanged, through the real parser and planner, and compares
the plan with what the seed's text states. **In the suite** and **in the slow tests** mean that it
is also executed, for one weight update (or one measurement) on virtual CPU devices with synthetic images of 8 pixels;
the date is that of its last run. The slow ones are in `tests/test_seed_commands_slow.py`; those with 16 and 32
processes need much memory.
"""

TITLES = {
    "000": "Seed 000: training in TensorFlow 2",
    "001": "Seed 001: training in TensorFlow 1",
    "003": "Seed 003: benchmarks",
    "004": "Seed 004: porting EfficientNet",
}


def status(command: SeedCommand) -> str:
    """Return in a few words whether a command runs here, and how that is known."""
    if command.kind == NOT_OURS:
        return "not ours"
    if command.kind == "variable":
        return "is read"
    if command.refused:
        return "is refused, as the seed says"
    if command.run == "quick":
        return "runs, in the suite"
    return f"runs, in the slow tests ({command.ran})" if command.ran else "planned in the suite, slow test not run yet"


def numbers(command: SeedCommand) -> str:
    """Return the numbers of the plan, as far as the seed states them."""
    plan = command.plan
    if not {"micro_batch", "replicas", "accumulation", "global_batch"} <= plan.keys():
        return ""
    batch = f"{plan['micro_batch']} x {plan['replicas']} x {plan['accumulation']} = {plan['global_batch']:,} images"
    stages = f", {plan['stages']} stages" if plan.get("stages", 1) > 1 else ""
    devices = f", {plan['devices']} device{'s' * (plan['devices'] != 1)}" if "devices" in plan else ""
    return f" (micro batch x replicas x accumulation: {batch}{stages}{devices})"


def entry(command: SeedCommand) -> str:
    """Return a command with what it does."""
    head = f"### Line {command.line}: {status(command)}"
    return f"{head}\n\n```\n{command.text}\n```\n\n{command.does}{numbers(command)}\n"


def page() -> str:
    """Return the whole page."""
    parts = [OPENING]
    for seed, title in TITLES.items():
        parts += [f"## {title}\n", *(entry(command) for command in read_commands() if command.seed == seed)]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)
