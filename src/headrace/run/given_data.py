"""What code may pass as data: the path of a dataset, the name of a known one, an opened dataset, images and labels."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from headrace.config.schema import Config, Data
from headrace.config.section_data import DATASETS, FOLDER_SETS, IMAGE_DATASETS
from headrace.core.errors import ConfigError, DataError, did_you_mean
from headrace.core.local_path import is_address, is_pattern, is_set_name, local_path
from headrace.core.units import format_list
from headrace.data.dataset import DataInfo, DataSet, find_set, open_images, resolved_set
from headrace.data.decoding.image import BadImage
from headrace.data.decoding.image_source import decoded_source
from headrace.data.sets.arrays import ImageSpec, no_images
from headrace.data.sets.bad_samples import BadSamples
from headrace.data.sets.catalog import numbered_classes
from headrace.data.sets.formats.folder import TRAIN_NAMES, list_classes, split_folder
from headrace.data.sets.held_out import hold_out, never_validated
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.image_views import evaluation_view
from headrace.data.sets.objects import Labelled, PictureSamples, array_of, images_alone, is_picture, labelled, splits_of
from headrace.data.sets.samples import FileSamples, Samples
from headrace.data.sets.stream import Stream
from headrace.model.network import Network
from headrace.rows.tasks import CLASSIFICATION
from headrace.run.network_summary import shape_text
from headrace.run.prediction import read_sample
from headrace.weights.input_form import InputForm
from headrace.weights.published import IMAGENET_CLASSES, imagenet_names, imagenet_numbers

_LISTED = 5  # names of classes in a message
NAMES = tuple(name for name in DATASETS if name not in IMAGE_DATASETS or name in FOLDER_SETS)
PICTURES = "pictures"  # the name of such a dataset


@dataclass(frozen=True, kw_only=True)
class GivenData:
    """Data as it was given, in one of five forms."""

    options: dict[str, Any] = field(default_factory=dict)  # that name a dataset
    arrays: tuple[Any, Any] | None = None  # images of one shape and their labels
    pictures: Labelled | None = None  # images to be decoded or resized
    dataset: DataSet | None = None
    stream: Stream | None = None  # images that are read while a run trains
    held: Any = None  # the validation part, where the data has one
    class_names: tuple[str, ...] = ()  # where the data states them


def given_data(data: object, labels: object = None, known: Sequence[str] = ()) -> GivenData:
    """Return what was given; refuse what is no data. `known` are the classes of the model, where it has any."""
    known = () if tuple(known) == numbered_classes(len(known)) else known
    if isinstance(data, DataSet):
        return GivenData(dataset=data)
    if isinstance(data, Stream):
        return GivenData(stream=data)
    if labels is None and _is_pair(data):
        data, labels = data
    if labels is not None:
        first = _first(data)
        if not is_picture(first) and not hasattr(first, "detach"):
            return GivenData(arrays=(data, labels))
        if hasattr(data, "detach"):
            return GivenData(arrays=(array_of(data), np.asarray(labels)))
        return _given(labelled(data, labels, known))
    if is_address(data) or is_set_name(data) or is_pattern(data):
        return GivenData(options={"dataset_path": data})
    if isinstance(data, str | os.PathLike):
        path = local_path(data).expanduser()
        # A folder of that name wins: whoever has a folder called digits means it.
        if isinstance(data, str) and data in NAMES and not path.exists():
            return GivenData(options={"dataset": data})
        if not path.exists():
            raise DataError(
                f"There is no {data}, neither a path nor a known dataset.",
                remedy=did_you_mean(str(data), NAMES) if os.sep not in str(data) else "Check the path.",
            )
        return GivenData(options={"dataset_path": str(path)})
    train, held = splits_of(data) or (data, None)
    if isinstance(train, Stream):
        return GivenData(stream=train, held=held)
    return replace(_given(labelled(train, known=known)), held=held)


def refuse_stream(given: GivenData, what: str) -> None:
    """Refuse a stream where images are read more than once, or counted."""
    if given.stream is not None:
        raise ConfigError(
            f"{what} is a Stream.",
            rule="A stream is for training: it is not kept, and its labels are known only when it is read.",
            remedy="Give items that can be read again: a list, an object with len(data) and data[i], or a folder.",
        )


def _is_pair(data: object) -> TypeGuard[Sequence[Any]]:
    """Say whether data is (images, labels), and not two items that are (image, label) each."""
    if not isinstance(data, tuple | list) or len(data) != 2 or isinstance(data[0], str | os.PathLike):
        return False
    return isinstance(data, tuple) or not all(
        isinstance(item, tuple) and len(item) == 2 and np.ndim(item[1]) == 0 for item in data
    )


def _first(images: Any) -> Any:
    """Return the first of some images, which say what they all are."""
    if hasattr(images, "dtype") or not hasattr(images, "__getitem__") or not hasattr(images, "__len__"):
        return images
    return images[0] if len(images) and not isinstance(images, Mapping | str | bytes) else None


def _given(found: Labelled) -> GivenData:
    if found.are_pictures:
        return GivenData(pictures=found, class_names=found.class_names)
    return GivenData(arrays=(found, found.labels), class_names=found.class_names)


def picture_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run on pictures: those of image files. They are decoded for each crop."""
    return {"decode_once": "off", **options, "dataset": "folder"}


