"""Data passed from Python: arrays of images and labels, or any object with a length that returns images by index.

uint8 images go through the ordinary preprocessing; float32 images reach the network as they are (flipped and cropped
if the options say so). Anything that does not fit is a DataError before a run starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import ConfigError, DataError
from headrace.data.dataset import DataInfo, DataSet, scaled, with_pixel_options
from headrace.data.sets.catalog import numbered_classes
from headrace.data.sets.class_check import NO_REGRESSION
from headrace.data.sets.output_labels import array_labels, count_labels, output_names, scale_of
from headrace.data.sets.source import Source, memory_source
from headrace.rows.row import NO_SCALE, Scale
from headrace.rows.tasks import CLASSIFICATION, REGRESSION, TASKS

ARRAYS = "arrays"  # the name of such a dataset
DTYPES = ("uint8", "float32")
_AT_ONCE = 1024  # images read at a time for the channels' mean


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """What the images must be: the network's input and classes, and the preprocessing of the training data.

    The fields after `class_names` describe the training data and are empty before training.
    """

    image_hwc: tuple[int, int, int]
    num_classes: int
    class_names: tuple[str, ...] = ()
    image_dtype: str = ""
    normalization: str = ""
    channel_mean: tuple[float, ...] = ()  # of the training images, on the scale 0 to 1
    channel_std: tuple[float, ...] = ()
    task: str = CLASSIFICATION.name
    scale: Scale = NO_SCALE  # of the targets of a regression


def sequence_source(images: Any, labels: np.ndarray, first: np.ndarray) -> Source:
    """Return a split read image by image from an object with `len(images)` and `images[i]`, by several threads."""

    def read_into(indices: np.ndarray, _epoch: np.ndarray | int, out: np.ndarray) -> None:
        for position, index in enumerate(indices.tolist()):
            image = np.asarray(images[index])
            if image.shape != first.shape or image.dtype != first.dtype:
                raise DataError(
                    f"Image {index} is {_describe(image)}, image 0 is {_describe(first)}.",
                    rule="All images of a set have one shape and one dtype.",
                )
            out[position] = image

    height, width, channels = first.shape
    return Source(
        labels=labels,
        image_hwc=(height, width, channels),
        num_distinct=len(labels),
        read_into=read_into,
        dtype=first.dtype,
        slow=True,
    )


def array_source(images: Any, labels: Any, spec: ImageSpec, what: str = "") -> Source:
    """Return the split of these images and labels; `what` (such as `validation `) goes into error messages."""
    first = np.asarray(images[0]) if _count(images, what) else None
    is_array = hasattr(images, "shape") and hasattr(images, "dtype")
    _check_image(images if is_array else first, is_array, spec, what)
    labels = _labels(labels, len(images), spec, what)
    return memory_source(np.asarray(images), labels) if is_array else sequence_source(images, labels, np.asarray(first))


def array_dataset(data: Data, spec: ImageSpec, train: Source | None, validation: Source | None) -> DataSet:
    """Return the dataset of these two splits (None: not used in the run), with its preprocessing resolved."""
    source = train or validation
    dtype = str(source.dtype) if source is not None else spec.image_dtype or "float32"
    augmentation = "none" if data.train_augmentation == "auto" else data.train_augmentation
    wanted = data.normalization
    given = data.pixel_mean is not None or data.pixel_std is not None
    normalization = _normalization("per-channel" if given and wanted == "auto" else wanted, spec.normalization, dtype)
    mean, std = spec.channel_mean, spec.channel_std
    if data.pixel_mean is not None and (data.pixel_std is not None or normalization == "centred"):
        mean = std = (1.0,) * spec.image_hwc[2]  # placeholders: what the options say is taken below
    needs_mean = normalization in ("per-channel", "centred")
    if needs_mean and train is not None and not mean:
        mean, std = channel_moments(train)
    elif needs_mean and not mean:
        raise DataError(
            f"normalization {normalization} needs the mean of the training images, which this model has not seen.",
            remedy="Call fit or load first, or choose normalization='zero-one'.",
        )
    scale, asked = spec.scale, (data.target_mean, data.target_std)
    if spec.task == REGRESSION.name and source is not None and (not scale.std or None not in asked):
        labels = np.zeros((0, spec.num_classes)) if train is None else train.labels
        scale = scale_of(labels, spec.class_names or named_outputs(spec), data, "The data")
    info = DataInfo(
        name=ARRAYS,
        image_hwc=spec.image_hwc,
        class_names=spec.class_names or named_outputs(spec),
        num_train=len(train) if train is not None else 0,
        num_validation=len(validation) if validation is not None else 0,
        augmentation=augmentation,
        normalization=normalization,
        channel_mean=mean or (0.0,) * spec.image_hwc[2],
        channel_std=std or (1.0,) * spec.image_hwc[2],
        image_dtype=dtype,
        train_counts=() if train is None else count_labels(train.labels, spec.num_classes),
        task=spec.task,
        scale=scale,
    )
    none = no_images(spec, dtype)
    info = with_pixel_options(info, data) if dtype == "uint8" else info
    train, validation = (none if each is None else scaled(each, info) for each in (train, validation))
    return DataSet(info=info, train=train, validation=validation)


def no_images(spec: ImageSpec, dtype: str) -> Source:
    """Return an empty split."""
    return memory_source(np.zeros((0, *spec.image_hwc), dtype), no_labels(spec, 0))


def no_labels(spec: ImageSpec, count: int) -> np.ndarray:
    """Return labels for images that need none."""
    row = TASKS[spec.task]
    return np.zeros((count, spec.num_classes) if row.per_output else count, row.label_dtype)


def named_outputs(spec: ImageSpec) -> tuple[str, ...]:
    """Return names for outputs that have none."""
    if spec.task == CLASSIFICATION.name:
        return numbered_classes(spec.num_classes)
    return output_names(spec.task, spec.num_classes)


def channel_moments(source: Source) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of uint8 images, on the scale 0 to 1."""
    total, squares, count = 0.0, 0.0, 0
    for start in range(0, len(source), _AT_ONCE):
        # In float64: sums of squares over millions of pixels lose the digits of a variance in float32.
        images = source.read(np.arange(start, min(start + _AT_ONCE, len(source))), 0).astype(np.float64) / 255
        total, squares = total + images.sum((0, 1, 2)), squares + np.square(images).sum((0, 1, 2))
        count += images.size // images.shape[-1]
    mean = np.asarray(total) / count
    std = np.sqrt(np.maximum(np.asarray(squares) / count - mean**2, 0))
    if not (std > 0).all():
        raise DataError(
            f"Channel {int(np.argmin(std))} has the same value in every training image.",
            rule="normalization per-channel divides by each channel's standard deviation.",
            remedy="Choose normalization='zero-one', or leave that channel out.",
        )
    return tuple(map(float, mean)), tuple(map(float, std))


