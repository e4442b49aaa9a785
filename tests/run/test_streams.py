"""Streams: what a run sees of one, beside the items themselves; resumed; and what is refused."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

import headrace as hr
from headrace.core.errors import ConfigError, DataError
from headrace.data.sets.stream import Stream, stream_source
from tests.data.image_files import encode, smooth
from tests.run.conftest import final_state

NUMBERS: dict[str, Any] = {"micro_batch_size": 8, "learning_rate": 0.1, "progress": "none"}


def pairs(count: int = 64) -> Iterator[tuple[np.ndarray, int]]:
    for number in range(count):
        yield np.full((32, 32, 1), number, np.uint8), number % 4


def read(stream: Stream, index: np.ndarray, epoch: int) -> tuple[list[int], list[int]]:
    """Return the first pixels and the labels of these places."""

    def write(image: np.ndarray, place: int, epoch: int, out: np.ndarray) -> None:
        out[...] = image

    source = stream_source(stream, (32, 32, 1), np.dtype(np.uint8), write, pictures=False)
    assert source.begin is not None
    source.begin(index, np.full(len(index), epoch))
    images = source.read(index, epoch)
    return images[:, 0, 0, 0].tolist(), source.labels[index].tolist()


def test_places_are_those_of_the_items():
    stream = hr.Stream(pairs, length=64, num_classes=4, shuffle=0)
    assert read(stream, np.arange(10, 20), 3) == (list(range(10, 20)), [number % 4 for number in range(10, 20)])
    # Threads ask for the places of a block in any order.
    assert read(stream, np.array([12, 10, 11]), 0)[0] == [12, 10, 11]


def test_the_buffer_gives_each_item_once_in_an_order_of_seed_and_epoch():
    orders = {}
    for seed, epoch in itertools.product((0, 1), (0, 1)):
        stream = hr.Stream(pairs, length=64, num_classes=4, shuffle=16, seed=seed)
        pixels, labels = read(stream, np.arange(64), epoch)
        assert sorted(pixels) == list(range(64))
        assert labels == [pixel % 4 for pixel in pixels]
        # An item is out at most 16 places before its own: what is not read yet cannot be drawn.
        assert all(pixel <= place + 16 for place, pixel in enumerate(pixels))
        assert read(stream, np.arange(40, 48), epoch)[0] == pixels[40:48], "the same when read from the middle"
        orders[seed, epoch] = tuple(pixels)
    assert len(set(orders.values())) == 4


def test_an_iterator_goes_on_from_epoch_to_epoch_and_is_used_once():
    stream = hr.Stream(pairs(64), length=30, num_classes=4, shuffle=0)
    stream.peek()  # what was looked at is not lost

    def write(image: np.ndarray, place: int, epoch: int, out: np.ndarray) -> None:
        out[...] = image

    source = stream_source(stream, (32, 32, 1), np.dtype(np.uint8), write, pictures=False)
    assert source.read(np.arange(28), 0)[:, 0, 0, 0].tolist() == list(range(28))
    assert source.read(np.arange(30), 1)[:, 0, 0, 0].tolist() == list(range(30, 60)), "28 and 29 were left out"
    with pytest.raises(DataError, match="Item 0 of the stream is asked for again"):
        source.read(np.arange(1), 0)
    with pytest.raises(DataError, match="The stream ended after 64 items, and item 4 of epoch 2 is needed"):
        source.read(np.arange(3, 5), 2)


def test_memory_is_that_of_a_block():
    """Of 1,000 items of 1 MB, those of two blocks are held at the most."""
    alive, most = 0, 0

    class Item:
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def items() -> Iterator[tuple[Any, int]]:
        return ((Item(), 0) for _ in range(1000))

    stream = hr.Stream(items, length=1000, num_classes=2, shuffle=50)
    source = stream_source(stream, (1, 1, 1), np.dtype(np.uint8), lambda *_: None, pictures=False)
    assert source.begin is not None
    for start in range(600, 1000, 20):
        block = np.arange(start, start + 20)
        source.begin(block, np.zeros(20, np.int64))
        source.read(block, 0)
    assert most <= 75


def test_a_run_on_a_stream_has_the_weights_of_one_on_the_items(tmp_path):
    digits = hr.read_digits()["train"]
    images, labels = digits.images[:256], digits.labels[:256]

    def items() -> Iterator[tuple[np.ndarray, int]]:
        return zip(images, labels, strict=True)

    states = []
    for data in (hr.Stream(items, length=256, num_classes=10, shuffle=0), (images, labels)):
        model = hr.Model("toy_model_bn", log_dir=str(tmp_path), **NUMBERS)
        more: dict[str, Any] = {} if isinstance(data, Stream) else {"shuffle": False}
        states.append(final_state(model.fit(data, epochs=2, **more).directory))
    assert states[0].keys() == states[1].keys()
    for name, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][name], err_msg=name)


def test_pictures_are_cropped_as_those_of_a_list_and_a_resumed_run_is_the_same(tmp_path):
    files = [encode(smooth(40 + number % 5, 50, seed=number)) for number in range(48)]
    items = [(file, ("ant", "bee")[number % 2]) for number, file in enumerate(files)]
    held = items[:8]
    options: dict[str, Any] = {"batch_size": 8, "image_size": 32, "train_crop": "torchvision", "progress": "none"}
    options |= {"learning_rate": 0.1, "log_dir": str(tmp_path), "normalization": "zero-one"}

    def fitted(data: Any, **more: Any) -> hr.RunResult:
        return hr.Model("toy_model_bn", **options).fit(data, validation_data=held, **more)

    stream = hr.Stream(items, class_names=("ant", "bee"), shuffle=0)
    assert (stream.length, stream.num_classes) == (48, 2)
    whole = fitted(stream, epochs=3)
    listed = fitted(items, epochs=3, shuffle=False)
    assert whole.metrics["val_loss"] == pytest.approx(listed.metrics["val_loss"])

    class Stop(hr.Callback):
        def on_epoch_end(self, event: hr.TrainingEvent) -> str | None:
            return "enough" if event.epoch >= 1 else None

    drawn = hr.Stream(items, class_names=("ant", "bee"), shuffle=20, seed=5)
    once = fitted(drawn, epochs=3)
    stopped = fitted(drawn, epochs=3, callbacks=[Stop()])
    assert stopped.outcome == "stopped"
    resumed = hr.Model("toy_model_bn", **options).fit(drawn, validation_data=held, epochs=3, resume=stopped.directory)
    before, after = final_state(once.directory), final_state(resumed.directory)
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)


def test_what_cannot_be_a_stream_is_refused_with_three_lines_that_work(tmp_path):
    with pytest.raises(ConfigError, match="The length of the stream is not known") as found:
        hr.Stream(pairs, num_classes=4)
    assert found.value.remedy.count("\n    model.fit(") == 3
    with pytest.raises(ConfigError, match="an unknown number of classes"):
        hr.Stream(pairs, length=64)
    with pytest.raises(ConfigError, match="The items of the stream are a int"):
        hr.Stream(4, length=3, num_classes=2)  # type: ignore[arg-type]
    stream = hr.Stream(pairs, length=64, num_classes=4)
    model = hr.Model("toy_model_bn", log_dir=str(tmp_path), **NUMBERS)
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"validation_split": 0.1}, "validation_split is given for a stream"),
        ({"shuffle": True}, "shuffle is on for a stream"),
        ({"steps_per_epoch": 9}, "An epoch takes 72 items, and the length of the stream is 64"),
        ({"validation_data": stream}, "validation_data is a Stream"),
        ({"normalization": "per-channel"}, "needs the mean of all training images"),
    )
    for options, message in refused:
        with pytest.raises(ConfigError, match=message):
            model.fit(stream, epochs=1, **options)
    with pytest.raises(ConfigError, match="The data is a Stream"):
        hr.Model("toy_model_bn", num_classes=4, input_shape=(32, 32, 1)).evaluate(stream)
    assert not list(tmp_path.iterdir()), "before anything is written"


def test_a_stream_that_ends_or_fails_stops_the_run(tmp_path):
    model = hr.Model("toy_model_bn", log_dir=str(tmp_path), **NUMBERS)

    def failing() -> Iterator[tuple[np.ndarray, int]]:
        yield from pairs(40)
        raise OSError("the camera is gone")

    for items, message in (
        (lambda: pairs(40), "The stream ended after 40 items"),
        (failing, r"The stream failed after 40 items: OSError\('the camera is gone'\)"),
        (lambda: ((image, 7) for image, _ in pairs()), "A label of the stream is 7"),
        (lambda: ((image[:, : 28 + label], label) for image, label in pairs()), "The image of item 1 of the stream is"),
    ):
        with pytest.raises(DataError, match=message):
            model.fit(hr.Stream(items, length=64, num_classes=4, shuffle=0), epochs=1)


def test_a_broken_picture_of_a_stream_is_named(tmp_path):
    file = encode(smooth(40, 50))
    stream = hr.Stream([(file, 0), (file[:200], 1)] * 8, num_classes=2, shuffle=0)
    with pytest.raises(DataError, match=r"The image of item \d+ of the stream cannot be read"):
        hr.Model("toy_model_bn", log_dir=str(tmp_path), image_size=32, **NUMBERS).fit(stream, epochs=1)


def test_images_of_pillow_are_streamed(tmp_path):
    items = [(Image.fromarray(smooth(40, 50, seed=number)), number % 2) for number in range(16)]
    model = hr.Model("toy_model_bn", log_dir=str(tmp_path), image_size=32, **NUMBERS)
    assert model.fit(hr.Stream(items, num_classes=2), epochs=1).outcome == "finished"


def test_a_streamed_dataset_of_hugging_face_states_its_length_and_classes(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee"])})
    rows = {"image": [Image.fromarray(smooth(40, 50, seed=k)) for k in range(16)], "label": [k % 2 for k in range(16)]}
    table = datasets.Dataset.from_dict(rows, features=features)
    stream = hr.Stream(table.to_iterable_dataset(), length=16, shuffle=4)
    assert (stream.class_names, stream.num_classes) == (("ant", "bee"), 2)
    model = hr.Model("toy_model_bn", log_dir=str(tmp_path), image_size=32, **NUMBERS)
    assert model.fit(stream, epochs=2).outcome == "finished"
