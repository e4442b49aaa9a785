"""Locate the files of a known dataset (the directories searched, the layout found there) and read its splits."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import DataError
from headrace.core.files import is_directory
from headrace.data.sets.catalog import SetLayout, SetRow
from headrace.data.sets.cifar import read_binary, read_class_names, read_python
from headrace.data.sets.file_problem import FileProblem, SplitPart, empty_part, join_parts
from headrace.data.sets.get import PublishedSet, datasets_directory
from headrace.data.sets.idx_files import read_pair

ENVIRONMENT = ("DATASETS_DIR", "DATA_DIR")
SYSTEM_DIRECTORY = Path("/usr/share/datasets")  # where Debian's dataset packages put their files
MAX_DEPTH = 3  # levels of sub-directories searched
MAX_DIRECTORIES = 5000  # a mistyped path such as / must not be walked for minutes


@dataclass(frozen=True, kw_only=True)
class Found:
    """A dataset's directory, its layout, and the file of each wanted name (None: missing)."""

    directory: Path
    layout: SetLayout
    train_files: tuple[Path | None, ...]
    validation_files: tuple[Path | None, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names of the missing files."""
        wanted = self.layout.train_files + self.layout.validation_files
        there = self.train_files + self.validation_files
        return tuple(name for name, path in zip(wanted, there, strict=True) if path is None)


def search_roots(dataset_path: str) -> tuple[Path, ...]:
    """Return the directories to search: the given one or, by default, also those of the environment and the system."""
    given = Path(dataset_path).expanduser()
    named = [Path(os.environ[name]).expanduser() for name in ENVIRONMENT if os.environ.get(name)]
    # A path that was given is meant: finding the set somewhere else instead would hide a typing error.
    if dataset_path != "." and given not in named:
        return (given,)
    return tuple(dict.fromkeys([given, *named, datasets_directory(), SYSTEM_DIRECTORY]))


def locate_set(row: SetRow, dataset_path: str) -> Found:
    """Return the first place that holds files of the set; none is a DataError that lists the directories searched."""
    roots = search_roots(dataset_path)
    for root in roots:
        for directory in _candidates(root, [name for layout in row.layouts for name in layout.directories]):
            for layout in row.layouts:
                found = _files_in(directory, layout)
                # Any file of the layout: an incomplete set is reported with what it lacks, not as missing.
                if len(found.missing) < len(layout.train_files + layout.validation_files):
                    return found
    raise _not_found(row, roots)


def locate_folder(published: PublishedSet, dataset_path: str) -> Path:
    """Return the folder of a published set of class folders: one of its name, or the one that was given."""
    roots = search_roots(dataset_path)
    for root in roots:
        for directory in _candidates(root, [published.folder]):
            is_meant = directory.name == published.folder or (directory == root and dataset_path != ".")
            if is_meant and (directory / "train").is_dir():
                return directory
    raise DataError(
        f"The dataset {published.name} was not found.",
        rule=f"Searched {', '.join(map(_describe, roots))} for {published.folder} (up to {MAX_DEPTH} levels down).",
        remedy=f"Download it with `headrace data get {published.name}`, or add --download.",
    )


def variants(layout: SetLayout, name: str) -> tuple[str, ...]:
    """Return the names under which a file is known: idx files also with a dot and compressed."""
    if layout.kind != "idx":
        return (name,)
    dotted = name.replace("-idx", ".idx")
    return (name, dotted, f"{name}.gz", f"{dotted}.gz")


def _files_in(directory: Path, layout: SetLayout) -> Found:
    def path_of(name: str) -> Path | None:
        paths = (directory / variant for variant in variants(layout, name))
        return next((path for path in paths if path.is_file()), None)

    return Found(
        directory=directory,
        layout=layout,
        train_files=tuple(path_of(name) for name in layout.train_files),
        validation_files=tuple(path_of(name) for name in layout.validation_files),
    )


def _candidates(root: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield the root, then its sub-directories of these names, nearest first."""
    if not root.is_dir():
        return
    yield root
    wanted = {name.lower() for name in names}
    for directory in _sub_directories(root):
        tail = directory.relative_to(root).as_posix().lower()
        if any(tail == name or tail.endswith(f"/{name}") for name in wanted):
            yield directory


def _sub_directories(root: Path) -> Iterator[Path]:
    """Yield visible sub-directories level by level, in order of name, within the limits."""
    level, seen = [root], 0
    for _ in range(MAX_DEPTH):
        below: list[Path] = []
        for directory in level:
            try:
                with os.scandir(directory) as entries:
                    names = sorted(
                        each.name for each in entries if not each.name.startswith(".") and is_directory(each)
                    )
            except OSError:  # a directory we may not read is not where the user keeps the set
                continue
            below += [directory / name for name in names]
            seen += len(names)
            # Counted by names that were listed, not by directories entered: one may have a million.
            if seen > MAX_DIRECTORIES:
                break
        yield from below
        level = below if seen <= MAX_DIRECTORIES else []


def _not_found(row: SetRow, roots: tuple[Path, ...]) -> DataError:
    files = "; or ".join(
        ", ".join(layout.train_files + layout.validation_files) + (" (plain or .gz)" if layout.kind == "idx" else "")
        for layout in row.layouts
    )
    names = ", ".join(dict.fromkeys(name for layout in row.layouts for name in layout.directories))
    places = ", ".join(_describe(root) for root in roots)
    return DataError(
        f"The dataset {row.name} was not found. Searched for {files}.",
        rule=f"Searched {places}, and in sub-directories named {names} (up to {MAX_DEPTH} levels down).",
        remedy=f"Download it with `headrace data get {row.name}`, or add --download. By hand: {row.how_to_get} Then "
        "name the directory with --dataset-path or $DATASETS_DIR.",
    )


def _describe(root: Path) -> str:
    absolute = root.absolute()
    if root.is_dir():
        return str(absolute)
    return f"{absolute} ({'a file: unpack it first' if root.is_file() else 'does not exist'})"


SPLITS = ("train", "validation")
_CIFAR_READERS = {"cifar-binary": read_binary, "cifar-python": read_python}


def read_split(found: Found, row: SetRow, split: str) -> SplitPart:
    """Return the split's images and labels and everything that is wrong with its files."""
    train = split == "train"
    files = found.train_files if train else found.validation_files
    wanted = found.layout.train_files if train else found.layout.validation_files
    num_samples = row.num_train if train else row.num_validation
    absent = tuple(
        FileProblem(path=found.directory / name, problem="the file is missing")
        for name, path in zip(wanted, files, strict=True)
        if path is None
    )
    part = _read_files(files, found.layout.kind, row, num_samples)
    return SplitPart(images=part.images, labels=part.labels, findings=absent + part.findings)


def class_names(found: Found, row: SetRow) -> tuple[str, ...]:
    """Return the class names stored beside the data, or else the known ones."""
    if found.layout.names_file is None:
        return row.class_names
    return read_class_names(found.directory / found.layout.names_file, row.num_classes) or row.class_names


def _read_files(files: tuple[Path | None, ...], kind: str, row: SetRow, num_samples: int) -> SplitPart:
    if kind == "idx":
        images, labels = files
        return read_pair(images, labels, row, num_samples)
    per_file, rest = divmod(num_samples, len(files))
    assert rest == 0, "CIFAR's files are of equal length"
    parts = [_CIFAR_READERS[kind](path, row, per_file) for path in files if path is not None]
    return join_parts([empty_part(row.image_hwc), *parts])