def check_class_names(names: Sequence[str], num_classes: int) -> tuple[str, ...]:
    """Return the names of the classes; refuse a wrong number of them."""
    if len(names) != num_classes:
        raise DataError(
            f"class_names has {len(names)} names, the network {num_classes} classes.",
            rule="There is one name for each label, in the order of the labels.",
        )
    return tuple(map(str, names))


def _normalization(wanted: str, trained: str, dtype: str) -> str:
    if trained and wanted not in ("auto", trained):
        raise ConfigError(
            f"normalization {wanted} was requested, but the model was trained with {trained}.",
            rule="Images are normalized as they were in training.",
            remedy="Leave normalization out.",
        )
    if dtype == "uint8":
        return trained or ("zero-one" if wanted == "auto" else wanted)
    if wanted not in ("auto", "none"):
        raise ConfigError(
            f"normalization {wanted} was requested, but the images are {dtype}.",
            rule="float32 images reach the network as they are; normalization is for images of 0 to 255.",
            remedy="Leave normalization out, or give the images as uint8.",
        )
    return "none"


def _count(images: Any, what: str) -> int:
    if not (hasattr(images, "__len__") and hasattr(images, "__getitem__")) or isinstance(images, str | bytes | dict):
        raise DataError(
            f"The {what}images are a {type(images).__name__}.",
            rule="Images are an array [N, H, W, C], or an object with len(images) and images[i].",
        )
    if len(images) == 0:
        raise DataError(f"There are no {what}images.")
    return len(images)


def _label_remedy(labels: np.ndarray) -> str:
    """Return the call that makes class numbers of labels as other libraries take them."""
    if labels.ndim == 2:
        return "Give labels[:, 0]." if labels.shape[1] == 1 else "If they are one-hot, give labels.argmax(axis=1)."
    if labels.dtype.kind == "f" and (labels % 1 != 0).any():
        return f"{NO_REGRESSION} In Python: task='regression'."
    if labels.ndim == 1 and labels.dtype.kind in "US":
        return "Number the names: class_names, labels = np.unique(labels, return_inverse=True)."
    return "Convert them: labels.astype(np.int32)." if labels.ndim == 1 else ""


