"""Damage good files by a seed and classify what the readers do: a clear error, or accepted; anything else is a finding.

What is accepted is compared with what an independent reader finds in the same bytes, or with what was written, where
the format has checksums. A reader that takes too much memory is a finding too. A finding is kept as a file in
`corpus/READER-...`, which every later run reads first.
"""

import hashlib
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.readers import NUMBERS, READERS

CORPUS = Path(__file__).parent / "corpus"


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return the file with one to three kinds of damage."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        if not found:
            break
        at = rng.randrange(len(found))
        match rng.randrange(7):
            case 0:
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                found[at] = rng.choice((0, 1, 0x28, 0x5B, 0x7B, 0x7F, 0x80, 0xFF))
            case 2:
                number = rng.choice(NUMBERS)[: rng.choice((1, 2, 4, 8))]
                found[at : at + len(number)] = number
            case 3:
                del found[at:]
            case 4:
                del found[at : at + rng.randint(1, 16)]
            case 5:
                part = found[at : at + rng.randint(1, 32)]
                place = rng.randrange(len(found))
                found[place:place] = part * rng.choice((1, 1, 1, 100))
            case _:
                other = rng.randrange(len(found))
                found[at : at + 8], found[other : other + 8] = found[other : other + 8], found[at : at + 8]
    return bytes(found)


def damaged(name: str, rng: random.Random) -> bytes:
    """Return a good file of a reader with damage: in its structure, anywhere, or both."""
    reader = READERS[name]
    data = rng.choice(reader.good)
    if not reader.mutations or rng.random() < 0.4:
        return mutate(data, rng)
    data = rng.choice(reader.mutations)(data, rng)
    return mutate(data, rng) if rng.random() < 0.1 else data


def outcome(name: str, data: bytes, folder: Path) -> str:
    """Return `error`, `accepted` or, for a finding, its description."""
    file = folder / "case"
    file.write_bytes(data)
    reader = READERS[name]
    if reader.max_bytes:
        tracemalloc.start()
    before = time.monotonic()
    try:
        value = reader.read(file)
        found = "accepted"
        if reader.check is not None:
            reader.check(data, value)
    except reader.clear:
        found = "error"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        found = f"{type(error).__name__}: {error}"
    finally:
        most = tracemalloc.get_traced_memory()[1] if reader.max_bytes else 0
        tracemalloc.stop()
    if most > reader.max_bytes:
        return f"took {most:,} bytes for {len(data):,} ({found})"
    limit = reader.max_seconds
    return found if time.monotonic() - before < limit else f"took over {limit} s ({found})"


def fuzz(
    folder: Path,
    seed: int,
    cases: int | None = None,
    seconds: float | None = None,
    names: Sequence[str] = tuple(READERS),
    corpus: Path = CORPUS,
) -> tuple[Counter, list[str]]:
    """Return (counts of reader and outcome, findings) of so many cases, or of as many as the time allows."""
    rng, counts, findings = random.Random(seed), Counter(), []
    weights = [READERS[name].weight for name in names]
    start, done = time.monotonic(), 0
    while (cases is None or done < cases) and (seconds is None or time.monotonic() - start < seconds):
        (name,) = rng.choices(names, weights)
        data = damaged(name, rng)
        found = outcome(name, data, folder)
        done += 1
        counts[name, found if found in ("error", "accepted") else "finding"] += 1
        if found not in ("error", "accepted"):
            kept = corpus / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
            kept.write_bytes(data)
            findings.append(f"{kept.name}: {found[:300]}")
    return counts, findings
