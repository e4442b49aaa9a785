"""A stream as the training part of a dataset, with validation data beside it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.config.schema import Config, Data
from headrace.core.errors import ConfigError, DataError
from headrace.data.dataset import DataSet, open_images
from headrace.data.decoding.image import BadImage
from headrace.data.decoding.image_source import decode_into
from headrace.data.decoding.resize import Scratch
from headrace.data.sets.arrays import ImageSpec, array_dataset, array_source
from headrace.data.sets.catalog import numbered_classes
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.image_views import training_view
from headrace.data.sets.objects import Item, PictureSamples, array_of, images_alone, is_picture
from headrace.data.sets.samples import Content
from headrace.data.sets.stream import Stream, stream_source
from headrace.plan.plan import Plan
from headrace.rows.tasks import CLASSIFICATION
from headrace.run.given_data import GivenData, given_data, image_pair, refuse_stream

STREAM = "stream"  # the name of such a dataset


def stream_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run on a stream: it has an order of its own."""
    if options.get("validation_split") is not None:
        raise ConfigError(
            "validation_split is given for a stream, which is read once.",
            remedy="Give validation_data: items with labels, a folder's images, or nothing.",
        )
    if options.get("shuffle"):
        raise ConfigError(
            "shuffle is on for a stream.",
            rule="A stream is read in its order; it is shuffled by its own buffer.",
            remedy="Give hr.Stream(..., shuffle=1000), and leave shuffle out.",
        )
    return {**options, "shuffle": False}


def streams_pictures(first: list[Item]) -> bool:
    """Say whether the items of a stream are pictures, to be decoded and resized."""
    return is_picture(first[0].image)


def picture_stream(stream: Stream, first: list[Item], held: object, config: Config, spec: ImageSpec) -> DataSet:
    """Return the dataset of a stream of pictures."""
    refuse_streamed(config.data)
    names = stream.class_names or spec.class_names or numbered_classes(stream.num_classes)
    given = given_data(held, known=names) if held is not None else GivenData()
    refuse_stream(given, "validation_data")
    found = given.pictures
    if held is not None and found is None:
        raise ConfigError(
            "The validation data are no pictures, those of training are.",
            rule="Both parts are Pillow images, paths or encoded bytes, or both are arrays.",
        )
    beside = images_alone([item.image for item in first])  # of which image_size is found
    beside = replace(beside, labels=np.zeros(len(first), np.int32))
    images = ImageSet(
        kind=STREAM,
        place="",
        class_names=names,
        train=PictureSamples(beside),
        validation=PictureSamples(found or beside.take(np.zeros(0, np.int64))),
        remarks=(_remark(stream),),
    )
    opened = open_images(images, config.data, config.run.seed)
    view, scratch = training_view(config.data, opened.info.image_hwc[0], config.run.seed), Scratch()

    def write(image: Any, place: int, epoch: int, out: np.ndarray) -> None:
        try:
            decode_into(_One(image), place, epoch, view, out, scratch)
        except BadImage as error:
            raise DataError(
                f"The image of item {place:,} of the stream cannot be read: {error}.",
                rule="A stream has no other image of its class to put in its place.",
                remedy="Leave such items out of the stream.",
            ) from None

    source = stream_source(stream, (view.size, view.size, view.channels), np.dtype(np.uint8), write, pictures=True)
    return _streamed(opened, source)


def refuse_streamed(data: Data) -> None:
    """Refuse labels that a stream has none of."""
    if data.task != CLASSIFICATION.name:
        raise ConfigError(
            f"task is {data.task}, and the data is a stream.",
            rule="The labels of a stream are classes.",
            remedy="Give arrays, or list the images with their labels (labels=FILE).",
        )


def array_stream(stream: Stream, first: list[Item], held: object, data: Data, spec: ImageSpec) -> DataSet:
    """Return the dataset of a stream of arrays of one shape."""
    refuse_streamed(data)
    shown = array_of(first[0].image)
    if spec.image_dtype == "" and spec.image_hwc != shown.shape:
        spec = replace(spec, image_hwc=tuple(shown.shape))
    spec = replace(spec, num_classes=stream.num_classes, class_names=stream.class_names or spec.class_names)
    if shown.dtype == np.uint8 and data.normalization in ("per-channel", "centred") and data.pixel_mean is None:
        raise ConfigError(
            f"normalization {data.normalization} needs the mean of all training images.",
            rule="A stream is not read to find it.",
            remedy="Give pixel_mean and pixel_std, or leave normalization out.",
        )
    array_source([shown], [0], spec)  # refuses what the network does not take

    def write(image: Any, place: int, epoch: int, out: np.ndarray) -> None:
        array = array_of(image)
        if array.shape != out.shape or array.dtype != out.dtype:
            raise DataError(
                f"The image of item {place:,} of the stream is {array.dtype}{list(array.shape)}, the first one is "
                f"{out.dtype}{list(out.shape)}.",
                rule="All images of a stream of arrays have one shape and one dtype.",
            )
        out[...] = array

    source = stream_source(stream, spec.image_hwc, shown.dtype, write, pictures=False)
    validation = array_source(*image_pair(held, spec.class_names), spec, "validation ") if held is not None else None
    opened = array_dataset(data, spec, source, validation)
    return _streamed(replace(opened, info=replace(opened.info, name=STREAM, remarks=(_remark(stream),))), source)


def refuse_repeats(plan: Plan, dataset: DataSet | None) -> None:
    """Refuse a plan that would ask a stream for an item twice in an epoch, or in several processes."""
    if dataset is None or dataset.train.begin is None:
        return
    needed, length = plan.steps.updates_per_epoch * plan.batch.global_batch_size, len(dataset.train)
    if needed > length:
        raise ConfigError(
            f"An epoch takes {needed:,} items, and the length of the stream is {length:,}.",
            rule="An item is read once in an epoch.",
            remedy=f"Give the stream length={needed}, or fewer steps_per_epoch.",
        )
    if plan.num_processes > 1:
        raise ConfigError(
            f"The data is a stream, and the job has {plan.num_processes} processes.",
            rule="Every process would have to read the whole stream.",
            remedy="Write the items as tar shards, or give an object with len(data) and data[i].",
        )


class _One:
    """An image as the samples that a decoder takes."""

    def __init__(self, image: Any) -> None:
        self._samples = PictureSamples(images_alone(image))
        self.labels = self._samples.labels

    def __len__(self) -> int:
        return 1

    def content(self, sample: int) -> Content:
        """Return the image, whatever its place is."""
        del sample
        return self._samples.content(0)

    def name(self, sample: int) -> str:
        """Return the place in the stream."""
        return f"item {sample}"


def _streamed(dataset: DataSet, source: Any) -> DataSet:
    # It varies: nothing of it is kept. How many images a class has is not known.
    info = replace(dataset.info, num_train=len(source), varies=True, train_counts=())
    return replace(dataset, train=source, info=info)


def _remark(stream: Stream) -> str:
    again = "reads" if stream.can_restart else "has to be given anew, and reads"
    return (
        f"the training data is a stream with an order of its own (shuffle buffer: {stream.shuffle:,} items), and a "
        f"resumed run {again} once more what comes before its step"
    )
