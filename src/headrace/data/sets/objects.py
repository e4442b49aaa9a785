"""Labelled images from Python: torch, Grain and Hugging Face datasets, data frames, lists, iterables.

Pictures (Pillow images, paths, encoded bytes) are decoded, resized and cropped as image files are. Arrays and tensors
are taken as they are, and have one shape. No library is imported: what an object is, is seen from what it has.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from headrace.core.errors import ConfigError, DataError
from headrace.core.units import format_bytes
from headrace.data.decoding.image import BadImage, pillow_pixels, turn
from headrace.data.sets.formats.csv import LABEL_NAMES, PATH_NAMES, SPLIT_NAMES, SPLITS
from headrace.data.sets.samples import Content, read_all
from headrace.data.sets.workers import Workers

IMAGE_KEYS = ("image", "img", "jpg", "jpeg", "png", "webp", "pixel_values")
LABEL_KEYS = ("label", "labels", "fine_label", "cls", "class", "target")
KEPT_BYTES = 4 << 30  # of the images of an iterable, which are kept in memory
_THREADS = 8
_ORIENTATION = 0x0112  # of EXIF
_RULE = (
    "Data is a path or a name; images with their labels; a data frame with columns path and label; or an object whose "
    "items are (image, label) or {'image': ..., 'label': ...}: one with len() and [i], an iterable, which is kept in "
    "memory, or a hr.Stream, which is not."
)
EXAMPLE = """For example:
    model.fit([("cat.jpg", "cat"), ("dog.png", "dog")], validation_split=0.1)
    model.fit([dataset[i][0] for i in range(len(dataset))], [dataset[i][1] for i in range(len(dataset))])
    model.fit(((image, label) for image, label in stream), validation_split=0.1)"""


class Item(NamedTuple):
    """One image with its label, as an object gave them."""

    image: Any
    label: Any


@dataclass(frozen=True, eq=False, kw_only=True)
class Labelled:
    """Images by number with their labels; `class_names` are () where labels are numbers that nothing names."""

    image: Callable[[int], Any]
    labels: np.ndarray  # int32
    class_names: tuple[str, ...] = ()
    names: Sequence[str] = ()  # of the images, where they have any

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> np.ndarray:
        """Return an image that is an array or a tensor, with the channels last."""
        return array_of(self.image(number))

    @property
    def are_pictures(self) -> bool:
        """Whether the images have to be decoded or resized."""
        return is_picture(self.image(0))

    def take(self, chosen: np.ndarray) -> "Labelled":
        """Return the images of these numbers."""
        numbers, names = chosen.tolist(), self.names
        return replace(
            self,
            image=lambda number: self.image(numbers[number]),
            labels=self.labels[chosen],
            names=[names[number] for number in numbers] if names else (),
        )


class PictureSamples:
    """Pictures as the samples of a split."""

    def __init__(self, pictures: Labelled) -> None:
        self._pictures, self.labels = pictures, pictures.labels

    def __len__(self) -> int:
        return len(self.labels)

    def content(self, sample: int) -> Content:
        """Return the picture, decoded if it is a Pillow image."""
        return Content(_content(self._pictures.image(sample)))

    def name(self, sample: int) -> str:
        """Return the picture's path or number."""
        return self._pictures.names[sample] if self._pictures.names else f"image {sample}"


def is_picture(image: object) -> bool:
    """Say whether an image is decoded or resized, and not an array that is taken as it is."""
    return isinstance(image, Image.Image | str | os.PathLike | bytes | bytearray | memoryview | Mapping)


def array_of(image: Any) -> np.ndarray:
    """Return an array, or a tensor of torch with the channels last; of a single channel without one, one is added."""
    if not hasattr(image, "detach"):
        array = np.asarray(image)
        return array[:, :, None] if array.ndim == 2 else array
    array = image.detach().cpu().numpy()
    if array.ndim < 3:
        return array[:, :, None] if array.ndim == 2 else array
    first, last = array.shape[-3] in (1, 3, 4), array.shape[-1] in (1, 3, 4)
    if first == last:  # torch has the channels first; where they could be last as well, nothing is guessed
        raise DataError(
            f"A tensor is {list(array.shape)}: its channels cannot be told from its sides.",
            rule="Channels are the first dimension of an image in torch, 1 or 3 of them.",
            remedy="Give an array with the channels last: tensor.permute(1, 2, 0).numpy().",
        )
    return np.ascontiguousarray(np.moveaxis(array, -3, -1)) if first else array