def picture_dataset(
    given: GivenData, validation_data: object, config: Config, spec: ImageSpec, fraction: float | None
) -> DataSet:
    """Return the dataset of pictures; without validation data that fraction of each class is held out, if any."""
    if config.data.task != CLASSIFICATION.name:
        raise ConfigError(
            f"task is {config.data.task}, and the images are given one by one.",
            rule="Labels of such images are classes.",
            remedy="Give arrays of images and labels, or list the files with their labels (labels=FILE).",
        )
    train, held, remarks, split_by = given.pictures, given.held if validation_data is None else validation_data, (), ""
    assert train is not None
    names = train.class_names or spec.class_names
    names = names or numbered_classes(spec.num_classes or int(train.labels.max()) + 1)
    if held is not None:
        found = given_data(held, known=names)
        refuse_stream(found, "validation_data")
        found = found.pictures
        if found is None:
            raise ConfigError(
                "The validation data are no pictures, those of training are.",
                rule="Both parts are Pillow images, paths or encoded bytes, or both are arrays.",
            )
    elif fraction is None:
        found = train.take(np.zeros(0, np.int64))
    else:
        part = hold_out(
            [train.names[number] if train.names else str(number) for number in range(len(train))],
            train.labels,
            fraction,
            names,
            "The data",
            "validation_data",
        )
        train, found = train.take(np.flatnonzero(~part.mask)), train.take(np.flatnonzero(part.mask))
        remarks, split_by = part.remarks, part.text
    for what, labels in (("training", train.labels), ("validation", found.labels)):
        if len(labels) and labels.max() >= len(names):
            raise DataError(
                f"The label {labels.max()} of a {what} image is out of range.",
                rule=f"There are {len(names)} classes: labels are 0 to {len(names) - 1}.",
            )
    images = ImageSet(
        kind=PICTURES,
        place="",
        class_names=names,
        train=PictureSamples(train),
        validation=PictureSamples(found),
        split_by=split_by,
        remarks=(*remarks, *(never_validated(names, found.labels) if held is not None else ())),
    )
    return open_images(images, config.data, config.run.seed)


def picture_evaluation(pictures: Labelled, data: Data, spec: ImageSpec) -> DataSet:
    """Return pictures as the validation part of a dataset, prepared as `spec` says."""
    samples = PictureSamples(pictures)
    return _whole(samples, pictures.class_names or spec.class_names, PICTURES, "", data, spec)


def array_spec(spec: ImageSpec, images: Any, labels: Any) -> ImageSpec:
    """Return what arrays must be for a shipped network that has not seen data: they decide it."""
    first = np.shape(images)[1:] if hasattr(images, "shape") else np.shape(images[0])
    if len(first) != 3:
        raise ConfigError(
            f"The images are {list(np.shape(images))}.",
            rule="Images are an array [N, H, W, C].",
            remedy="Add a dimension for the single channel: images[..., None]." if len(first) == 2 else "",
        )
    height, width, channels = map(int, first)
    if height in (1, 3) and width == channels > 4:
        raise ConfigError(
            f"The images are {list(np.shape(images))}, which looks like [N, C, H, W].",
            rule="Images are an array [N, H, W, C].",
            remedy="Put the channels last: images.transpose(0, 2, 3, 1).",
        )
    found = np.asarray(labels)
    # What is no class number is refused, in words, where the labels are read.
    is_number = found.ndim == 1 and found.size and found.dtype.kind in "iu"
    if spec.task != CLASSIFICATION.name:
        return replace(spec, image_hwc=(height, width, channels), num_classes=spec.num_classes or _num_outputs(found))
    classes = spec.num_classes or (int(found.max()) + 1 if is_number else 0)
    return replace(spec, image_hwc=(height, width, channels), num_classes=classes)


