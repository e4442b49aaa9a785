"""Damage good files by a seed and classify what the readers do: a clear error, or accepted; anything else is a finding.

A finding is kept as a file in `corpus/READER-...`, which every later run reads first.
"""

import hashlib
import random
import time
from collections import Counter
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


def outcome(name: str, data: bytes, folder: Path) -> str:
    """Return `error`, `accepted` or, for a finding, its description."""
    file = folder / "case"
    file.write_bytes(data)
    before = time.monotonic()
    try:
        READERS[name].read(file)
    except READERS[name].clear:
        found = "error"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        found = f"{type(error).__name__}: {error}"
    else:
        found = "accepted"
    limit = READERS[name].max_seconds
    return found if time.monotonic() - before < limit else f"took over {limit} s ({found})"


def fuzz(folder: Path, seed: int, cases: int | None = None, seconds: float | None = None) -> tuple[Counter, list[str]]:
    """Return (counts of reader and outcome, findings) of so many cases, or of as many as the time allows."""
    rng, counts, findings = random.Random(seed), Counter(), []
    names, weights = list(READERS), [reader.weight for reader in READERS.values()]
    start, done = time.monotonic(), 0
    while (cases is None or done < cases) and (seconds is None or time.monotonic() - start < seconds):
        (name,) = rng.choices(names, weights)
        data = mutate(rng.choice(READERS[name].good), rng)
        found = outcome(name, data, folder)
        done += 1
        counts[name, found if found in ("error", "accepted") else "finding"] += 1
        if found not in ("error", "accepted"):
            kept = CORPUS / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
            kept.write_bytes(data)
            findings.append(f"{kept.name}: {found[:300]}")
    return counts, findings
