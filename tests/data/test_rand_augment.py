"""RandAugment against Pillow's operations applied image by image, in the plain order."""

from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from headrace.config.load import config_from
from headrace.config.schema import Augment
from headrace.core.errors import ConfigError
from headrace.data.augmentation.apply_policy import change_colors, source_pixels
from headrace.data.augmentation.operations import RANGES
from headrace.data.augmentation.policies import RandAugment, policy_of
from headrace.data.augmentation.preprocess import Preprocess, preprocess, preprocess_spec
from headrace.data.dataset import describe_dataset

COLORS, MOVES = RANGES["usual"].colors, RANGES["usual"].moves
HW = (32, 40)
SIZE = (40, 32)  # as Pillow has it
RNG = np.random.default_rng(0)


def how(*operations: str, count: int = 1, magnitude: float = 9.0, **options: float) -> RandAugment:
    given: dict[str, Any] = {f"rand_augment_{name}": value for name, value in options.items()}
    augment = Augment(rand_augment=count, rand_augment_magnitude=magnitude, rand_augment_operations=operations, **given)
    found = policy_of(augment, 11)
    assert isinstance(found, RandAugment)
    return found


def random_images(count: int, channels: int = 3) -> np.ndarray:
    """Smooth noise: neighbours are alike, so that half a pixel's difference is a small one."""
    small = RNG.integers(0, 256, (count, 5, 6, channels)).astype(np.uint8)
    resized = [[Image.fromarray(each[..., c]).resize(SIZE, 3) for c in range(channels)] for each in small]
    return np.stack([np.stack([np.asarray(plane) for plane in planes], -1) for planes in resized])


LEVEL = 9 / 30
THEIRS: dict[str, Any] = {
    "identity": lambda im, sign: im,
    "brightness": lambda im, sign: ImageEnhance.Brightness(im).enhance(1 + sign * 0.9 * LEVEL),
    "contrast": lambda im, sign: ImageEnhance.Contrast(im).enhance(1 + sign * 0.9 * LEVEL),
    "color": lambda im, sign: ImageEnhance.Color(im).enhance(1 + sign * 0.9 * LEVEL),
    "sharpness": lambda im, sign: ImageEnhance.Sharpness(im).enhance(1 + sign * 0.9 * LEVEL),
    "posterize": lambda im, sign: ImageOps.posterize(im, 8 - round(4 * LEVEL)),
    "solarize": lambda im, sign: ImageOps.solarize(im, 179),
    "autocontrast": lambda im, sign: ImageOps.autocontrast(im),
    "invert": lambda im, sign: ImageOps.invert(im),
    "equalize": lambda im, sign: ImageOps.equalize(im),
}


def test_every_operation_is_in_one_table() -> None:
    assert set(THEIRS) - {"identity"} == set(COLORS)
    assert not set(COLORS) & set(MOVES)
    assert "equalize" not in how().operations
    assert len(how().operations) == 14


def test_colours_against_pillow_layer_by_layer() -> None:
    spec = how(*THEIRS, count=2)
    images, index = random_images(60), RNG.permutation(9999)[:60].astype(np.int32)
    found = change_colors(images.astype(np.float32), index, 4, spec)
    device = np.asarray(
        jax.jit(lambda x, i, e: change_colors(x, i, e, spec))(images.astype(np.float32), index, np.uint32(4))
    )
    layers = [spec.choose(index, 4, layer) for layer in range(2)]
    for n in range(60):
        image = Image.fromarray(images[n])
        for number, negative in layers:
            image = THEIRS[spec.operations[number[n]]](image, -1 if negative[n] else 1)
        names = [spec.operations[number[n]] for number, _ in layers]
        difference = np.abs(np.asarray(image).astype(int) - found[n].astype(int))
        # a level more or less may come to the other side of a step of a second operation
        assert np.median(difference) <= 1, names
        assert (difference <= 8).mean() > 0.98, names
    assert (found == device).mean() > 0.999