def _num_outputs(labels: np.ndarray) -> int:
    return labels.shape[1] if labels.ndim == 2 else 1


def refuse_mismatch(network: Network | None, num_classes: int, info: DataInfo) -> None:
    """Refuse data whose images or classes are not those of the model, as far as they are known."""
    if network is not None and info.image_hwc != network.input_hwc:
        raise ConfigError(
            f"The network takes {shape_text(network.input_hwc)} images, "
            f"{info.place or info.name} has {shape_text(info.image_hwc)}."
        )
    if num_classes and info.num_classes != num_classes:
        raise ConfigError(
            f"The model has {num_classes} classes, {info.place or info.name} has {info.num_classes}.",
            remedy="Leave num_classes out, or check the folders of the classes.",
        )


def refuse_other_classes(info: DataInfo, num_classes: int, class_names: Sequence[str]) -> None:
    """Refuse data for a network that was trained on other classes, as far as their names are known."""
    rule = "Labels mean the same classes in training and evaluation."
    if info.num_classes != num_classes:
        raise DataError(
            f"{info.place or info.name} has {info.num_classes} classes, the network {num_classes}.", rule=rule
        )
    both = {tuple(class_names), info.class_names}
    # `class 3` is made up for a class without a name, and can be any class.
    if not all(any(not name.startswith("class ") for name in names) for names in both) or len(both) == 1:
        return
    # Folders of ImageNet have WordNet's numbers as names.
    if num_classes == IMAGENET_CLASSES and both == {imagenet_names(), imagenet_numbers()}:
        return
    raise DataError(
        f"The classes {format_list(info.class_names, _LISTED)} ({info.place or info.name}) are not those that the "
        f"model was trained on: {format_list(class_names, _LISTED)}.",
        rule=rule,
    )


def evaluation_set(config: Data, spec: ImageSpec, named: bool) -> DataSet:
    """Return the dataset whose validation part is to be evaluated, with the images prepared as `spec` says.

    Class folders without a training folder beside them are evaluated whole. `named`: the path was not given alone.
    """
    data = resolved_set(config) if not named else config
    path = Path(data.dataset_path).expanduser()
    if data.dataset != "folder" or split_folder(path, TRAIN_NAMES):
        found = find_set(data)
        refuse_other_classes(found.info(data), spec.num_classes, spec.class_names)
        opened = found.open(data, 0)
        return replace(opened, info=_evaluated_info(opened.info, spec, len(opened.validation)))
    listing = list_classes(path, spec.class_names or None, data.label_pattern)
    samples = FileSamples(listing.root, list(listing.files), listing.labels)
    return _whole(samples, listing.class_names, "folder", str(path), data, spec)


def _whole(
    samples: Samples, class_names: tuple[str, ...], name: str, place: str, data: Data, spec: ImageSpec
) -> DataSet:
    """Return samples as a dataset that has nothing else than a validation part."""
    bad = BadSamples(place or name, len(samples), data.max_bad_samples)
    source = decoded_source(samples, evaluation_view(data, spec.image_hwc[0], spec.image_hwc[2]), "validation", bad)
    info = DataInfo(
        name=name,
        image_hwc=spec.image_hwc,
        class_names=class_names,
        num_train=0,
        num_validation=len(source),
        augmentation="none",
        normalization=spec.normalization,
        channel_mean=spec.channel_mean,
        channel_std=spec.channel_std,
        place=place,
    )
    refuse_other_classes(info, spec.num_classes, spec.class_names)
    return DataSet(info=info, train=no_images(spec, spec.image_dtype or "uint8"), validation=source, bad=bad)


def images_to_predict(images: Any, image_hwc: tuple[int, int, int]) -> Labelled | Any:
    """Return pictures, or an array (or object) of images of one shape; one image alone becomes several."""
    if hasattr(images, "dtype"):
        array = array_of(images) if hasattr(images, "detach") else images
        is_one = tuple(array.shape) in (image_hwc, image_hwc[:2] if image_hwc[2] == 1 else ())
        return array_of(array)[None] if is_one else array
    if hasattr(images, "__len__") and isinstance(_first(images), np.ndarray):
        return images
    return images_alone(images)


