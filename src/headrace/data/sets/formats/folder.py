"""Class folders: a folder of images for each class, with or without folders for the two splits above them.

Only regular files are opened (a named pipe would block). Links to folders are followed unless they lead back to a
folder above. What is skipped is counted by reason.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import DataError
from headrace.core.files import is_directory
from headrace.core.units import format_list
from headrace.data.decoding.image import FORMATS_TEXT, how_to_read, readable_extensions
from headrace.data.sets.class_check import check_classes
from headrace.data.sets.file_problem import Skipped, SkippedFiles
from headrace.data.sets.held_out import hold_out, never_validated
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.samples import FileSamples
from headrace.data.sets.stored_folders import open_folders
from headrace.data.sets.stored_place import stored_folders

TRAIN_NAMES = ("train", "training")
VALIDATION_NAMES = ("val", "validation", "valid", "test")
_LISTED = 5
# Folders and files of operating systems and tools, which nobody means as classes or images; hidden ones neither.
_NOT_DATA = {"__pycache__", "__macosx", "@eadir", "$recycle.bin", "lost+found", "thumbs.db", "desktop.ini"}

# `headrace train --dataset-path .` leaves a folder `runs` beside the class folders; every run has these files.
_RUN_FILES = ("config.json", "plan.json")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The images of one folder of class folders, as paths below it, with the class of each."""

    root: Path
    class_names: tuple[str, ...]
    files: tuple[str, ...]
    labels: np.ndarray  # int32
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ClassFolders:
    """Both splits of a folder of images."""

    class_names: tuple[str, ...]
    train: FileSamples
    validation: FileSamples
    split_by: str  # how they were separated
    skipped: tuple[Skipped, ...] = ()
    remarks: tuple[str, ...] = ()  # on the classes and the split

    def image_set(self, kind: str, path: Path) -> ImageSet:
        """Return them as a set of images."""
        return ImageSet(
            kind=kind,
            place=str(path),
            class_names=self.class_names,
            train=self.train,
            validation=self.validation,
            split_by=self.split_by,
            remarks=(*map(str, self.skipped), *self.remarks),
        )


def split_folder(root: Path, names: tuple[str, ...]) -> Path | None:
    """Return the folder of one split, found by the usual names."""
    return next((root / name for name in names if (root / name).is_dir()), None)


def fits(root: Path) -> bool:
    """Say whether a folder, or its training folder, has folders with images in them."""
    if stored_folders(root):
        return True
    top = split_folder(root, TRAIN_NAMES) or split_folder(root, VALIDATION_NAMES) or root
    try:
        # The first image is enough: a million files need not be listed to recognise the kind.
        return any(next(_images(folder, SkippedFiles()), None) is not None for folder in _folders(top))
    except OSError:
        return False


def refuse_loose_images(root: Path) -> None:
    """Refuse a folder whose images are directly in it, or one image: its name would be the class."""
    folder = root if root.is_dir() else root.parent
    if root.is_file() and not root.name.lower().endswith(readable_extensions()):
        return
    if not (loose := _num_loose(folder)):
        return
    above = folder.parent if folder.name else Path("..")
    is_class = fits(above) and not split_folder(above, TRAIN_NAMES)
    problem = f"{root} is one file." if root.is_file() else f"{root} has no class folders: {loose:,} images are in it."
    raise DataError(
        problem,
        rule=f"A class is a folder, its name the class's, with image files in it: {FORMATS_TEXT}.",
        remedy="Make one folder for each class: IMAGES/cat/1.jpg, IMAGES/dog/2.jpg."
        + (f" Or, if {folder.resolve().name} is a class, give --dataset-path '{above}'." if is_class else ""),
    )


def _num_loose(folder: Path) -> int:
    readable = readable_extensions()
    return sum(1 for entry in os.scandir(folder) if entry.is_file() and entry.name.lower().endswith(readable))


def read_folders(
    root: Path, validation_split: float, elsewhere: Path | None = None, pattern: str | None = None
) -> ClassFolders:
    """List the images of both splits, of which validation may be `elsewhere`; an inconsistent folder is a DataError.

    With a pattern the class of an image is in the name of its file, and not that of its folder.
    """
    train_root, validation_root = split_folder(root, TRAIN_NAMES), split_folder(root, VALIDATION_NAMES)
    if elsewhere is not None:
        if not elsewhere.is_dir():
            raise DataError(f"There is no folder {elsewhere} (--validation-path).", remedy="Check the path.")
        train_root, validation_root = train_root or root, split_folder(elsewhere, VALIDATION_NAMES) or elsewhere
    if train_root is None and validation_root is not None and _folders(root) == [validation_root]:
        validation = list_classes(validation_root, pattern=pattern)
        return ClassFolders(
            class_names=validation.class_names,
            train=_samples(validation, np.zeros(0, np.int64)),
            validation=_samples(validation, np.arange(len(validation.files))),
            split_by=f"{validation_root.name} alone",
            skipped=validation.skipped,
        )
    if train_root is None:
        whole = list_classes(root, pattern=pattern)
        return _split(whole, validation_split)
    train = list_classes(train_root, pattern=pattern)
    if validation_root is None:
        return _split(train, validation_split)
    validation = list_classes(validation_root, train.class_names, pattern)
    return ClassFolders(
        class_names=train.class_names,
        train=_samples(train, np.arange(len(train.files))),
        validation=_samples(validation, np.arange(len(validation.files))),
        split_by=f"{train_root.name} and {validation_root.name}",
        skipped=train.skipped + validation.skipped,
        remarks=never_validated(train.class_names, validation.labels),
    )