def plain_move(name: str, sign: int, hw: tuple[int, int]) -> np.ndarray:
    """Return the 2 x 3 matrix from a place to where its pixel comes from, about the centre, in floating point."""
    height, width = hw
    level = sign * LEVEL
    a, b, c, d, e, f = {
        "shear_x": (1, 0.3 * level, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, 0.3 * level, 1, 0),
        "translate_x": (1, 0, np.trunc(150 / 331 * width * level), 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, np.trunc(150 / 331 * height * level)),
        "rotate": (
            np.cos(np.pi / 6 * level),
            -np.sin(np.pi / 6 * level),
            0,
            np.sin(np.pi / 6 * level),
            np.cos(np.pi / 6 * level),
            0,
        ),
    }[name]
    return np.array([[a, b, c], [d, e, f], [0, 0, 1]], float)


def test_moves_against_matrices() -> None:
    spec = how(*MOVES, count=2)
    index = np.arange(40, dtype=np.int32)
    rows, columns = source_pixels(index, 1, spec, HW)
    device = jax.jit(lambda i, e: source_pixels(i, e, spec, HW))(index, np.uint32(1))
    assert (np.asarray(device[0]) == rows).all()
    assert (np.asarray(device[1]) == columns).all()
    layers = [spec.choose(index, 1, layer) for layer in range(2)]
    y, x = np.meshgrid(np.arange(HW[0]) + 0.5 - HW[0] / 2, np.arange(HW[1]) + 0.5 - HW[1] / 2, indexing="ij")
    for n in range(40):
        first, second = (
            plain_move(spec.operations[number[n]], -1 if negative[n] else 1, HW) for number, negative in layers
        )
        place = np.stack([x, y, np.ones_like(x)])
        source = np.einsum("ij,jhw->ihw", first @ second, place)
        assert np.abs(source[1] + HW[0] / 2 - (rows[n] + 0.5)).max() <= 0.53
        assert np.abs(source[0] + HW[1] / 2 - (columns[n] + 0.5)).max() <= 0.53


@pytest.mark.parametrize("name", list(MOVES))
def test_moves_against_pillow(name: str) -> None:
    """The whole way: a moved image is Pillow's transform of it with the nearest pixel, and zero outside."""
    spec = Preprocess(
        augmentation="none",
        normalization="none",
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        seed=11,
        image_hwc=(*HW, 3),
        policy=how(name),
    )
    images, index = random_images(8), np.arange(8, dtype=np.int32)
    found = preprocess(images, index, 0, spec, True)
    _, negative = how(name).choose(index, 0, 0)
    assert len(set(negative.tolist())) == 2
    for n in range(8):
        matrix = plain_move(name, -1 if negative[n] else 1, HW)
        to_centre = np.array([[1, 0, -HW[1] / 2], [0, 1, -HW[0] / 2], [0, 0, 1]])
        matrix = np.linalg.inv(to_centre) @ matrix @ to_centre
        moved = Image.fromarray(images[n]).transform(SIZE, Image.Transform.AFFINE, matrix[:2].ravel().tolist(), 0)
        assert (np.asarray(moved) == found[n]).all(-1).mean() > 0.97
    if name == "rotate":  # counter-clockwise, as Pillow turns
        turned = Image.fromarray(images[0]).rotate((-1 if negative[0] else 1) * 9)
        assert (np.asarray(turned) == found[0]).all(-1).mean() > 0.9


def whole_spec(**changes: Any) -> Preprocess:
    options = {"dataset": "cifar10", "color_jitter": 0.4, "rand_augment": 2, "random_erasing": 0.5, **changes}
    config = config_from(options)
    return preprocess_spec(config.data, config.augment, describe_dataset(config.data), 3)


@pytest.mark.parametrize(
    "changes", [{}, {"train_augmentation": "none", "hue_jitter": 0.1}, {"normalization": "per-channel"}]
)
def test_the_whole_way_is_the_same_on_host_and_device(changes: dict[str, Any]) -> None:
    spec = whole_spec(**changes)
    images, index = RNG.integers(0, 256, (48, 32, 32, 3), np.uint8), RNG.permutation(999)[:48].astype(np.int32)
    host = preprocess(images, index, 7, spec, True)
    device = np.asarray(jax.jit(lambda x, i, e: preprocess(x, i, e, spec, True))(images, index, np.uint32(7)))
    assert (np.abs(host - device) <= 1e-5).mean() > 0.999
    alone = preprocess(images[5:6], index[5:6], 7, spec, True)
    assert (alone == host[5:6]).all()
    evaluated = preprocess(images, index, 7, spec, False)
    assert (evaluated != host).any((1, 2, 3)).all()


