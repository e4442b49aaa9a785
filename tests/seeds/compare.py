"""Compare commands.yml and options.yml with the documents: `python tests/seeds/compare.py DIRECTORY` names differences.

The documents are not part of this repository, so the suite cannot do this by itself.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

COMMANDS = Path(__file__).with_name("commands.yml")
OPTIONS = Path(__file__).with_name("options.yml")
SEEDS = ("000", "001", "003", "004")
PROGRAMS = r"(?:python3?|pip|poprun|mpirun|export|source|virtualenv|gc-profile|gc-info|POPLAR_ENGINE_OPTIONS=\S+)"
TYPED = re.compile(rf"^\s*({PROGRAMS}(?:\s.*)?)$")  # a line of its own, in a block
INLINE = re.compile(rf"`({PROGRAMS}\s[^`]+|--pipeline --shards [^`]+)`")


def commands(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, command on one line) of every command that a seed prints."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        first, line = number, lines[number]
        if typed := TYPED.match(line):
            whole = typed[1]
            while whole.rstrip().endswith("\\"):
                number += 1
                whole = f"{whole.rstrip()[:-1]} {lines[number].strip()}"
            yield first + 1, plain(whole)
        else:
            yield from ((first + 1, plain(found)) for found in INLINE.findall(line))
        number += 1


def plain(text: str) -> str:
    """Return a command with single spaces."""
    return " ".join(text.split())


def stated(text: str, heading: str, option: str) -> str | None:
    """Return what a document says under a heading about an option, up to the next one, with single spaces."""
    under = re.search(rf"^\s*#+ {re.escape(heading)}\s*$(.*?)(?=^\s*#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    if under is None:
        return None
    parts = re.split(r"^\s*`?(?=--[\w-]+)", under[1], flags=re.MULTILINE)
    spoken = [part for part in parts if re.match(rf"--{re.escape(option)}\b", part)]
    return plain(spoken[0]) if spoken else plain(under[1])


def wrong_defaults(place: Path) -> list[str]:
    """Return the defaults of options.yml that the documents do not state so, and stated ones that it lacks."""
    found = []
    for document, headings in yaml.safe_load(OPTIONS.read_text()).items():
        (path,) = place.glob(f"{document}_*.txt")
        text = path.read_text()
        for heading, rows in headings.items():
            for row in rows:
                said = stated(text, heading, row["option"])
                if row.get("states") and row["states"] not in (said or ""):
                    found.append(f"not stated: {document}: {row['option']} {row['states']}")
        names = {row["option"] for rows in headings.values() for row in rows}
        for name in re.findall(r"^\s*`?--([\w-]+)", text, re.MULTILINE) if document == "000" else ():
            if name not in names:
                found.append(f"missing: {document}: --{name}")
    return found


def main(place: Path) -> int:
    """Print the differences; return 1 if there are any."""
    told = {(row["seed"], row["line"], plain(row["text"])) for row in yaml.safe_load(COMMANDS.read_text())}
    found = set()
    for seed in SEEDS:
        (path,) = place.glob(f"{seed}_*.txt")
        found |= {(seed, line, text) for line, text in commands(path.read_text())}
    for word, rows in (("missing", found - told), ("not in the seed", told - found)):
        for seed, line, text in sorted(rows):
            print(f"{word}: {seed}:{line}: {text}")
    print(f"{len(found)} commands in the documents, {len(told)} in {COMMANDS.name}")
    defaults = wrong_defaults(place)
    print("\n".join([*defaults, f"{len(defaults)} defaults of {OPTIONS.name} differ"]))
    return int(found != told or bool(defaults))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
