"""Preprocessing against a plain loop over samples and pixels, on the host and on the device."""

import itertools
import zlib
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
import pytest

from headrace.config.schema import Augment
from headrace.core.errors import ConfigError
from headrace.data.augmentation.erase import rectangles
from headrace.data.augmentation.preprocess import Preprocess, draw_offsets, preprocess, preprocess_spec
from headrace.data.dataset import describe_dataset

AUGMENTATIONS = ("none", "flip", "crop", "flip-crop")
NORMALIZATIONS = ("per-image", "per-channel", "centred", "zero-one", "none")
MEAN, STD = (0.4, 0.5, 0.45), (0.2, 0.3, 0.25)


def spec(augmentation: str = "flip-crop", normalization: str = "per-image", hwc: Any = (9, 12, 3)) -> Preprocess:
    return Preprocess(
        augmentation=augmentation,
        normalization=normalization,
        mean=MEAN[: hwc[2]],
        std=STD[: hwc[2]],
        seed=17,
        image_hwc=hwc,
    )


def some_images(count: int, hwc: tuple[int, int, int]) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, *hwc), np.uint8)


def mixed(word: int) -> int:
    """Scramble as murmur3's finaliser does, on Python's whole numbers."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = ((word ^ word >> shift) * factor) % 2**32
    return word ^ word >> 16


def moves_of(seed: int, epoch: int, sample: int) -> tuple[int, int, bool]:
    """Draw by the written rule: a chain of scrambles over (seed, epoch, sample, crc32 of `augment`)."""
    word = 0
    for part in (seed, epoch, sample, zlib.crc32(b"augment")):
        word = mixed(((word ^ part) * 0x9E3779B9 + 0x9E3779B9) % 2**32)
    return (word % 2**15) * 9 // 2**15, (word // 2**15 % 2**15) * 9 // 2**15, word >= 2**31


def normalised(image: np.ndarray, how: str) -> np.ndarray:
    pixels = image.astype(np.float64)
    if how == "per-image":
        return (pixels - pixels.mean()) / max(pixels.std(), 1 / np.sqrt(pixels.size))
    if how == "centred":
        return pixels - 255 * np.array(MEAN[: image.shape[2]])
    if how == "per-channel":
        return (pixels / 255 - MEAN[: image.shape[2]]) / STD[: image.shape[2]]
    return pixels / 255 if how == "zero-one" else pixels


def plain_loop(images: np.ndarray, index: Any, epoch: int, how: Preprocess) -> np.ndarray:
    """Normalise, flip, pad and crop one image after the other, one pixel after the other."""
    results = []
    for image, sample in zip(images, index, strict=True):
        down, right, flip = moves_of(int(how.seed), epoch, int(sample))
        pixels = normalised(image, how.normalization)
        height, width, channels = pixels.shape
        if flip and "flip" in how.augmentation:
            pixels = np.array([[pixels[y, width - 1 - x] for x in range(width)] for y in range(height)])
        if "crop" in how.augmentation:
            padded = np.zeros((height + 8, width + 8, channels))
            for y in range(height):
                for x in range(width):
                    padded[y + 4, x + 4] = pixels[y, x]
            pixels = np.array([[padded[y + down, x + right] for x in range(width)] for y in range(height)])
        results.append(pixels)
    return np.array(results)


@pytest.mark.parametrize(
    ("augmentation", "hwc"), [*((each, (9, 12, 3)) for each in AUGMENTATIONS), ("flip-crop", (6, 5, 1))]
)
def test_against_the_loop(augmentation: str, hwc: Any) -> None:
    images, index = some_images(24, hwc), np.arange(100, 124, dtype=np.int32)
    ways = {how: spec(augmentation, how, hwc) for how in NORMALIZATIONS}  # all in one program, which is soon compiled
    on_device = jax.jit(lambda x, i, e: {name: preprocess(x, i, e, how, True) for name, how in ways.items()})
    for name, device in on_device(images, index, np.uint32(5)).items():
        expected = plain_loop(images, index, 5, ways[name])
        host = preprocess(images, index, 5, ways[name], True)
        assert isinstance(host, np.ndarray)
        assert host.dtype == device.dtype == np.float32
        scale = 1e-4 if name in ("none", "centred") else 3e-6
        assert np.abs(host - expected).max() <= scale, name
        assert np.abs(np.asarray(device) - expected).max() <= scale, name


def test_alternating_flips() -> None:
    """The first epoch by the written draw, from then on the other way in each; crops are those of the usual flips."""
    how, usual = replace(spec(), changes=Augment(alternating_flip=True)), spec()
    index = np.arange(2000, dtype=np.int32)

    def first(sample: int) -> bool:
        word = 0
        for part in (int(how.seed), 0, sample, zlib.crc32(b"alternating_flip")):
            word = mixed(((word ^ part) * 0x9E3779B9 + 0x9E3779B9) % 2**32)
        return word >= 2**31

    expected = np.array([first(int(each)) for each in index])
    assert abs(expected.mean() - 0.5) < 0.04
    on_device = jax.jit(lambda i, e: draw_offsets(i, e, how))
    for epoch in (0, 1, 2, 7):
        *crop, flip = draw_offsets(index, epoch, how)
        np.testing.assert_array_equal(flip, expected ^ bool(epoch % 2))
        np.testing.assert_array_equal(crop, draw_offsets(index, epoch, usual)[:2])
        np.testing.assert_array_equal(on_device(index, np.uint32(epoch))[2], flip)
    epochs = index.astype(np.uint32) % 5  # one for each sample, as where a block holds two epochs
    for found in (draw_offsets(index, epochs, how)[2], on_device(index, epochs)[2]):
        np.testing.assert_array_equal(found, expected ^ (epochs % 2 == 1))
    # The images of two epochs running: one is the mirror image of the other.
    images = some_images(4, (6, 8, 3))
    flipped = replace(spec("flip", "none", (6, 8, 3)), changes=Augment(alternating_flip=True))
    even, odd = (preprocess(images, index[:4], epoch, flipped, True) for epoch in (4, 5))
    np.testing.assert_array_equal(even, odd[:, :, ::-1])


def test_alternating_flips_are_refused_without_flips(tiny_config) -> None:
    config = tiny_config(alternating_flip=True, train_augmentation="crop")
    with pytest.raises(ConfigError, match="alternating_flip is on, but train_augmentation is crop"):
        preprocess_spec(config.data, config.augment, describe_dataset(config.data), 0)


def test_evaluation_normalises_only() -> None:
    images, how = some_images(5, (9, 12, 3)), spec()
    expected = np.array([normalised(image, "per-image") for image in images])
    evaluate = partial(preprocess, index=np.arange(5, dtype=np.int32), epoch=0, spec=how, train=False)
    for values in (evaluate(images), jax.jit(evaluate)(images)):
        assert np.abs(np.asarray(values) - expected).max() <= 3e-6


def test_a_flat_image_becomes_zeros_and_a_nearly_flat_one_is_held_down() -> None:
    images = np.full((2, 8, 8, 1), 90, np.uint8)
    images[1, 0, 0] = 91
    values = preprocess(images, np.arange(2, dtype=np.int32), 0, spec("none", "per-image", (8, 8, 1)), True)
    assert not values[0].any()
    assert images[1].std() < 1 / np.sqrt(64)
    assert values[1, 0, 0, 0] == pytest.approx((1 - 1 / 64) * 8, rel=1e-6)


def test_the_padding_is_zero_after_normalisation() -> None:
    images = np.full((200, 8, 8, 1), 255, np.uint8)
    values = preprocess(images, np.arange(200, dtype=np.int32), 0, spec("crop", "zero-one", (8, 8, 1)), True)
    down, right, _ = draw_offsets(np.arange(200), 0, spec())
    inside = (8 - np.abs(down - 4)) * (8 - np.abs(right - 4))
    assert (values.sum((1, 2, 3)) == inside).all()
    assert set(np.unique(values)) == {np.float32(0), np.float32(1)}


@pytest.mark.parametrize(("fill", "mode"), [("zero", "constant"), ("reflect", "reflect")])
def test_the_size_of_the_padding_and_what_fills_it(fill: str, mode: Literal["constant", "reflect"]) -> None:
    images = some_images(60, (9, 12, 3))
    how = replace(spec("flip-crop", "zero-one"), crop_padding=2, reflect=fill == "reflect")
    index = np.arange(60, dtype=np.int32)
    down, right, flip = draw_offsets(index, 1, how)
    assert {*down} == {*right} == set(range(5))
    padded = np.pad(images / 255, ((0, 0), (2, 2), (2, 2), (0, 0)), mode=mode)
    for values in (
        preprocess(images, index, 1, how, True),
        jax.jit(lambda x, i: preprocess(x, i, 1, how, True))(images, index),
    ):
        for at in index:
            view = padded[at][:, ::-1] if flip[at] else padded[at]
            np.testing.assert_allclose(values[at], view[down[at] : down[at] + 9, right[at] : right[at] + 12], atol=1e-6)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    images, how = some_images(40, (9, 12, 3)), spec()
    index = np.arange(40, dtype=np.int32) * 7
    whole = preprocess(images, index, 3, how, True)
    order = np.random.default_rng(0).permutation(40)
    assert (preprocess(images[order], index[order], 3, how, True) == whole[order]).all()
    for at in range(40):
        assert (preprocess(images[at : at + 1], index[at : at + 1], 3, how, True) == whole[at : at + 1]).all()
    device = jax.jit(lambda x, i: preprocess(x, i, 3, how, True))
    assert np.abs(np.asarray(device(images[order], index[order])) - whole[order]).max() <= 2e-6


def test_epochs_can_be_given_per_image() -> None:
    images, how = some_images(30, (9, 12, 3)), spec()
    index, epoch = np.arange(30, dtype=np.int32), np.arange(30, dtype=np.uint32) % 4
    together = preprocess(images, index, epoch, how, True)
    for each in range(4):
        rows = epoch == each
        assert (together[rows] == preprocess(images[rows], index[rows], each, how, True)).all()


def test_whole_numbers_in_float32_give_the_same() -> None:
    """Without 8-bit transfer the bytes arrive as float32 and are preprocessed just so."""
    images, how = some_images(10, (9, 12, 3)), spec()
    index = np.arange(10, dtype=np.int32)
    assert (preprocess(images.astype(np.float32), index, 1, how, True) == preprocess(images, index, 1, how, True)).all()


def test_draws_are_uniform_and_independent() -> None:
    count = 90_000
    down, right, flip = draw_offsets(np.arange(count), 2, spec())
    assert flip.mean() == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(count))
    cells = np.zeros((9, 9, 2))
    np.add.at(cells, (down, right, flip.astype(int)), 1)
    expected = count / cells.size
    assert ((cells - expected) ** 2 / expected).sum() < 161 + 5 * np.sqrt(2 * 161)  # chi-squared, every cell occurs


def test_draws_differ_between_epochs_and_seeds() -> None:
    how, index = spec(), np.arange(5000)
    first = np.stack(draw_offsets(index, 0, how))
    for other in (draw_offsets(index, 1, how), draw_offsets(index, 0, replace(how, seed=18))):
        same = (first == np.stack(other)).all(0).mean()
        assert same == pytest.approx(1 / 162, abs=0.006)


def test_host_and_device_draw_alike() -> None:
    index = np.arange(1000, dtype=np.int32)
    host = draw_offsets(index, 7, spec())
    device = jax.jit(lambda i, e: draw_offsets(i, e, spec()))(index, np.uint32(7))
    for ours, theirs in zip(host, device, strict=True):
        assert (ours == np.asarray(theirs)).all()
    assert [moves_of(17, 7, sample) for sample in range(1000)] == list(
        zip(host[0].tolist(), host[1].tolist(), host[2].tolist(), strict=True)
    )


def test_large_images_keep_their_statistics() -> None:
    """A sum over 150,528 bytes must not lose digits: compare with float64."""
    images = np.random.default_rng(1).integers(200, 256, (2, 224, 224, 3)).astype(np.uint8)
    how = spec("none", "per-image", (224, 224, 3))
    expected = np.array([normalised(image, "per-image") for image in images])
    train = partial(preprocess, index=np.arange(2, dtype=np.int32), epoch=0, spec=how, train=True)
    for values in (train(images), jax.jit(train)(images)):
        assert np.abs(np.asarray(values) - expected).max() < 2e-4


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
def test_larger_images_are_cropped_at_random_or_in_the_centre(augmentation: str) -> None:
    """From 14 x 17 pixels 9 x 12 are cut out: 6 x 6 places for training where crops are asked for, else the middle."""
    images, how = some_images(600, (14, 17, 3)), spec(augmentation, "none")
    index = np.arange(600, dtype=np.int32)
    trained = preprocess(images, index, 1, how, True)
    device = jax.jit(lambda x, i, e: preprocess(x, i, e, how, True))(images, index, np.uint32(1))
    assert (np.asarray(device) == trained).all()
    assert (preprocess(images, index, 1, how, False) == images[:, 2:11, 2:14]).all()
    places = set()
    for image, found in zip(images, trained, strict=True):
        views = {
            (y, x, flip): view[:, ::-1] if flip else view
            for y in range(6)
            for x in range(6)
            for flip in (False, True)
            for view in (image[y : y + 9, x : x + 12],)
        }
        (place,) = (place for place, view in views.items() if (view == found).all())
        places.add(place)
    crops, flips = "crop" in augmentation, "flip" in augmentation
    centre = {(2, 2), (2, 3)} if flips else {(2, 2)}  # 5 to spare are 2 and 3, the other way round in a mirror
    assert {(y, x) for y, x, _ in places} == ({(y, x) for y in range(6) for x in range(6)} if crops else centre)
    assert {flip for _, _, flip in places} == ({False, True} if flips else {False})


@pytest.mark.parametrize("places", [(9, 9), (1, 1), (2, 5), (33, 4)])
def test_every_offset_that_is_possible_occurs_and_none_outside(places: tuple[int, int]) -> None:
    down, right, flip = draw_offsets(np.arange(20_000), 5, spec(), places)
    assert {*zip(down.tolist(), right.tolist(), strict=True)} == {*itertools.product(*map(range, places))}
    assert {*flip.tolist()} == {True, False}


def test_an_image_cropped_from_a_larger_one_comes_from_every_place() -> None:
    """The image's pixels say where they are: every corner that fits is met, and no pixel comes from outside."""
    rows, columns = np.mgrid[0:8, 0:7].astype(np.uint8)
    images = np.broadcast_to(np.stack([rows, columns, rows], 2), (4000, 8, 7, 3))
    how = replace(spec(), image_hwc=(5, 6, 3), augmentation="crop", normalization="none")
    seen = preprocess(images, np.arange(4000), 1, how, train=True)
    corners = {*map(tuple, seen[:, 0, 0, :2].astype(int).tolist())}
    assert corners == {*itertools.product(range(8 - 5 + 1), range(7 - 6 + 1))}
    assert (seen[:, :, :, 0] - seen[:, :1, :, 0] == np.arange(5)[None, :, None]).all()


def test_erased_rectangles_are_everywhere_in_the_image() -> None:
    hw = (10, 12)
    _, top, left, height, width = rectangles(np.arange(60_000), 3, 1.0, 4, hw)
    assert ((top >= 0) & (left >= 0) & (top + height <= hw[0]) & (left + width <= hw[1])).all()
    for box in {*zip(height.tolist(), width.tolist(), strict=True)}:
        chosen = (height == box[0]) & (width == box[1])
        possible = {*itertools.product(range(hw[0] - box[0] + 1), range(hw[1] - box[1] + 1))}
        if chosen.sum() > 25 * len(possible):
            assert {*zip(top[chosen].tolist(), left[chosen].tolist(), strict=True)} == possible
