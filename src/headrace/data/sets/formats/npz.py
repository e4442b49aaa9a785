"""Images stored as arrays in a NumPy file (.npz), which is read into memory."""

import os
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import DataError
from headrace.core.files import entries_of
from headrace.core.json_text import MAX_BYTES
from headrace.core.units import format_bytes
from headrace.data.sets.class_check import NO_REGRESSION
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.npz_file import StoredArray, stored_array
from headrace.data.sets.output_labels import array_labels, output_names
from headrace.data.sets.samples import Content, of_dtype
from headrace.data.sets.table_set import TableSet, names_of_classes, set_of_table
from headrace.rows.tasks import CLASSIFICATION, REGRESSION

_TRAIN_KEYS = (("train_images", "train_labels"), ("x_train", "y_train"), ("images", "labels"), ("x", "y"))
_VALIDATION_KEYS = (
    ("val_images", "val_labels"),
    ("validation_images", "validation_labels"),
    ("x_val", "y_val"),
    ("test_images", "test_labels"),
    ("x_test", "y_test"),
)
_BYTES_PER_IMAGE = 100  # its number, its label, and the name by which it is held out or not
_KEYS_RULE = (
    "Arrays are images and labels, or train_images, train_labels, val_images and val_labels, or x_train, y_train, "
    "x_test and y_test; class_names is optional."
)


class PixelSamples:
    """Images of one array, uint8 [N, H, W, C]."""

    def __init__(self, name: str, images: np.ndarray, labels: np.ndarray, numbers: np.ndarray | None = None) -> None:
        self._name, self._images, self._all_labels = name, images, labels
        self._numbers = np.arange(len(labels)) if numbers is None else numbers
        self.labels = of_dtype(labels[self._numbers])

    def __len__(self) -> int:
        return len(self.labels)

    def content(self, sample: int) -> Content:
        return Content(self._images[self._numbers[sample]])

    def name(self, sample: int) -> str:
        """Return the array and the number of the image in it."""
        return f"{self._name}[{int(self._numbers[sample]):,}]"

    def take(self, chosen: np.ndarray) -> "PixelSamples":
        return PixelSamples(self._name, self._images, self._all_labels, self._numbers[chosen])


def fits(path: Path) -> bool:
    """Say whether a path is a file of NumPy arrays."""
    return path.suffix == ".npz" and path.is_file()


def read_npz_set(path: Path, task: str = CLASSIFICATION.name) -> TableSet:
    """Return the splits of a file of arrays; anything that is not images and labels is a DataError."""
    try:
        return _read_npz(path, task)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None


def _read_npz(path: Path, task: str) -> TableSet:
    try:
        with zipfile.ZipFile(path) as archive:
            found = _stored_arrays(path, archive)
            train, validation = (_pair(found, keys) for keys in (_TRAIN_KEYS, _VALIDATION_KEYS))
            if train is None:
                raise DataError(f"{path} has the arrays {', '.join(sorted(found))[:200] or 'none'}.", rule=_KEYS_RULE)
            pairs = [keys for keys in (train, validation) if keys]
            wanted = {name: found[name] for name in (*sum(pairs, ()), "class_names") if name in found}
            # By what their headers say, all of them before any is unpacked: a compressed file may claim any size.
            for keys in pairs:
                _refuse_other_arrays(path, found, keys, task)
            _refuse_large_arrays(path, wanted, pairs)
            arrays = {name: stored.read(archive) for name, stored in wanted.items()}
    except DataError:
        raise
    except Exception as error:  # zipfile and NumPy raise nearly anything for damaged files
        raise DataError(
            f"{path} is not a good .npz file ({type(error).__name__}: {str(error)[:200]}).",
            remedy="Write it again with np.savez.",
        ) from None
    parts = [_pixels(path, arrays, keys, task) for keys in pairs]
    names = tuple(map(str, arrays["class_names"].reshape(-1))) if "class_names" in arrays else ()
    held_out = None
    if validation is not None:
        held_out = PixelSamples(f"{path}: {validation[0]}", *parts[1])
    return TableSet(
        class_names=_names(path, names, [labels for _, labels in parts], task),
        train=PixelSamples(f"{path}: {train[0]}", *parts[0]),
        validation=held_out,
        add="arrays val_images and val_labels",
    )


