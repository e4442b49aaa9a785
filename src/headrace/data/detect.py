"""What kind of data set lies in a folder: rows of a table, the first that fits."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import DataError
from headrace.data.catalog import KNOWN_SETS
from headrace.data.find import find_set
from headrace.data.folder import has_class_folders
from headrace.data.pack import is_pack
from headrace.data.records import TFDS_SHARD, has_shards
from headrace.data.tar_shards import has_tar_shards


@dataclass(frozen=True, kw_only=True)
class KindRow:
    """A kind of picture set: its name, what it looks like in words, and how it is recognised."""

    name: str
    words: str
    fits: Callable[[Path], bool]


KINDS = (
    KindRow(name="packed", words="a packed file (*.hrp)", fits=is_pack),
    KindRow(name="tfrecord", words="ImageNet's TFRecords (train-00000-of-01024)", fits=has_shards),
    KindRow(
        name="tfds",
        words="records that TFDS prepared (NAME-train.tfrecord-00000-of-00001)",
        fits=lambda path: has_shards(path, TFDS_SHARD),
    ),
    KindRow(name="tar", words="tar shards (*.tar)", fits=has_tar_shards),
    KindRow(name="folder", words="class folders (train/CLASS/*.jpg or CLASS/*.jpg)", fits=has_class_folders),
)


def detect_kind(path: Path, kinds: Iterable[KindRow] = KINDS) -> str | None:
    """Return the kind of picture set that lies there, or None."""
    return next((row.name for row in kinds if row.fits(path)), None)


def detect(dataset_path: str) -> str:
    """Return the data set's name or kind from what lies in a folder; nothing known is a DataError."""
    path = Path(dataset_path).expanduser()
    if not path.exists():
        raise DataError(f"{path.absolute()} does not exist.", remedy="Give the place of your data with --dataset-path.")
    kind = detect_kind(path)
    if kind is not None:
        return kind
    for name, row in KNOWN_SETS.items():
        try:
            if row.layouts and find_set(row, dataset_path).directory == path:
                return name
        except DataError:
            continue
    raise DataError(
        f"{path.absolute()} holds no data set that is known.",
        rule=f"Looked for {'; '.join(row.words for row in KINDS)}; the files of {', '.join(list(KNOWN_SETS)[1:])}.",
        remedy="Give the folder itself with --dataset-path, or name the set with --dataset.",
    )