def list_classes(root: Path, class_names: tuple[str, ...] | None = None, pattern: str | None = None) -> Listing:
    """List the class folders of a folder, or by a pattern of files' names; with `class_names`, refuse other classes."""
    try:
        if pattern is not None:
            return _list_by_name(root, class_names, re.compile(pattern))
        return _list(root, class_names)
    except OSError as error:
        raise DataError(
            f"{error.filename or root} cannot be read: {error.strerror}.",
            remedy="Check the path and its permissions.",
        ) from None


def _list(root: Path, class_names: tuple[str, ...] | None) -> Listing:
    skipped = SkippedFiles()
    listed = {folder.name: sorted(_images(folder, skipped)) for folder in _folders(root)}
    found = {name: images for name, images in listed.items() if images or not _holds_runs(root / name)}
    names = class_names or tuple(found)
    _refuse_doubtful(root, tuple(found), names)
    number = {name: label for label, name in enumerate(names)}
    files: list[str] = []
    labels: list[int] = []
    for folder, images in found.items():
        files += (f"{folder}/{name}" for name in images)
        labels += [number[folder]] * len(images)
    if (empty := [folder for folder, images in found.items() if not images]) and files:
        raise DataError(
            f"{len(empty)} class folder(s) of {root} hold no image: {format_list(empty, _LISTED)}.{_because(skipped)}",
            rule=f"A class is a folder with images ({FORMATS_TEXT}) in it.",
            remedy="Delete the empty folders, or put their images in.",
        )
    if not files:
        raise _no_images(root, skipped)
    return Listing(
        root=root,
        class_names=names,
        files=tuple(files),
        labels=np.array(labels, np.int32),
        skipped=skipped.rows(),
    )


def _list_by_name(root: Path, class_names: tuple[str, ...] | None, pattern: re.Pattern[str]) -> Listing:
    skipped = SkippedFiles()
    files = tuple(sorted(_images(root, skipped)))
    if not files:
        raise DataError(f"{root} has no images.{_because(skipped)}", rule=f"Images are {FORMATS_TEXT}.")
    matches = [pattern.search(file.rpartition("/")[2]) for file in files]
    found = [match.group(1) or "" if match else "" for match in matches]
    if strange := [file for file, name in zip(files, found, strict=True) if not name]:
        raise DataError(
            f"label_pattern {pattern.pattern} finds no class in {len(strange):,} of {len(files):,} names of {root}: "
            f"{format_list(strange, _LISTED)}.",
            rule="It is searched in the name of each file, without its folder, and its group is the class.",
        )
    names = class_names or tuple(sorted(set(found)))
    if unknown := sorted(set(found) - set(names)):
        raise DataError(
            f"{root} has {len(unknown)} class(es) that training has not: {format_list(unknown, _LISTED)}.",
            rule=f"Validation can only ask for classes that were trained: {format_list(names, _LISTED)}.",
        )
    if len(names) < 2:
        raise DataError(
            f"label_pattern {pattern.pattern} finds one class alone in {root}: {format_list(names, 1)}.",
            rule="To tell classes apart there must be two or more.",
        )
    number = {name: label for label, name in enumerate(names)}
    labels = np.array([number[name] for name in found], np.int32)
    check_classes(str(root), names, labels)
    return Listing(root=root, class_names=names, files=files, labels=labels, skipped=skipped.rows())