def test_strengths_vary_and_operations_are_left_out() -> None:
    """Normal around 9 with deviation 3, in 16 values; three of ten operations are not applied."""
    spec = how("brightness", "rotate", std=3.0, probability=0.7)
    index = np.arange(20_000, dtype=np.int32)
    number, which = spec.choose(index, 2, 0)
    assert (number == 2).mean() == pytest.approx(0.3, abs=0.02)
    magnitudes = 30 * np.array(spec.levels)[which // 2]
    assert magnitudes.mean() == pytest.approx(9, abs=0.1)
    assert magnitudes.std() == pytest.approx(0.96 * 3, abs=0.06)  # as documented: of 16 values, not of all
    assert (which % 2).mean() == pytest.approx(0.5, abs=0.02)
    assert np.corrcoef(which // 2, number)[0, 1] == pytest.approx(0, abs=0.03)

    images, some = random_images(40), index[:40]
    changed = change_colors(images.astype(np.float32), some, 2, spec)
    device = jax.jit(lambda x, i, e: change_colors(x, i, e, spec))(images.astype(np.float32), some, np.uint32(2))
    assert (np.asarray(device) == changed).mean() > 0.999
    rows, columns = source_pixels(some, 2, spec, HW)
    for n in range(40):
        sign, level = 1 - 2 * (which[n] % 2), spec.levels[which[n] // 2]
        if number[n] == 0:
            theirs = ImageEnhance.Brightness(Image.fromarray(images[n])).enhance(float(1 + sign * 0.9 * level))
            assert np.abs(np.asarray(theirs) - changed[n]).max() <= 1
        else:
            assert (changed[n] == images[n]).all()
        if number[n] == 1:
            moved_by = np.hypot(rows[n][0, 0] - 0, columns[n][0, 0] - 0)
            expected = 2 * np.hypot(*HW) / 2 * np.sin(np.pi / 12 * level)  # the chord of the corner's arc
            assert moved_by == pytest.approx(expected, abs=1.5)
        else:
            assert (rows[n] == np.arange(HW[0])[:, None]).all()
    assert how(std=30.0).levels[0] == 0  # never below nothing, nor above the end
    assert how(std=30.0, magnitude=29).levels[-1] == 1


def test_operations_are_left_out_without_a_spread_too() -> None:
    spec, index = how("invert", probability=0.7), np.arange(20_000, dtype=np.int32)
    number, which = spec.choose(index, 2, 0)
    assert (number == 1).mean() == pytest.approx(0.3, abs=0.02)
    assert set(which // 2) == {0}  # the one level
    images = random_images(40)
    changed = change_colors(images.astype(np.float32), index[:40], 2, spec)
    left_out = number[:40] == 1
    assert left_out.any()
    assert (changed[left_out] == images[left_out]).all()
    assert (changed[~left_out] == 255 - images[~left_out]).all()


def test_operations_are_chosen_evenly() -> None:
    number, negative = how().choose(np.arange(28_000), 0, 0)
    counts = np.bincount(number, minlength=14)
    assert ((counts - 2000) ** 2 / 2000).sum() < 13 + 5 * np.sqrt(26)
    assert negative.mean() == pytest.approx(0.5, abs=0.02)
    other, _ = how().choose(np.arange(28_000), 0, 1)
    assert (number == other).mean() == pytest.approx(1 / 14, abs=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"rand_augment": -1},
        {"rand_augment_magnitude": 31},
        {"rand_augment_operations": ["rotate", "spin"]},
        {"rand_augment_operations": ["rotate", "rotate"]},
        {"color_jitter": 1.5},
        {"hue_jitter": 0.6},
        {"random_erasing": 1.1},
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config_from(options)


def test_a_hue_needs_colours() -> None:
    with pytest.raises(ConfigError, match="1 channels"):
        whole_spec(dataset="mnist", hue_jitter=0.1)