def _names(path: Path, given: tuple[str, ...], labels: Sequence[np.ndarray], task: str) -> tuple[str, ...]:
    """Return the names of classes or of other outputs."""
    if task == CLASSIFICATION.name:
        return names_of_classes(path, given, labels)
    counts = {each.shape[1] for each in labels}
    if len(counts) > 1 or (given and counts != {len(given)}):
        numbers = " and ".join(map(str, sorted(counts)))
        raise DataError(
            f"{path}: the labels have {numbers} numbers for each image, and there are {len(given)} class_names.",
            rule="Both parts have the same labels, and class_names, where it is there, a name for each.",
        )
    return output_names(task, counts.pop(), given)


def _stored_arrays(path: Path, archive: zipfile.ZipFile) -> dict[str, StoredArray]:
    """Return what the headers say of the arrays that a set may have, by lower-case name."""
    known = {name for pair in (*_TRAIN_KEYS, *_VALIDATION_KEYS) for name in pair} | {"class_names"}
    found = {}
    for info in entries_of(archive):
        name = info.filename.removesuffix(".npy").lower()
        if name not in known or not info.filename.endswith(".npy"):
            continue
        found[name] = stored_array(archive, info)
        if not found[name].fits:
            raise DataError(f"{path}: {info.filename} is {found[name]}, which the file cannot hold.")
    return found


def _pair(found: Collection[str], keys: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    return next(((images, labels) for images, labels in keys if images in found and labels in found), None)


def _refuse_other_arrays(path: Path, found: Mapping[str, StoredArray], keys: tuple[str, str], task: str) -> None:
    """Refuse arrays that are not images and labels of one number."""
    images, labels = found[keys[0]], found[keys[1]]
    # MNIST's usual form: grey images without a channel dim.
    shape = (*images.shape, 1) if len(images.shape) == 3 else images.shape
    if len(shape) != 4 or images.dtype != np.uint8 or shape[3] not in (1, 3, 4) or 0 in shape:
        raise DataError(
            f"{path}: {keys[0]} is {images}.",
            rule="Images are uint8 [number, height, width] or [number, height, width, 1, 3 or 4].",
            remedy="Give channels last: images.transpose(0, 2, 3, 1)." if len(shape) == 4 else "",
        )
    if task != CLASSIFICATION.name:
        if len(labels.shape) not in (1, 2) or labels.shape[0] != shape[0] or labels.dtype.kind not in "biuf":
            raise DataError(
                f"{path}: {keys[1]} is {labels} for {shape[0]:,} images.",
                rule=f"With task {task}, labels are numbers: [images, labels]"
                f"{' or [images]' * (task == REGRESSION.name)}.",
            )
    elif labels.dtype.kind not in "iu" or labels.shape not in ((shape[0],), (shape[0], 1)):
        raise _other_labels(path, keys[1], labels, shape[0], NO_REGRESSION if labels.dtype.kind == "f" else "")


def _other_labels(path: Path, name: str, found: object, num_images: int, more: str = "") -> DataError:
    rule = f"Labels are whole numbers from 0, one for each image. {more}".strip()
    return DataError(f"{path}: {name} is {found} for {num_images:,} images.", rule=rule)


def _refuse_large_arrays(path: Path, wanted: Mapping[str, StoredArray], pairs: Sequence[tuple[str, str]]) -> None:
    """Refuse arrays that, with what is noted of each image, are more than half of the machine's memory."""
    names = wanted.get("class_names")
    if names is not None and names.info.file_size > MAX_BYTES:
        raise DataError(f"{path}: class_names is {names}.", rule=f"Names of classes take at most {MAX_BYTES:,} bytes.")
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    total = sum(stored.info.file_size for stored in wanted.values())
    total += _BYTES_PER_IMAGE * sum(wanted[images].shape[0] for images, _ in pairs)
    if total > limit:
        raise DataError(
            f"{path} holds arrays of {format_bytes(total)}, with the numbers of its images.",
            rule=f"They are read into memory: at most {format_bytes(limit)}, half of what this machine has.",
            remedy="Write the images as files, or as several sets.",
        )


def _pixels(
    path: Path, arrays: dict[str, np.ndarray], keys: tuple[str, str], task: str
) -> tuple[np.ndarray, np.ndarray]:
    images = arrays[keys[0]]
    images = images if images.ndim == 4 else images[..., None]
    if task != CLASSIFICATION.name:
        return images, array_labels(arrays[keys[1]], task, f"{path}: {keys[1]}")
    labels = arrays[keys[1]].reshape(-1)
    if labels.min() < 0 or labels.max() >= 10**6:
        raise _other_labels(path, keys[1], f"{labels.dtype} from {labels.min()} to {labels.max()}", len(images))
    return images, labels.astype(np.int32)


def open_set(path: Path, data: Data) -> ImageSet:
    """Read the arrays of both splits."""
    return set_of_table("npz", path, data, read_npz_set(path, data.task))