def _check_image(images: Any, is_array: bool, spec: ImageSpec, what: str) -> None:
    """Refuse images (an array of them, or the first alone) whose shape or dtype the network does not take."""
    shape = tuple(images.shape)[1:] if is_array else tuple(images.shape)
    wanted = "x".join(map(str, spec.image_hwc))
    if shape != spec.image_hwc:
        remedy = "Give the height, width and channels of the images as input_shape."
        if is_array and tuple(images.shape) == spec.image_hwc:
            raise DataError("This is one image, not an array of images.", remedy="Add the dimension: image[None].")
        if len(shape) == 2 and (*shape, 1) == spec.image_hwc:
            remedy = "Add a dimension for the single channel: images[..., None]."
        found = "x".join(map(str, shape)) or "single numbers"
        raise DataError(f"The {what}images are {found}, the network takes {wanted}.", remedy=remedy)
    dtype = str(images.dtype)
    if dtype not in DTYPES:
        raise DataError(
            f"The {what}images are {dtype}{_range_text(images)}.",
            rule="Images are uint8 (0 to 255, preprocessed as the options say) or float32 (taken as they are).",
            remedy=_dtype_remedy(images),
        )
    if spec.image_dtype not in ("", dtype):
        raise DataError(
            f"The {what}images are {dtype}, those that the model was trained on were {spec.image_dtype}.",
            rule="uint8 images are preprocessed and float32 ones are not, so the network would see other numbers.",
            remedy=f"Give images of {spec.image_dtype}.",
        )


def _range_text(images: Any) -> str:
    values = np.asarray(images)
    return f" from {values.min()} to {values.max()}" if values.dtype.kind in "iu" and values.size else ""


def _dtype_remedy(images: Any) -> str:
    """Return the conversion that keeps what the numbers mean: whole ones are pixels, float32 is taken as it is."""
    values = np.asarray(images)
    kind, is_empty = values.dtype.kind, not values.size
    if kind == "b":
        return "Convert them: images.astype(np.uint8) * 255."
    if kind not in "iu":
        return "Convert them: images.astype(np.float32)." if kind == "f" else ""
    if is_empty or (values.min() >= 0 and values.max() <= 255):
        return "Convert them: images.astype(np.uint8)."
    return "Scale them to 0 to 255 and give uint8; or to the numbers that the network is to see, and give float32."


def _labels(labels: object, num_images: int, spec: ImageSpec, what: str) -> np.ndarray:
    """Return labels as int32 [N], by the task as a number for each output [N, C]; refuse anything else."""
    array, num_classes = np.asarray(labels), spec.num_classes
    if spec.task != CLASSIFICATION.name:
        found = array_labels(array, spec.task, f"The {what}labels")
        if len(found) != num_images:
            raise DataError(f"There are {num_images:,} {what}images, but {len(found):,} labels.")
        if found.shape[1] != num_classes:
            raise DataError(
                f"The {what}labels are {list(array.shape)}, the network has {num_classes} outputs.",
                rule="Labels have a number for each output.",
            )
        return found
    # One-hot labels, which other libraries take: refused with the call that converts them.
    if array.ndim == 2 and array.shape[1] == num_classes:
        raise DataError(
            f"The {what}labels are {list(array.shape)}: one number for each class.",
            rule="A label is the number of one class.",
            remedy="Give labels.argmax(axis=1); or, where an image has several, task='multilabel'.",
        )
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"The {what}labels are {_describe(array)}.",
            rule="Labels are whole numbers, one for each image.",
            remedy=_label_remedy(array),
        )
    if len(array) != num_images:
        raise DataError(f"There are {num_images:,} {what}images, but {len(array):,} labels.")
    wrong = np.flatnonzero((array < 0) | (array >= num_classes))
    if len(wrong):
        raise DataError(
            f"Label {array[wrong[0]]} of {what}image {wrong[0]} is out of range (so are {len(wrong) - 1:,} others).",
            rule=f"The network has {num_classes} classes: labels are 0 to {num_classes - 1}.",
        )
    return array.astype(np.int32)


def _describe(array: np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)}"