def one_image(image: np.ndarray, image_hwc: tuple[int, int, int]) -> np.ndarray:
    """Return one image as the network takes it, bytes [H, W, C]; refuse anything else."""
    shaped = image[..., None] if image.ndim == 2 and image_hwc[2] == 1 else image
    if shaped.shape != image_hwc or shaped.dtype != np.uint8:
        raise DataError(
            f"The image is {image.dtype} [{', '.join(map(str, image.shape))}].",
            rule=f"One image as an array is uint8 [{', '.join(map(str, image_hwc))}], as the network takes it.",
            remedy="Give a file or a Pillow image, which are resized and cropped.",
        )
    return shaped


def picture_pixels(image: object, form: InputForm) -> np.ndarray:
    """Return a picture decoded, resized and cropped as validation does it."""
    pixels = np.zeros(form.image_hwc, np.uint8)
    try:
        read_sample(form, PictureSamples(images_alone(image)), pixels)
    except BadImage as error:
        raise DataError(f"The image cannot be read: {error}.") from None
    return pixels


def image_paths(images: Any) -> Sequence[Path] | None:
    """Return the paths of image files or folders, None where something else was given."""
    each = images if isinstance(images, list | tuple) else (images,)
    if not each or not all(isinstance(one, str | os.PathLike) for one in each):
        return None
    return [local_path(one).expanduser() for one in each]


def held_out(
    images: object, labels: object, fraction: object, class_names: tuple[str, ...]
) -> tuple[tuple[Any, Any], tuple[Any, Any], tuple[str, ...]]:
    """Return (images, labels) of training and of validation, a fraction of each class, and remarks on the split."""
    if not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise ConfigError(f"validation_split is {fraction!r}.", rule="It is a fraction between 0 and 1.")
    labels = np.asarray(labels)
    # By position, not by seed: every fit on these arrays validates on the same images.
    names = tuple(map(str, range(len(labels))))
    # Only numbers of classes are shared out by class.
    groups = labels if labels.ndim == 1 and labels.dtype.kind in "iu" else np.zeros(len(labels), np.int32)
    named = class_names if groups is labels else ("images",)
    found = hold_out(names, groups, float(fraction), named, "The data", "validation_data")
    mask = found.mask
    if isinstance(images, Labelled):
        parts = [images.take(np.flatnonzero(chosen)) for chosen in (~mask, mask)]
    else:
        array = np.asarray(images)
        parts = [array[~mask], array[mask]]
    return (parts[0], labels[~mask]), (parts[1], labels[mask]), found.remarks


def validation_folder(data: object) -> dict[str, Any]:
    """Return the option for validation data that is given beside the path of training data."""
    if data is None:
        return {}
    if not isinstance(data, str | os.PathLike):
        raise ConfigError(
            f"validation_data is a {type(data).__name__}, beside the path of a dataset.",
            rule="Beside a path it is a path too: a folder with one folder for each class.",
            remedy="Give a folder, or both parts as (images, labels).",
        )
    return {"validation_path": str(local_path(data).expanduser())}


def image_pair(data: object, known: Sequence[str] = ()) -> tuple[Any, Any]:
    """Return validation data as (images, labels)."""
    rule = "It is (images, labels), as the training data is."
    if isinstance(data, str | os.PathLike) or hasattr(data, "dtype"):
        raise ConfigError("validation_data is not a pair.", rule=rule)
    found = given_data(data, known=known)
    refuse_stream(found, "validation_data")
    if found.arrays is None:
        raise ConfigError("validation_data is not a pair.", rule=rule)
    return found.arrays


def validation_option(options: Mapping[str, object], has_data: bool) -> dict[str, Any]:
    """Return the option that turns validation off where there is nothing to validate with."""
    if options.get("validation") is True and not has_data:
        raise ConfigError(
            "validation is on, but there is no validation_data.", remedy="Give fit some, or leave it out."
        )
    return {} if has_data else {"validation": False}


def _evaluated_info(info: DataInfo, spec: ImageSpec, num_validation: int) -> DataInfo:
    if info.image_hwc != spec.image_hwc:
        raise DataError(
            f"The images of {info.name} are {shape_text(info.image_hwc)}, "
            f"the network takes {shape_text(spec.image_hwc)}."
        )
    return replace(
        info,
        num_validation=num_validation,
        normalization=spec.normalization or info.normalization,
        channel_mean=spec.channel_mean or info.channel_mean,
        channel_std=spec.channel_std or info.channel_std,
    )
