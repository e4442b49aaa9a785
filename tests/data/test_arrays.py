"""Data that code gives: taken as it is, preprocessed as bytes are, and refused where it cannot be right."""

import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.core.errors import ConfigError, DataError
from headrace.data.feeding.block_reader import feed_options
from headrace.data.feeding.eval_feed import EvalFeed
from headrace.data.feeding.feed import CallSpans, TrainFeed
from headrace.data.feeding.fetch import fetch
from headrace.data.feeding.order import StepShape, epoch_order
from headrace.data.sets.arrays import ImageSpec, array_dataset, array_source, channel_moments, check_class_names

SPEC = ImageSpec(image_hwc=(4, 5, 3), num_classes=7)
LABELS = np.arange(10) % 7


def images_of(dtype, count=10):
    rng = np.random.default_rng(3)
    return (
        rng.integers(0, 256, (count, 4, 5, 3), np.uint8)
        if dtype == "uint8"
        else rng.normal(size=(count, 4, 5, 3)).astype(np.float32)
    )


class OneByOne:
    """The smallest object that gives images."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        return self.images[number]


def data_of(**options):
    return config_from(options).data


def train_batches(source, data, num_devices=1):
    """Return the images of the first epoch as the network sees them, with the order they came in."""
    info = array_dataset(data, SPEC, source, None).info
    options = feed_options(data, info, 0, num_devices)
    shape = StepShape(
        seed=0,
        num_samples=10,
        shuffle=True,
        updates_per_epoch=2,
        gradient_accumulation_count=1,
        num_replicas=1,
        micro_batch_size=5,
    )
    feed = TrainFeed(source, shape, CallSpans(first_step=0, last_step=2, max_steps=2), options, lambda tree, kind: tree)
    block = feed.next()
    seen = [
        np.asarray(
            fetch(
                feed.resident,
                {k: v[i, 0] if k not in ("epoch", "seed") else v[i] for k, v in block.items()},
                options.preprocess,
                train=True,
            )[0]
        )
        for i in range(2)
    ]
    feed.close()
    return np.concatenate(seen), epoch_order(0, 0, 10, True)


@pytest.mark.parametrize("cache", ["device", "host"])
@pytest.mark.parametrize("wrap", [np.asarray, OneByOne, list])
def test_float_images_reach_the_network_unchanged(cache, wrap):
    images = images_of("float32")
    source = array_source(wrap(images), LABELS, SPEC)
    seen, order = train_batches(source, data_of(dataset_cache=cache))
    np.testing.assert_array_equal(seen, images[order])


@pytest.mark.parametrize("cache", ["device", "host"])
def test_byte_images_become_zero_to_one_unless_asked_otherwise(cache):
    images = images_of("uint8")
    source = array_source(images, LABELS, SPEC)
    seen, order = train_batches(source, data_of(dataset_cache=cache))
    np.testing.assert_allclose(seen, images[order] / 255, rtol=1e-6)
    seen, _ = train_batches(source, data_of(dataset_cache=cache, normalization="per-channel"))
    scaled = images.astype(np.float64) / 255
    normal = (scaled - scaled.mean((0, 1, 2))) / scaled.std((0, 1, 2))
    np.testing.assert_allclose(seen, normal[order], rtol=1e-4, atol=1e-5)


def test_float_images_can_be_flipped():
    images = images_of("float32")
    seen, order = train_batches(array_source(images, LABELS, SPEC), data_of(train_augmentation="flip"))
    flipped = images[order][:, :, ::-1]
    same = (seen == images[order]).all((1, 2, 3))
    assert ((seen == flipped).all((1, 2, 3)) | same).all()
    assert 0 < same.sum() < 10


def test_evaluation_counts_every_image_once():
    images = images_of("float32")
    data = data_of(dataset_cache="host")
    source = array_source(OneByOne(images), LABELS, SPEC)
    options = feed_options(data, array_dataset(data, SPEC, None, source).info, 0, 1)
    feed = EvalFeed(source, 4, 2, options, lambda tree, kind: tree)
    blocks = list(feed)
    feed.close()
    counted = np.concatenate([block["images"][block["mask"] > 0] for block in blocks])
    np.testing.assert_array_equal(counted, images)


def test_the_moments_of_channels():
    images = images_of("uint8", 1500)
    mean, std = channel_moments(array_source(images, np.arange(1500) % 7, SPEC))
    np.testing.assert_allclose(mean, images.mean((0, 1, 2)) / 255)
    np.testing.assert_allclose(std, images.std((0, 1, 2)) / 255)
    with pytest.raises(DataError, match="Channel 2 has the same value"):
        channel_moments(array_source(images * np.array([1, 1, 0], np.uint8), np.arange(1500) % 7, SPEC))


@pytest.mark.parametrize(
    ("images", "labels", "told"),
    [
        (images_of("float32").astype(np.float64), LABELS, "float64.*astype"),
        (images_of("uint8").astype(np.int32), LABELS, "int32"),
        (images_of("uint8")[:, :, :, 0], LABELS, "4x5, the network takes 4x5x3"),
        (images_of("uint8")[:, :3], LABELS, "3x5x3, the network takes 4x5x3"),
        (images_of("uint8")[:0], LABELS[:0], "no images"),
        (images_of("uint8"), LABELS[:9], "10 images, but 9 labels"),
        (images_of("uint8"), LABELS + 1, "Label 7 of image 6 is out of range .so are 0 others"),
        (images_of("uint8"), LABELS - 1, "Label -1 of image 0"),
        (images_of("uint8"), LABELS.astype(np.float32), "labels are float32"),
        (images_of("uint8"), np.eye(7)[LABELS], "argmax"),
        (images_of("uint8"), np.eye(9)[LABELS], "argmax"),
        (images_of("uint8"), LABELS[:, None], r"labels\[:, 0\]"),
        (images_of("uint8"), LABELS.astype(str), "np.unique"),
        ("images.npy", LABELS, "are a str"),
        (images_of("uint8").astype(str), LABELS, "<U"),
    ],
)
def test_what_cannot_be_right_is_refused(images, labels, told):
    with pytest.raises(DataError, match=told):
        array_source(images, labels, SPEC)


def test_one_channel_needs_its_dim():
    with pytest.raises(DataError, match="None"):
        array_source(np.zeros((2, 8, 8), np.uint8), [0, 1], ImageSpec(image_hwc=(8, 8, 1), num_classes=2))


def test_an_image_unlike_the_first_is_named():
    images = [np.zeros((4, 5, 3), np.uint8)] * 9 + [np.zeros((4, 4, 3), np.uint8)]
    source = array_source(images, LABELS, SPEC)
    with pytest.raises(DataError, match="Image 9 is uint8"):
        source.read(np.arange(10), 0)


def test_options_that_do_not_go_with_float_images_are_refused():
    source = array_source(images_of("float32"), LABELS, SPEC)
    with pytest.raises(ConfigError, match="normalization zero-one"):
        array_dataset(data_of(normalization="zero-one"), SPEC, source, None)
    data = data_of(eight_bit_transfer=True)
    with pytest.raises(ConfigError, match="eight_bit_transfer is on"):
        feed_options(data, array_dataset(data, SPEC, source, None).info, 0, 1)


def test_data_unlike_that_of_the_training_is_refused():
    trained = ImageSpec(image_hwc=(4, 5, 3), num_classes=7, image_dtype="uint8")
    with pytest.raises(DataError, match="trained on were uint8"):
        array_source(images_of("float32"), LABELS, trained)
    source = array_source(images_of("uint8"), LABELS, SPEC)
    with pytest.raises(DataError, match="per-channel needs the mean"):
        array_dataset(data_of(normalization="per-channel"), SPEC, None, source)
    with pytest.raises(DataError, match="2 names"):
        check_class_names(("a", "b"), 7)


def refusal_of(images: object) -> str:
    spec = ImageSpec(image_hwc=(4, 4, 1), num_classes=2)
    with pytest.raises(DataError) as error:
        array_source(images, [0, 1], spec)
    return str(error.value)


def test_whole_numbers_are_to_be_given_as_uint8() -> None:
    """As float32 they would reach the network as 0 to 255, and later pictures, which are uint8, would be refused."""
    pixels = np.arange(32).reshape(2, 4, 4, 1) * 8
    assert "images are int64 from 0 to 248" in refusal_of(pixels)
    for images in (pixels, pixels.astype(np.uint16), list(pixels), pixels.tolist()):
        assert "Convert them: images.astype(np.uint8)." in refusal_of(images)
    source = array_source(pixels.astype(np.uint8), [0, 1], ImageSpec(image_hwc=(4, 4, 1), num_classes=2))
    assert np.array_equal(source.read(np.arange(2), 0), pixels), "the remedy keeps the pixels"


def test_whole_numbers_beyond_a_byte_are_to_be_scaled() -> None:
    for scale, shift, words in ((2, 0, "int64 from 0 to 496"), (1, -1, "int64 from -1 to 247")):
        told = refusal_of(np.arange(32).reshape(2, 4, 4, 1) * 8 * scale + shift)
        assert words in told
        assert "Scale them to 0 to 255 and give uint8" in told
        assert "astype(np.uint8)" not in told, "which would wrap around"


def test_other_dtypes_have_remedies_of_their_own() -> None:
    assert "images.astype(np.uint8) * 255" in refusal_of(np.zeros((2, 4, 4, 1), bool))
    assert "images.astype(np.float32)" in refusal_of(np.zeros((2, 4, 4, 1), np.float64))
    assert "remedy" not in refusal_of(np.zeros((2, 4, 4, 1), "S1"))
