"""Compare commands.yml with the seeds: `python tests/seeds/compare.py SEEDS_DIR` names what is missing or not there.

The seeds are not part of this repository, so the suite cannot do this by itself.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

COMMANDS = Path(__file__).with_name("commands.yml")
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
    print(f"{len(found)} commands in the seeds, {len(told)} in {COMMANDS.name}")
    return int(found != told)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