def _content(image: Any) -> Any:
    """Return encoded bytes, or the pixels of a Pillow image as uint8 [h, w, 1 or 3]."""
    if isinstance(image, Mapping):  # as Hugging Face has images that are not decoded
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str | os.PathLike):
        return read_file(image)
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if not isinstance(image, Image.Image):
        raise BadImage(f"a {type(image).__name__}, where other images are pictures")
    try:
        image.load()
        pixels = pillow_pixels(image, 1 if image.mode in ("1", "L") or image.mode.startswith("I") else 3)
        orientation = image.getexif().get(_ORIENTATION, 1)
    except (OSError, ValueError, SyntaxError) as error:
        raise BadImage(str(error)) from None
    return turn(pixels, orientation if orientation in range(1, 9) else 1)


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return a file's bytes; BadImage where it cannot be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return read_all(handle)
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:
        raise BadImage(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None


def splits_of(data: object) -> tuple[Any, Any] | None:
    """Return training and validation of a dict of splits or a frame with a column of splits; None for other data."""
    if isinstance(data, Mapping) and "train" in data:
        held = next((data[name] for name in ("validation", "val", "valid", "dev", "test") if name in data), None)
        return data["train"], held
    split = _column_named(data, SPLIT_NAMES) if _is_frame(data) else None
    if split is None:
        return None
    said = [str(value).strip().lower() for value in _column(data, split)]
    if not any(SPLITS.get(value) == "train" for value in said):  # a part by itself, such as validation data
        return None
    unknown = sorted({value for value in said if value not in SPLITS})
    if unknown:
        raise DataError(f"The column {split} has the value {unknown[0]!r}.", rule=f"Splits: {', '.join(SPLITS)}.")
    kinds = [SPLITS[value] for value in said]
    held = "validation" if "validation" in kinds else "test"
    train, held_out = ([number for number, kind in enumerate(kinds) if kind == name] for name in ("train", held))
    return _frame_rows(data, train), _frame_rows(data, held_out) if held_out else None


def labelled(data: object, labels: object = None, known: Sequence[str] = ()) -> Labelled:
    """Return the images and labels of an object; what it cannot be is refused with what can.

    `known` are the classes that a model has: names of classes get their numbers.
    """
    if labels is not None:
        images = _images_of(data)
        given = _labels_of(labels)
        if len(images) != len(given):
            raise DataError(f"There are {len(images):,} images, but {len(given):,} labels.")
        return _numbered(images.__getitem__, given, known, names=_names(images))
    if _is_frame(data):
        return _of_frame(data, known)
    if _is_indexed(data):
        return _of_indexed(data, known)
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | Mapping):
        items, names = _kept(data), feature_names(data)
        labels = [item.label for item in items]
        return _numbered(lambda number: items[number].image, labels, names or known, bool(names))
    raise ConfigError(f"The data is a {type(data).__name__}.", rule=_RULE, remedy=EXAMPLE)


def images_alone(data: object) -> Labelled:
    """Return images that need no labels, to predict: one or several pictures, arrays, or items of a dataset."""
    if is_picture(data) or hasattr(data, "detach") or isinstance(data, np.ndarray):
        images = [data] if is_picture(data) or getattr(data, "ndim", 0) in (2, 3) else array_of(data)
    elif _is_indexed(data):
        images = _Converted(data, _image_of)
    elif isinstance(data, Iterable) and not isinstance(data, Mapping):
        images = [_image_of(item) for item in data]
    else:
        raise ConfigError(
            f"The images are a {type(data).__name__}.",
            rule="They are files, folders, Pillow images, encoded bytes, an array [N, H, W, C] or [H, W, C], or an "
            "object or an iterable of such images.",
            remedy="For example: model.predict('cat.jpg'), model.predict(Image.open('cat.jpg')), "
            "model.predict(array[None]).",
        )
    if not len(images):
        raise DataError("There are no images.")
    return Labelled(image=images.__getitem__, labels=np.zeros(len(images), np.int32), names=_names(images))


class _Converted:
    """The items of an object, each passed through a function."""

    def __init__(self, data: Any, convert: Callable[[Any], Any]) -> None:
        self._data, self._convert = data, convert

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> Any:
        return self._convert(self._data[number])


def _is_indexed(data: object) -> bool:
    other = isinstance(data, Mapping | str | bytes | type)
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not other


def _is_frame(data: object) -> bool:
    """Say whether data is a frame of pandas or polars; a dataset of Hugging Face has its columns' names elsewhere."""
    return hasattr(data, "columns") and (hasattr(data, "iloc") or hasattr(data, "get_column"))


