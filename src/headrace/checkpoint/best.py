"""The best checkpoints so far: best.json beside the checkpoints holds score, name and which weights were scored."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.checkpoint.store import step_of, verify, write_error
from headrace.core.errors import CheckpointError
from headrace.core.files import write_atomic

BEST_FILE = "best.json"


@dataclass(frozen=True, kw_only=True)
class Best:
    """A checkpoint and its score (more is better), reached with its raw or its ema weights."""

    score: float
    name: str
    weights: str = "raw"


def rank(entries: tuple[Best, ...], new: Best, keep_best: int) -> tuple[Best, ...]:
    """Return the `keep_best` best checkpoints, best first. A checkpoint counts once, with its better weights;
    of equal scores the earlier one stays ahead; a score that is not a number is never among the best."""
    if math.isnan(new.score):
        return entries[:keep_best]
    best: dict[str, Best] = {}
    for entry in (*entries, new):
        if entry.name not in best or entry.score > best[entry.name].score:
            best[entry.name] = entry
    return tuple(sorted(best.values(), key=lambda entry: -entry.score)[:keep_best])


def read_best(directory: Path | str) -> tuple[Best, ...]:
    """Return the best checkpoints, best first; none when nothing was scored yet."""
    path = Path(directory) / BEST_FILE
    try:
        return tuple(Best(**entry) for entry in json.loads(path.read_bytes())["best"])
    except FileNotFoundError:
        return ()
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}).", remedy="Delete it; the next validation writes a new one."
        ) from error
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error


def offer(directory: Path | str, new: Best, keep_best: int) -> bool:
    """Enter a score into best.json; return whether it is now the very best one."""
    before = read_best(directory)
    after = rank(before, new, keep_best)
    if after != before:
        _write(Path(directory), after)
    return bool(after) and after[0] == new and before[:1] != after[:1]


def best_names(directory: Path | str) -> set[str]:
    """Return the names that pruning must keep."""
    return {entry.name for entry in read_best(directory)}


def best_good(directory: Path | str) -> Best | None:
    """Return the best entry whose checkpoint is there and good."""
    return next((entry for entry in read_best(directory) if not verify(Path(directory) / entry.name)), None)


def rewind_best(directory: Path | str, step: int) -> None:
    """Forget entries beyond the restored step, and those whose checkpoint is gone."""
    directory = Path(directory)
    before = read_best(directory)
    after = tuple(e for e in before if (directory / e.name).is_dir() and (step_of(Path(e.name)) or 0) <= step)
    if after != before:
        _write(directory, after)


def _write(directory: Path, entries: tuple[Best, ...]) -> None:
    text = json.dumps({"best": [asdict(entry) for entry in entries]}, indent=1) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / BEST_FILE, text.encode())
    except OSError as error:
        raise write_error(directory / BEST_FILE, error) from error