def _refuse_doubtful(root: Path, found: tuple[str, ...], names: tuple[str, ...]) -> None:
    seen: dict[str, str] = {}
    for name in found:
        if not _is_text(name):
            raise DataError(
                f"The name of a class folder of {root} is not UTF-8: {os.fsencode(name)!r}.",
                rule="Names of classes are stored in checkpoints and reports as UTF-8.",
                remedy="Rename the folder.",
            )
        other = seen.setdefault(name.strip().casefold(), name)
        if other != name:
            raise DataError(
                f"Two classes of {root} have the same name but for case or spaces: {other!r} and {name!r}.",
                remedy="Put their images into one folder, or rename one.",
            )
    known = set(names)
    strange = [name for name in found if name not in known]
    if strange:
        raise DataError(
            f"{root} has {len(strange)} class folder(s) that training has not: {format_list(strange, _LISTED)}.",
            rule=f"Validation can only ask for classes that were trained: {format_list(names, _LISTED)}.",
            remedy="Rename or delete them, or add them to the training folder.",
        )
    if len(names) < 2:
        raise (
            _no_images(root, SkippedFiles())
            if not found
            else DataError(
                f"{root} has only one class folder: {found[0]}.",
                rule="To tell classes apart there must be two or more, each a folder.",
                remedy="Name the folder that holds the class folders with --dataset-path.",
            )
        )


def _no_images(root: Path, skipped: SkippedFiles) -> DataError:
    loose = _num_loose(root)
    loose_images = f" {loose:,} image(s) are directly in it." if loose else ""
    return DataError(
        f"{root} has no class folders with images.{loose_images}{_because(skipped)}",
        rule=f"A class is a folder, its name the class's, with image files in it: {FORMATS_TEXT}.",
        remedy="Make one folder for each class: IMAGES/cat/1.jpg, IMAGES/dog/2.jpg.",
    )


def _because(skipped: SkippedFiles) -> str:
    rows = skipped.rows()
    return f" {'; '.join(map(str, rows[:_LISTED]))}." if rows else ""


def _split(whole: Listing, fraction: float) -> ClassFolders:
    part = f"a folder {VALIDATION_NAMES[0]} beside a folder {TRAIN_NAMES[0]}"
    held_out = hold_out(whole.files, whole.labels, fraction, whole.class_names, str(whole.root), part)
    return ClassFolders(
        class_names=whole.class_names,
        train=_samples(whole, np.flatnonzero(~held_out.mask)),
        validation=_samples(whole, np.flatnonzero(held_out.mask)),
        split_by=held_out.text,
        skipped=whole.skipped,
        remarks=held_out.remarks,
    )


def _samples(listing: Listing, chosen: np.ndarray) -> FileSamples:
    files = listing.files if len(chosen) == len(listing.files) else tuple(listing.files[i] for i in chosen)
    return FileSamples(listing.root, files, listing.labels[chosen])


def _folders(root: Path) -> list[Path]:
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if not _is_ignored(entry.name) and is_directory(entry))
    return [root / name for name in names]


def _is_run(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _RUN_FILES)


def _holds_runs(folder: Path) -> bool:
    """Say whether a folder is the directory of a run, or has such directories in it: no class, then."""
    return _is_run(folder) or any(map(_is_run, _folders(folder)))


def _images(folder: Path, skipped: SkippedFiles, above: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """Yield the images of a folder and the folders in it, as paths below it; count what is skipped.

    `above` are the folders that led here, as (device, inode).
    """
    facts = folder.stat()
    here = facts.st_dev, facts.st_ino
    if here in above:
        skipped.add("a link to a folder above it", str(folder))
        return
    if _is_run(folder):
        return
    readable = _readable()
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if _is_ignored(name):
                continue
            suffix = name[name.rfind(".") :].lower() if "." in name else ""
            if is_directory(entry) and _is_text(name):
                for inner in _images(folder / name, skipped, (*above, here)):
                    yield f"{name}/{inner}"
            elif suffix in readable and _is_regular(entry) and _is_text(name):
                yield name
            else:
                skipped.add(_why_skipped(entry, suffix), ascii(entry.path)[1:-1])


def _why_skipped(entry: os.DirEntry[str], suffix: str) -> str:
    if not _is_text(entry.name):
        return "the name is not UTF-8"
    if not _is_regular(entry):
        return "a link that leads nowhere" if entry.is_symlink() else "not a regular file"
    if how := how_to_read(suffix):
        return f"{suffix} needs {how}"
    return f"{suffix} is not an image type" if suffix else "no extension"


@lru_cache(maxsize=1)
def _readable() -> frozenset[str]:
    return frozenset(readable_extensions())


def _is_ignored(name: str) -> bool:
    return name[0] == "." or name.lower() in _NOT_DATA


def _is_regular(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link that leads to itself
        return False


def _is_text(name: str) -> bool:
    """Say whether a name is Unicode: Python stands in for other bytes with halves of surrogate pairs."""
    return name.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in name)


def open_set(path: Path, data: Data) -> ImageSet:
    """List the images of both splits."""
    if stored := stored_folders(path):
        return open_folders(*stored, data.validation_split)
    elsewhere = Path(data.validation_path).expanduser() if data.validation_path else None
    return read_folders(path, data.validation_split, elsewhere, data.label_pattern).image_set("folder", path)
