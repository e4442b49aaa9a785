"""Bad samples: reported once each, listed in a file; too many of them stop the run."""

import json
import threading
from contextlib import suppress
from pathlib import Path

from headrace.core.errors import DataError
from headrace.core.json_text import parse_json

FILE = "bad_samples.jsonl"


class BadSamples:
    """The bad samples that a process has met in both splits of its dataset."""

    def __init__(self, name: str, num_samples: int, max_share: float) -> None:
        # One broken file of a few hundred is no reason to stop, unless none is allowed.
        self._limit = max(int(max_share * num_samples), 1 if max_share > 0 else 0)
        self._name, self._share = name, max_share
        self._lock = threading.Lock()
        self._found: dict[tuple[str, int], dict[str, str | int]] = {}
        self._path: Path | None = None
        self._listed: set[tuple[str | int, str | int]] = set()

    def __len__(self) -> int:
        return len(self._found)

    @property
    def rows(self) -> list[dict[str, str | int]]:
        """Return split, sample, name and problem of each, in the order in which they were met."""
        return list(self._found.values())

    def write_to(self, path: Path) -> None:
        """List them in this file from now on, those met so far included; nothing is written while there are none."""
        with self._lock:
            self._path = path
            text = path.read_text() if path.exists() else ""  # of the run before it was resumed
            # A resumed run appends to the list, and must not list the same image twice.
            for line in text.splitlines():
                with suppress(ValueError, KeyError, TypeError):  # a run that was killed may leave half a line
                    row = parse_json(line)
                    self._listed.add((row["split"], row["sample"]))
            if text and not text.endswith("\n"):
                path.write_text(f"{text}\n")
            for row in self._found.values():
                self._append(row)

    def add(self, split: str, sample: int, name: str, problem: str) -> None:
        """Count a sample the first time it is met; one too many is a DataError."""
        with self._lock:
            # Every epoch meets it again.
            if (split, sample) in self._found:
                return
            row = {"split": split, "sample": sample, "name": name, "problem": problem}
            self._found[split, sample] = row
            self._append(row)
            count = len(self._found)
        if count > self._limit:
            where = f" They are listed in {self._path}." if self._path else ""
            raise DataError(
                f"{count:,} bad sample(s) in {self._name}, the last one {name}: {problem}.{where}",
                rule=f"At most {self._limit:,} may be bad: --max-bad-samples {self._share:g} of the samples.",
                remedy="`headrace data verify` names all of them; fix or delete them, or raise --max-bad-samples.",
            )

    def describe(self) -> str:
        """Describe them in a sentence, which is empty while there are none."""
        if not self._found:
            return ""
        first = next(iter(self._found.values()))
        where = f", listed in {self._path.name}" if self._path else ""
        return (
            f"{len(self._found):,} bad sample(s) were replaced by the next of their class{where}; "
            f"the first: {first['name']}: {first['problem']}"
        )

    def _append(self, row: dict[str, str | int]) -> None:
        if self._path is not None and (row["split"], row["sample"]) not in self._listed:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
