"""Read one split of a data set from the files that were found, whatever its layout."""

from pathlib import Path

from headrace.data import cifar, idx
from headrace.data.catalog import SetRow
from headrace.data.find import Found
from headrace.data.finding import Finding, Part, empty_part, join_parts

SPLITS = ("train", "validation")
_CIFAR_READERS = {"cifar-binary": cifar.read_binary, "cifar-python": cifar.read_python}


def read_split(found: Found, row: SetRow, split: str) -> Part:
    """Return the split's images and labels and everything that is wrong with its files."""
    train = split == "train"
    files = found.train_files if train else found.validation_files
    wanted = found.layout.train_files if train else found.layout.validation_files
    num_samples = row.num_train if train else row.num_validation
    absent = tuple(
        Finding(path=found.directory / name, problem="the file is missing")
        for name, path in zip(wanted, files, strict=True)
        if path is None
    )
    part = _read_files(files, found.layout.kind, row, num_samples)
    return Part(images=part.images, labels=part.labels, findings=absent + part.findings)


def class_names(found: Found, row: SetRow) -> tuple[str, ...]:
    """Return the class names that lie beside the data, or else the known ones."""
    if found.layout.names_file is None:
        return row.class_names
    return cifar.read_class_names(found.directory / found.layout.names_file, row.num_classes) or row.class_names


def _read_files(files: tuple[Path | None, ...], kind: str, row: SetRow, num_samples: int) -> Part:
    if kind == "idx":
        images, labels = files
        return idx.read_pair(images, labels, row, num_samples)
    per_file, rest = divmod(num_samples, len(files))
    assert rest == 0, "CIFAR's files are of equal length"
    parts = [_CIFAR_READERS[kind](path, row, per_file) for path in files if path is not None]
    return join_parts([empty_part(row.image_hwc), *parts])
