"""Which checkpoints to keep: the best so far, listed in best.json, and the last ones; pruning the others."""

import json
import math
import shutil
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.checkpoint.store import Checkpoint, list_checkpoints, read_first_good, verify, write_error
from headrace.core.errors import CheckpointError
from headrace.core.files import write_atomic
from headrace.core.json_text import parse_json

BEST_FILE = "best.json"


@dataclass(frozen=True, kw_only=True)
class ScoredCheckpoint:
    """A checkpoint and its score (more is better), reached with its raw or its ema weights, and its loss.

    Lists of earlier versions have no losses.
    """

    score: float
    name: str
    weights: str = "raw"
    loss: float | None = None

    @property
    def rank(self) -> tuple[float, float]:
        """What checkpoints are compared by, more is better: of equal scores the lower loss."""
        return self.score, -math.inf if self.loss is None else -self.loss


def rank(entries: tuple[ScoredCheckpoint, ...], new: ScoredCheckpoint, keep_best: int) -> tuple[ScoredCheckpoint, ...]:
    """Return the `keep_best` best checkpoints, best first.

    A checkpoint counts once, with its better weights, or with those scored first where they are equal; of equal scores
    the one with the lower loss is ahead, then the earlier one; a score that is not a number is never among the best.
    """
    best: dict[str, ScoredCheckpoint] = {}
    for entry in (*entries, new):
        if not math.isnan(entry.score) and (entry.name not in best or entry.rank > best[entry.name].rank):
            best[entry.name] = entry
    # sorted() is stable, also in reverse: of equal ones the earlier checkpoint stays ahead.
    return tuple(sorted(best.values(), key=lambda entry: entry.rank, reverse=True)[:keep_best])


class BestCheckpoints:
    """The list in best.json. The file is the only state: when `add` returns, the entry is on disk."""

    def __init__(self, directory: Path | str, keep_best: int = 1) -> None:
        self.directory, self.keep_best = Path(directory), keep_best

    def entries(self) -> tuple[ScoredCheckpoint, ...]:
        """Return the best checkpoints, best first; none when nothing was scored yet."""
        path = self.directory / BEST_FILE
        try:
            return tuple(ScoredCheckpoint(**entry) for entry in parse_json(path.read_bytes())["best"])
        except FileNotFoundError:
            return ()
        except (ValueError, KeyError, TypeError) as error:
            remedy = "Delete it; the next validation writes a new one."
            raise CheckpointError(f"{path} is damaged ({error}).", remedy=remedy) from error
        except OSError as error:
            raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error

    def add(self, score: float, name: str, weights: str = "raw", loss: float | None = None) -> bool:
        """Add a score; return whether it is now the best one."""
        before = self.entries()
        after = rank(
            before, ScoredCheckpoint(score=float(score), name=name, weights=weights, loss=loss), self.keep_best
        )
        if after != before:
            self._write(after)
        return after[:1] != before[:1]

    def names(self) -> set[str]:
        """Return the names that pruning must keep."""
        return {entry.name for entry in self.entries()}

    def read_first_good(self) -> tuple[ScoredCheckpoint, Checkpoint] | None:
        """Return the best entry whose checkpoint exists and is good, and the checkpoint."""
        entries = {entry.name: entry for entry in self.entries()}
        found, _ = read_first_good(self.directory / name for name in entries)
        return found and (entries[found.path.name], found)

    def reset(self, scores: Iterable[ScoredCheckpoint]) -> None:
        """Rebuild the list from all scores of a run, in order, without checkpoints that no longer exist."""
        entries: tuple[ScoredCheckpoint, ...] = ()
        for scored in scores:
            if (self.directory / scored.name).is_dir():
                entries = rank(entries, scored, self.keep_best)
        self._write(entries)

    def _write(self, entries: tuple[ScoredCheckpoint, ...]) -> None:
        text = json.dumps({"best": [asdict(entry) for entry in entries]}, indent=1) + "\n"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomic(self.directory / BEST_FILE, text.encode())
        except OSError as error:
            raise write_error(self.directory / BEST_FILE, error) from error


def prune(directory: Path | str, keep_last: int, keep: Collection[str] = (), written: str = "") -> list[Path]:
    """Delete all checkpoints but the last `keep_last` and those named in `keep`; return the deleted paths.

    Before anything is deleted, one that stays must be good: one that this process has just `written` is, any other must
    verify. If none is, the newest good one among those to be deleted stays as well, so that the only good one is never
    lost. A checkpoint that is being written has a hidden name and is never touched.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, not {keep_last}")
    everything = list_checkpoints(directory)
    # `.old-` is what a crash left of a replaced checkpoint; it counts under its real name.
    stay = [path for path in everything if path in everything[-keep_last:] or path.name.removeprefix(".old-") in keep]
    go = [path for path in everything if path not in stay]
    # To read what was written and synced a moment ago would find it in memory, and take as long as writing it. Of
    # others the newest first: usually it verifies, and nothing else is read.
    if go and not any(path.name == written or not verify(path) for path in reversed(stay)):
        last_good = next((path for path in reversed(go) if not verify(path)), None)
        go = [path for path in go if path != last_good]
    for path in go:
        _delete(path)
    return go


def _delete(path: Path) -> None:
    """Delete a checkpoint: renamed to a hidden name first, so that a crash half-way leaves no damaged one behind."""
    # Hidden names are swept by the next save, whoever left them.
    hidden = path.with_name(f".tmp-deleted-{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