def _of_frame(data: Any, known: Sequence[str]) -> Labelled:
    image, label = (_column_named(data, (*PATH_NAMES, *IMAGE_KEYS)), _column_named(data, (*LABEL_NAMES, *LABEL_KEYS)))
    if image is None or label is None:
        raise DataError(
            f"The columns of the frame are {', '.join(map(str, data.columns))[:200]}.",
            rule="Columns are path (or image), label and, optionally, split.",
            remedy=f"Name them, or give the columns: model.fit(list(frame[{'path'!r}]), list(frame[{'label'!r}])).",
        )
    images = _column(data, image)
    return _numbered(images.__getitem__, _column(data, label), known, names=_names(images))


def _frame_rows(data: Any, rows: list[int]) -> Any:
    return data.iloc[rows] if hasattr(data, "iloc") else data[rows]


def _column(data: Any, name: str) -> list[Any]:
    return list(data[name])


def _column_named(data: Any, names: Sequence[str]) -> Any:
    lower = {str(column).strip().lower(): column for column in data.columns}
    return next((lower[name] for name in names if name in lower), None)


def _of_indexed(data: Any, known: Sequence[str]) -> Labelled:
    workers = data if isinstance(data, Workers) else None
    inner = workers.data if workers is not None else data
    if not len(inner):
        raise DataError("There are no images.")
    names = feature_names(inner)
    first = item_of(data[0])
    labels = _labels_beside(inner, first)
    if labels is None:
        # Worker processes send the labels alone.
        label_of = partial(workers.label, _label_in) if workers is not None else lambda number: _label_in(inner[number])
        num_threads = max(_THREADS, 2 * workers.num_processes if workers is not None else 0)
        with ThreadPoolExecutor(num_threads, thread_name_prefix="labels") as pool:
            labels = list(pool.map(label_of, range(len(inner))))
    stored = undecoded(inner) if workers is None else workers.over(undecoded(inner))
    return _numbered(
        lambda number: item_of(stored[number]).image,
        labels,
        names or _class_attribute(inner) or known,
        bool(names or _class_attribute(inner)),
    )


def _label_in(item: Any) -> Any:
    return item_of(item).label


def undecoded(data: Any) -> Any:
    """Return a dataset of Hugging Face that gives encoded bytes, which our decoder takes; other data as it is."""
    kinds = getattr(sys.modules.get("datasets"), "Image", None)
    features = getattr(data, "features", None)
    # With a transform of the user's own, items are what it returns.
    if kinds is None or not isinstance(features, Mapping) or getattr(data, "format", {}).get("type") is not None:
        return data
    for name, feature in features.items():
        if isinstance(feature, kinds) and getattr(feature, "decode", False):
            data = data.cast_column(name, kinds(decode=False))
    return data


def feature_names(data: object) -> tuple[str, ...]:
    """Return the class names that a dataset of Hugging Face states."""
    features = getattr(data, "features", None)
    if not isinstance(features, Mapping):
        return ()
    key = next((name for name in LABEL_KEYS if name in features), None)
    return tuple(map(str, getattr(features[key], "names", None) or ())) if key is not None else ()


def _class_attribute(data: object) -> tuple[str, ...]:
    """Return the class names that a dataset of torchvision has."""
    classes = getattr(data, "classes", None)
    if not isinstance(classes, list | tuple) or not all(isinstance(name, str) for name in classes):
        return ()
    return tuple(classes)


def _labels_beside(data: Any, first: Item) -> list[Any] | None:
    """Return the labels of a dataset that has them beside its images: reading every image for them takes long."""
    columns = getattr(data, "column_names", None)
    if isinstance(columns, list):
        key = next((name for name in LABEL_KEYS if name in columns), None)
        return list(data[key]) if key is not None and getattr(data, "format", {}).get("type") is None else None
    if getattr(data, "target_transform", None) is not None or getattr(data, "transforms", None) is not None:
        return None  # labels are those of the items
    for name in ("targets", "labels"):
        found = getattr(data, name, None)
        if found is None or not hasattr(found, "__len__") or len(found) != len(data):
            continue
        values = _labels_of(found)
        if _plain(values[0]) == _plain(first.label) and _plain(values[-1]) == _plain(
            item_of(data[len(data) - 1]).label
        ):
            return values
    return None


