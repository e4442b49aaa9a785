"""Measure the figures of inference that document 003 asks for and that have none yet, and write them down.

    python benchmarks/document_figures.py measure --output figures.jsonl --seconds 570
    python benchmarks/document_figures.py write figures.jsonl

The first measures each point of the named benchmarks in a process of its own, as `headrace bench --entry NAME` does,
and appends a line of JSON for each. It begins no point after --seconds, and a second start goes on with the points
that the file does not have yet. What stands behind `--` is given to every measurement (`-- --num-calls 3`).
The second writes the dated record, its line in benchmarks/README.md, the rates in tests/seeds/figures.yml and the
pages.
"""

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from headrace.cli.benchmark_file import SHIPPED, read_entries  # noqa: E402
from tests.seeds.figures import FIGURES, RECORDS, figures  # noqa: E402

YAML = ROOT / "tests" / "seeds" / "figures.yml"


def missing(output: Path) -> Iterator[tuple[str, int]]:
    """Yield the benchmark and the batch of each point that has no figure, neither in the document nor in the file."""
    found = {(line["entry"], line["point"]["batch-size"]) for line in read(output)} if output.exists() else set()
    for each in figures():
        if each.rate is None and (each.entry, each.batch) not in found:
            yield each.entry, each.batch


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of measurements."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(output: Path, seconds: float, more: list[str]) -> int:
    """Measure what is missing, one point after the other; return the number of points that failed."""
    begin, entries, failed = time.monotonic(), read_entries(SHIPPED), 0
    todo = list(missing(output))
    print(f"{len(todo)} points to measure", flush=True)
    for number, (name, batch) in enumerate(todo, 1):
        if time.monotonic() - begin > seconds:
            print(f"{len(todo) - number + 1} points are left: start this again", flush=True)
            break
        point = {"batch-size": batch}
        command = ["headrace", *entries[name].command(point, more)]
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, check=False, cwd=ROOT / "src"
        )
        if done.returncode:
            failed += 1
            print(f"{name} {batch} failed:\n{done.stderr[-2000:]}", flush=True)
            continue
        line = {
            "entry": name,
            "point": point,
            "command": shlex.join(command),
            **json.loads(done.stdout.splitlines()[-1]),
        }
        with output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{number}/{len(todo)}  {name}, batch {batch}: {line['mean']:,.0f} img/s", flush=True)
    return failed


def row(line: Mapping[str, Any]) -> str:
    """Return the row of a measurement in the record."""
    latency = line["latency_milliseconds"]
    cells = (
        f"`{line['entry']}`, batch {line['point']['batch-size']}",
        f"{line['mean']:,.0f}",
        f"{line['standard_deviation']:,.0f}",
        f"{len(line['each_call'])} of {line['batches_per_call']} batches",
        f"{line['compile_seconds']:.1f} s",
        f"{latency['p50']:.2f} / {latency['p99']:.2f}",
    )
    return "| " + " | ".join(cells) + " |"


def record(lines: list[dict[str, Any]], day: str) -> str:
    """Return the page of the measurements."""
    first = lines[0]
    devices = " and ".join(sorted({line["device"] for line in lines}))
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    text = f"""# Inference by the batches of document 003

{day}. {devices}, {versions}. [document_figures.py](../document_figures.py): each row is
`headrace bench --entry NAME --batch-size N` in a process of its own, the mean of the timed calls without the first.
Entries named `_host` run in one process here, in four in the document.

| entry | images/s | ± | calls | compile | latency of a batch, p50 / p99 ms |
|---|---|---|---|---|---|
"""
    return text + "".join(f"{row(line)}\n" for line in lines)


def write(source: Path) -> None:
    """Write the record and put the rates where the document's page takes them from."""
    lines = read(source)
    if any("cpu" in line["device"].lower() for line in lines):
        sys.exit(f"{source} has measurements of a CPU, and the page's column says one H200.")
    day = f"{datetime.datetime.now(datetime.UTC).date()}"
    page = f"{day}-h200-inference.md"
    (RECORDS / page).write_text(record(lines, day))
    rates = {
        name: {batch: dict(known) for batch, known in entry.items() if batch.isdigit()}
        for name, entry in FIGURES.items()
    }
    for line in lines:
        rates[line["entry"]][str(line["point"]["batch-size"])] = {"rate": round(line["mean"]), "record": page}
    YAML.write_text(figures_yaml(YAML.read_text(), rates))
    index = ROOT / "benchmarks" / "README.md"
    what = "one H200: inference by the batches of document 003 ([document_figures.py](document_figures.py))"
    entry = f"| [{page}](dated/{page}) | {what} |\n"
    if entry not in (text := index.read_text()):
        before, heading, after = text.partition("| [gpu_kernels.py]")
        index.write_text(before + entry + heading + after)
    subprocess.run([sys.executable, "-m", "tests.seeds.page"], check=True, cwd=ROOT)
    print(f"wrote {RECORDS / page}, {YAML}, {index} and the pages")


def figures_yaml(text: str, rates: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return figures.yml with these rates: its comment and the lines of other benchmarks stay as they are."""
    kept = [line for line in text.splitlines() if line.startswith("#") or not line or "same_as" in line]
    out = [line for line in kept if line.startswith("#")] + [""]
    alike = {line.partition(":")[0]: line for line in kept if "same_as" in line}
    for name in FIGURES:
        if name in alike:
            out.append(alike[name])
            continue
        out.append(f"{name}:")
        ordered = sorted(rates[name].items(), key=lambda item: int(item[0]))
        out += [f'  "{batch}": {{rate: {known["rate"]}, record: {known["record"]}}}' for batch, known in ordered]
    return "\n".join(out) + "\n"


def main() -> int:
    """Measure, or write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    measuring = parts.add_parser("measure")
    measuring.add_argument("--output", type=Path, required=True)
    measuring.add_argument("--seconds", type=float, default=570.0)
    measuring.add_argument("more", nargs="*")
    parts.add_parser("write").add_argument("lines", type=Path)
    args = parser.parse_args()
    if args.part == "write":
        write(args.lines)
        return 0
    return min(1, measure(args.output.absolute(), args.seconds, args.more))


if __name__ == "__main__":
    sys.exit(main())
