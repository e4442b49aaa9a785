"""Tar shards in WebDataset's layout: `KEY.jpg` beside `KEY.cls` (a label in digits) or `KEY.json` (with a `label`)."""

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import DataError
from headrace.core.json_text import parse_json
from headrace.data.decoding.image import EXTENSIONS
from headrace.data.sets.catalog import numbered_classes
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.indexed_samples import Index, StoredSamples, indexed, make_index, read_names
from headrace.data.sets.mirror import whole_file
from headrace.data.sets.samples import Content
from headrace.data.sets.shard_set import ShardReader, set_of_shards
from headrace.data.sets.unpacked import COMPRESSED, unpacked

_VALIDATION = ("val", "test")
_ENDINGS = (".tar", *COMPRESSED)
_LABELS = (".cls", ".json")
_MAX_LABEL_BYTES = 1 << 20  # a label is a few bytes; whatever else has such a name is not read
# A header that counts for all files is gone through for each: one of a megabyte took 12 ms of each.
_MAX_HEADER_BYTES = 1 << 16


def plain_content(data: bytes, sample: int) -> Content:
    """Return the content of a sample whose stored bytes are the image itself."""
    return Content(data)


def fits(path: Path) -> bool:
    """Say whether a folder has tar files; compressed ones beside folders are what these came in."""
    if not path.is_dir():
        return False
    entries = list(path.iterdir())
    if any(entry.suffix == ".tar" for entry in entries):
        return True
    return any(entry.name.lower().endswith(COMPRESSED) for entry in entries) and not any(map(Path.is_dir, entries))


def tar_shards(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the shards of training and validation: those with val or test in their name are the latter."""
    files = sorted(file for file in path.iterdir() if file.name.lower().endswith(_ENDINGS) and file.is_file())
    validation = [any(name in file.stem.lower() for name in _VALIDATION) for file in files]
    found = [unpacked(file) for file in files]
    parts = ([file for file, held in zip(found, validation, strict=True) if held == which] for which in (False, True))
    return next(parts), next(parts)


def tar_index(files: Sequence[Path], folder: Path | None = None) -> Index:
    """Return the index of these shards; classes are named by a file `classes.txt` in their folder, or numbered."""
    names = read_names((folder or files[0].parent) / "classes.txt")
    return indexed("tar", files, names, lambda: _make_index(files, names))


def _make_index(files: Sequence[Path], class_names: tuple[str, ...]) -> Index:
    parts: list[np.ndarray] = []  # of each file: as tuples a million samples took 250 MB
    for number, path in enumerate(files):
        try:
            with whole_file(path) as there:
                parts.append(np.array(_rows_of(there, number), np.int64).reshape(-1, 4))
        except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError) as error:
            # tarfile calls itself for each header that describes another one.
            problem = "one file has hundreds of headers" if isinstance(error, RecursionError) else error
            raise DataError(
                f"{path} is not a complete tar file: {problem}.", remedy="Fetch or make it again."
            ) from None
    rows = np.concatenate(parts)
    del parts
    if not len(rows):
        raise DataError(f"{files[0].parent} has no images in its tar files.", rule="A sample is KEY.jpg and KEY.cls.")
    count = int(rows[:, 3].max()) + 1
    if class_names and count > len(class_names):
        raise DataError(f"A label is {count - 1}, but there are {len(class_names)} class names.")
    return make_index(rows, class_names or numbered_classes(count))


class _TarBytes(io.FileIO):
    """A tar file that is read in small pieces: tarfile would read a name or header of any length that is named."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size or -1:,} bytes at byte {self.tell():,}")
        return super().read(size) or b""


def _rows_of(path: Path, number: int) -> list[tuple[int, int, int, int]]:
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    # Uncompressed only: images inside a compressed archive could not be read by their offset.
    with _TarBytes(path) as stored, tarfile.open(fileobj=stored, mode="r:") as archive:
        size = path.stat().st_size
        # Not `for member in archive`, which keeps all of them: each has a copy of the headers for all that follow.
        while (member := archive.next()) is not None:
            archive.members.clear()  # pyright: ignore[reportAttributeAccessIssue]; its types lack it
            folder, _, base = member.name.rpartition("/")
            # At the first dot, as WebDataset has it: KEY.seg.png belongs to KEY.
            key, dot, suffix = base.partition(".")
            key = f"{folder}/{key}"
            if not member.isfile() or not dot:
                continue
            # tarfile does not notice that the last file is cut off.
            if member.offset_data + member.size > size:
                raise tarfile.ReadError(f"it ends inside {member.name}")
            if f".{suffix.lower()}" in EXTENSIONS:
                images[key] = (member.offset_data, member.size)
            elif f".{suffix.lower()}" in _LABELS and member.size <= _MAX_LABEL_BYTES:
                file = archive.extractfile(member)
                assert file is not None
                data = b"".join(iter(lambda file=file: file.read(_MAX_HEADER_BYTES), b""))
                labels[key] = _label(path, member.name, data)
    lost = [key.lstrip("/") for key in images if key not in labels]
    if lost:
        raise DataError(
            f"{path}: {len(lost):,} image(s) without a label, such as {lost[0]}.",
            rule="Beside KEY.jpg there is KEY.cls with the label in digits, or KEY.json with a `label`.",
        )
    return [(number, *place, labels[key]) for key, place in images.items()]


def _label(path: Path, name: str, data: bytes) -> int:
    try:
        label = parse_json(data)["label"] if name.endswith(".json") else int(data.decode())
        if isinstance(label, str):
            label = int(label)
        if type(label) is not int:  # int() would accept 1.9 and make it 1
            raise TypeError(label)
    except (ValueError, KeyError, TypeError):
        raise DataError(
            f"{path}: {name} holds no label, but {data[:40]!r}.", rule="A label is a whole number."
        ) from None
    if not 0 <= label < 1_000_000:
        raise DataError(f"{path}: the label in {name} is {label}, out of range.", rule="Labels start from 0.")
    return label


def open_set(path: Path, data: Data) -> ImageSet:
    """List the samples of both splits."""
    train, validation = tar_shards(path)
    reader = ShardReader(
        kind="tar",
        index=lambda files: tar_index(files, path),
        samples=lambda files, part: StoredSamples(files, part, plain_content),
    )
    return set_of_shards(path, data, reader, train, validation)