def _kept(data: Iterable[Any]) -> list[Item]:
    """Return the items of an iterable, kept in memory: encoded where they are, else as pixels."""
    items, num_bytes = [], 0
    for given in chain(undecoded(data)):
        item = item_of(given)
        size = _num_bytes(item.image)
        num_bytes += size
        if num_bytes > KEPT_BYTES:
            raise DataError(
                f"The iterable has more than {format_bytes(KEPT_BYTES)} of images: {len(items):,} fit.",
                rule="An iterable is read once and kept in memory, so that every epoch has another order and a resumed "
                "run sees the same images.",
                remedy="""For example:
    model.fit(hr.Stream(make_items, length=1_000_000, num_classes=10), validation_data=val)
    model.fit(dataset, validation_data=val)  # with len(dataset) and dataset[i]
    model.fit(itertools.islice(data, 1000), validation_split=0.1)""",
            )
        items.append(item)
    if not items:
        raise DataError("The iterable has no items.", remedy="An iterator can be used only once: give a new one.")
    return items


def _num_bytes(image: Any) -> int:
    if isinstance(image, Image.Image):
        return image.width * image.height * len(image.getbands())
    if isinstance(image, Mapping):
        return len(image.get("bytes") or b"")
    return int(getattr(image, "nbytes", 0)) or (len(image) if isinstance(image, bytes | bytearray) else 0)


def item_of(item: Any) -> Item:
    """Return the image and the label of an item."""
    if isinstance(item, Mapping):
        image, label = (next((name for name in keys if name in item), None) for keys in (IMAGE_KEYS, LABEL_KEYS))
        if image is not None and label is not None:
            return Item(item[image], item[label])
        what = f"a dict of {', '.join(map(str, item))[:200]}"
    elif isinstance(item, tuple | list) and len(item) == 2:
        return Item(*item)
    else:
        what = f"a {type(item).__name__}"
    raise DataError(f"An item of the data is {what}.", rule=_RULE, remedy=EXAMPLE)


def _image_of(item: Any) -> Any:
    """Return the image of an item, which may be the image itself."""
    if isinstance(item, Mapping) and not {"bytes", "path"} & set(item):
        key = next((name for name in IMAGE_KEYS if name in item), None)
        if key is None:
            raise DataError(f"An item of the data is a dict of {', '.join(map(str, item))[:200]}.", rule=_RULE)
        return item[key]
    return item[0] if isinstance(item, tuple | list) and len(item) == 2 else item


def _images_of(data: Any) -> Any:
    if _is_indexed(data):
        return data
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | Mapping):
        return list(data)
    raise ConfigError(f"The images are a {type(data).__name__}.", rule=_RULE, remedy=EXAMPLE)


def _labels_of(labels: Any) -> list[Any]:
    return labels.tolist() if hasattr(labels, "tolist") else list(labels)


def _names(images: Any) -> Sequence[str]:
    """Return the paths of images, where they are paths."""
    if isinstance(images, list | tuple) and images and all(isinstance(image, str | os.PathLike) for image in images):
        return [str(image) for image in images]
    return ()


def _plain(label: Any) -> Any:
    return label.item() if hasattr(label, "item") else label


def _numbered(
    image: Callable[[int], Any],
    labels: Sequence[Any],
    class_names: Sequence[str],
    are_theirs: bool = False,
    names: Sequence[str] = (),
) -> Labelled:
    """Return images whose labels are numbers, or names of classes, which are numbered in their order.

    `are_theirs`: the class names were stated by the data, for labels that are numbers.
    """
    if not len(labels):
        raise DataError("There are no images.")
    values = [_plain(label) for label in labels]
    kinds = {type(value) for value in values}
    if kinds == {str}:
        known = tuple(class_names) if set(class_names) >= set(values) else tuple(sorted(set(values)))
        if class_names and known != tuple(class_names):
            strange = sorted(set(values) - set(class_names))[0]
            raise DataError(
                f"The class {strange!r} is unknown.",
                rule=f"The classes are {', '.join(class_names)[:200]}.",
            )
        number = {name: label for label, name in enumerate(known)}
        found, class_names = np.array([number[value] for value in values], np.int32), known
    elif kinds <= {int, np.int32, np.int64, np.uint8}:
        found, class_names = np.array(values, np.int64), class_names if are_theirs else ()
        most = len(class_names) or 2**31
        wrong = np.flatnonzero((found < 0) | (found >= most))
        if len(wrong):
            raise DataError(
                f"Label {found[wrong[0]]} of image {wrong[0]} is out of range.",
                rule=f"Labels are 0 to {most - 1:,}." if class_names else "Labels are whole numbers from 0 on.",
            )
    else:
        kind = sorted(kind.__name__ for kind in kinds)
        raise DataError(
            f"The labels are of type {', '.join(kind)}.",
            rule="A label is the number of a class, from 0 on, or its name.",
            remedy=EXAMPLE,
        )
    return Labelled(image=image, labels=found.astype(np.int32), class_names=tuple(class_names), names=names)
