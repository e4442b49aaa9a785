"""What people change about runs on the board: notes and tags beside the records, names of directories, deletion.

Only run directories that the board lists are touched, and none in which a process works.
"""

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.core.directory_lock import lock_directory
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.files import write_atomic
from headrace.core.json_text import parse_json

LABELS_FILE = "labels.json"
_MOST_BYTES = 1 << 16
_LONGEST_NOTE, _LONGEST_TAG, _MOST_TAGS = 2_000, 40, 20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What people have said about a run."""

    note: str = ""
    tags: tuple[str, ...] = ()


def read_labels(run: Path) -> Labels:
    """Return the labels of a run; a missing, foreign or damaged file has none."""
    try:
        with (run / LABELS_FILE).open("rb") as file:
            found = parse_json(file.read(_MOST_BYTES).decode())
        return checked(found["note"], found["tags"])
    except (OSError, ValueError, TypeError, KeyError, ConfigError):
        return Labels()


def checked(note: object, tags: object) -> Labels:
    """Return labels as somebody sent them; refuse what is none, or too long for a table."""
    if not isinstance(note, str) or not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ConfigError("The labels are not a note and tags.", rule="A note is a text, tags are a list of texts.")
    kept = tuple(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
    if len(note) > _LONGEST_NOTE or len(kept) > _MOST_TAGS or any(len(tag) > _LONGEST_TAG for tag in kept):
        raise ConfigError(
            "The note or the tags are too long.",
            rule=f"A note has up to {_LONGEST_NOTE:,} characters; there are up to {_MOST_TAGS} tags of {_LONGEST_TAG}.",
        )
    return Labels(note=note.strip(), tags=kept)


def write_labels(run: Path, labels: Labels) -> None:
    """Write the labels beside the records; also while the run trains, which never reads them."""
    if labels == Labels():
        (run / LABELS_FILE).unlink(missing_ok=True)
    else:
        write_atomic(run / LABELS_FILE, (json.dumps(asdict(labels)) + "\n").encode())


def rename_run(run: Path, name: object) -> Path:
    """Give a run's directory another name beside the old one, unless a process works in it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a run.",
            rule="A name has up to 100 letters, digits and _ . + -, and does not begin with a dot.",
        )
    target = run.with_name(name)
    _refuse_links(run)
    with lock_directory(run):
        if target.exists():
            raise ConfigError(f"There is a {name} already.", remedy="Choose another name.")
        return run.rename(target)


def delete_run(run: Path) -> None:
    """Delete a run's directory with its checkpoints, unless a process works in it."""
    _refuse_links(run)
    with lock_directory(run):
        # Out of the listing at once, however long the files take; a board that is killed leaves what begins with a dot.
        gone = run.rename(run.with_name(f".deleted-{run.name}"))
    shutil.rmtree(gone)


def _refuse_links(run: Path) -> None:
    if run.is_symlink():
        raise CheckpointError(f"{run} is a link.", rule="Only directories that lie here are renamed and deleted.")
