"""Fuzz for a time: `python -m tests.fuzz SECONDS [SEED]`."""

import sys
import tempfile
from pathlib import Path

from tests.fuzz.harness import fuzz

with tempfile.TemporaryDirectory() as folder:
    counts, findings = fuzz(
        Path(folder), int(sys.argv[2]) if len(sys.argv) > 2 else 0, seconds=float(sys.argv[1]) if sys.argv[1:] else 60
    )
for (name, found), count in sorted(counts.items()):
    print(f"{name:12} {found:9} {count:9,}")
print(*findings, sep="\n")
sys.exit(bool(findings))
