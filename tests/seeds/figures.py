"""Document 003's figures: a line for each of its benchmarks and batches, its plan beside what was measured here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headrace.cli.benchmark_file import SHIPPED, read_entries
from tests.seeds.reading import SeedCommand, read_commands

FIGURES: Mapping[str, Mapping[str, Any]] = yaml.safe_load(Path(__file__).with_name("figures.yml").read_text())
RECORDS = Path(__file__).parents[2] / "benchmarks" / "dated"
NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One point of a benchmark of the document."""

    entry: str
    command: SeedCommand
    batch: int
    rate: int | None  # images per second on one H200
    record: str
    remark: str = ""

    @property
    def ours(self) -> str:
        if self.rate is None:
            return NOT_MEASURED
        return f"{self.rate:,} ([record](../../benchmarks/dated/{self.record})){self.remark}"


def figures() -> Iterator[Figure]:
    """Yield the points of the document's benchmarks, in its order."""
    commands = [command for command in read_commands() if command.seed == "003"]
    for (name, entry), command in zip(read_entries(SHIPPED).items(), commands, strict=False):
        told = FIGURES[name]
        measured = FIGURES[told["same_as"]] if "same_as" in told else told
        remark = f"; the program of `{told['same_as']}`" if "same_as" in told else ""
        remark += f" with {told['with']}" if "with" in told else ""
        for batch in entry.sweep.get("batch-size", [command.plan.get("micro_batch")]):
            found = measured.get(str(batch), {})
            yield Figure(
                entry=name,
                command=command,
                batch=batch,
                rate=found.get("rate"),
                record=found.get("record", ""),
                remark=remark,
            )


def plan_of(command: SeedCommand) -> str:
    """Return the plan of a command in a few words."""
    plan, processes = command.plan, command.launch.get("processes", 1)
    several = f", {processes} processes" if processes > 1 else ""
    if not plan:
        return f"{processes} device{'s' * (processes > 1)}{several}"
    batch = f"{plan['micro_batch']} x {plan['replicas']} x {plan['accumulation']:,} = {plan['global_batch']:,} images"
    return f"{batch}, {plan['stages']} stages, {plan['devices']} devices{several}"


def figures_markdown() -> str:
    """Return the table of the figures."""
    lines = ["| line | benchmark | batch | the document's plan | images/s on one H200 |", "|---|---|---|---|---|"]
    lines += [
        f"| {each.command.line} | `{each.entry}` | {each.batch} | {plan_of(each.command)} | {each.ours} |"
        for each in figures()
    ]
    return "\n".join(lines)
