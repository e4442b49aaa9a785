"""Rewind: bring the records of a run back to the step that was restored, after a crash or by choice."""

from dataclasses import dataclass
from pathlib import Path

from headrace.telemetry.files import METRICS_FILE, read_records, replace_file
from headrace.telemetry.record import Record
from headrace.telemetry.sinks import write_tables


@dataclass(frozen=True, kw_only=True)
class Rewound:
    """What a rewind left: the records kept, how many were dropped, and the bytes of a half-written tail."""

    records: tuple[Record, ...]
    num_dropped: int
    tail_bytes: int


def rewind(run_dir: Path | str, step: int) -> Rewound:
    """Drop the records beyond `step` and a half-written tail, and make the CSV tables anew from what is left.

    metrics.jsonl is replaced in one move, first; so a crash in here leaves files that a second rewind sets right.
    """
    run_dir = Path(run_dir)
    path = run_dir / METRICS_FILE
    size = path.stat().st_size if path.exists() else 0
    everything = read_records(run_dir)
    kept = tuple(record for record in everything if record.step <= step)
    replace_file(path, _text(kept))
    write_tables(run_dir, list(kept))
    tail = max(0, size - len(_text(tuple(everything))))
    return Rewound(records=kept, num_dropped=len(everything) - len(kept), tail_bytes=tail)


def _text(records: tuple[Record, ...]) -> bytes:
    return "".join(record.to_json() + "\n" for record in records).encode()
