"""AutoAugment, TrivialAugment, 3-Augment, AugMix and the plain changes: against Pillow and SciPy, image by image."""

from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from scipy import ndimage

from headrace.config.load import config_from
from headrace.core.errors import ConfigError
from headrace.data.augmentation import colors
from headrace.data.augmentation.apply_policy import change_colors, source_pixels
from headrace.data.augmentation.augmix import augmix, mixing_weights
from headrace.data.augmentation.policies import IMAGENET_PAIRS, Policy, augmix_of, policy_of
from headrace.data.augmentation.preprocess import Preprocess, preprocess, preprocess_spec
from headrace.data.dataset import describe_dataset

RNG = np.random.default_rng(0)
HW = (28, 36)


def smooth_images(count: int, hw: tuple[int, int] = HW) -> np.ndarray:
    small = RNG.integers(0, 256, (count, 5, 6, 3)).astype(np.uint8)
    return np.stack(
        [np.asarray(Image.fromarray(each).resize((hw[1], hw[0]), Image.Resampling.BICUBIC)) for each in small]
    )


def spec_of(**options: Any) -> Preprocess:
    config = config_from({"dataset": "cifar10", "train_augmentation": "none", "normalization": "none", **options})
    return preprocess_spec(config.data, config.augment, describe_dataset(config.data), 5)


def policy(name: str) -> Policy:
    found = policy_of(config_from({"auto_augment": name}).augment, 5)
    assert found is not None
    return found


# What the papers' programs do with Pillow, at a level from 0 to 1 with a sign.
def _enhance(kind: Any, most: float) -> Any:
    return lambda im, level, sign: kind(im).enhance(1 + sign * most * level)


def theirs(most: float, bits: int) -> dict[str, Any]:
    return {
        "brightness": _enhance(ImageEnhance.Brightness, most),
        "contrast": _enhance(ImageEnhance.Contrast, most),
        "color": _enhance(ImageEnhance.Color, most),
        "sharpness": _enhance(ImageEnhance.Sharpness, most),
        "posterize": lambda im, level, sign: ImageOps.posterize(im, 8 - round(bits * level)),
        "solarize": lambda im, level, sign: ImageOps.solarize(im, int(np.ceil(255 * (1 - level)))),
        "autocontrast": lambda im, level, sign: ImageOps.autocontrast(im),
        "invert": lambda im, level, sign: ImageOps.invert(im),
        "equalize": lambda im, level, sign: ImageOps.equalize(im),
    }


@pytest.mark.parametrize(("name", "operations"), [("imagenet", theirs(0.9, 4)), ("trivial", theirs(0.99, 6))])
def test_colours_against_pillow(name: str, operations: dict[str, Any]) -> None:
    spec = policy(name)
    images, index = smooth_images(80), RNG.permutation(9999)[:80].astype(np.int32)
    found = change_colors(images.astype(np.float32), index, 4, spec)
    layers, changed = [spec.choose(index, 4, layer) for layer in range(spec.count)], 0
    for n in range(len(images)):
        image, names = Image.fromarray(images[n]), []
        for number, which in layers:
            names += [spec.operations[number[n]]] if number[n] < len(spec.operations) else []
            if names and number[n] < len(spec.operations) and names[-1] in operations:
                image = operations[names[-1]](image, spec.levels[which[n] // 2], 1 - 2 * (which[n] % 2))
                changed += 1
        difference = np.abs(np.asarray(image).astype(int) - found[n].astype(int))
        assert np.median(difference) <= 1, names
        assert (difference <= 8).mean() > 0.97, names
    assert changed > 30


def test_trivial_augment_draws_one_operation_of_any_strength() -> None:
    spec = policy("trivial")
    assert set(spec.operations) == {
        *theirs(1, 1),
        "identity",
        "shear_x",
        "shear_y",
        *("translate_x", "translate_y"),
        "rotate",
    } - {"invert"}
    index = np.arange(31_000, dtype=np.int32)
    number, which = spec.choose(index, 0, 0)
    assert spec.count == 1
    counts = np.bincount(number, minlength=14)
    assert np.abs(counts - 31_000 / 14).max() < 5 * np.sqrt(31_000 / 14)
    levels = np.bincount(which // 2, minlength=31)
    assert np.abs(levels - 1000).max() < 5 * np.sqrt(1000)
    assert abs((which % 2).mean() - 0.5) < 0.02
    # Its widest moves: 135 degrees, 32 pixels and a slope of 0.99, at any size of the image.
    rows, columns = source_pixels(index[:4000], 0, spec, HW)
    middle = np.array(HW) // 2
    for name, expected in {"translate_x": (0, 32), "translate_y": (32, 0)}.items():
        moved = [n for n in range(4000) if spec.operations[number[n]] == name and which[n] // 2 == 30]
        far = {
            (int(abs(rows[n][tuple(middle)] - middle[0])), int(abs(columns[n][tuple(middle)] - middle[1])))
            for n in moved
        }
        assert far == {expected}
    turned = next(n for n in range(4000) if spec.operations[number[n]] == "rotate" and which[n] == 60)
    across = np.array([rows[turned][14, 35] - rows[turned][14, 0], columns[turned][14, 35] - columns[turned][14, 0]])
    assert np.abs(across / 35 - [np.sin(0.75 * np.pi), np.cos(0.75 * np.pi)]).max() < 0.05
    slanted = next(n for n in range(4000) if spec.operations[number[n]] == "shear_x" and which[n] == 60)
    assert abs((columns[slanted][27, 0] - columns[slanted][0, 0]) / 27 - 0.99) < 0.04


def test_auto_augment_applies_the_pairs_of_its_paper() -> None:
    """Each of 25 pairs equally often, each operation with its probability; the strengths and the signs of each."""
    spec, index = policy("imagenet"), np.arange(100_000, dtype=np.int32)
    assert len(IMAGENET_PAIRS) == 25
    (first, strong), (second, weak) = (spec.choose(index, 3, layer) for layer in range(2))
    none = len(spec.operations)
    seen: dict[tuple[str, str], float] = {}
    for at, to in zip(first, second, strict=True):
        one, other = ("-" if number == none else spec.operations[number] for number in (at, to))
        names = one, other
        seen[names] = seen.get(names, 0) + 1 / len(index)
    wanted: dict[tuple[str, str], float] = {}
    for (a, p, _), (b, q, _) in IMAGENET_PAIRS:
        for names, share in (
            ((a, b), p * q),
            ((a, "-"), p * (1 - q)),
            (("-", b), (1 - p) * q),
            (("-", "-"), (1 - p) * (1 - q)),
        ):
            wanted[names] = wanted.get(names, 0) + share / 25
    assert set(seen) == {names for names, share in wanted.items() if share > 0}
    for names, share in seen.items():
        assert abs(share - wanted[names]) < 5 * np.sqrt(wanted[names] / len(index)), names
    posterize = spec.operations.index("posterize")
    assert set(strong[first == posterize] // 2) == {5, 7, 8}
    assert set(weak[second == posterize] // 2) == {6}
    assert abs((strong % 2).mean() - 0.5) < 0.01
    on_device = jax.jit(lambda i, e: spec.choose(i, e, 1))(index[:50], np.uint32(3))
    np.testing.assert_array_equal(on_device[0], second[:50])


@pytest.mark.parametrize("deviation", [0.1, 0.6, 1.3, 2.0])
def test_a_blur_against_scipy_and_pillow(deviation: float) -> None:
    images = np.concatenate([smooth_images(2), RNG.integers(0, 256, (2, *HW, 3), np.uint8)])
    weights = colors.blur_weights(deviation)[None, None, None]
    assert weights[..., 0] + 2 * weights[..., 1:].sum() == 1
    found = colors.blur(images.astype(np.float32), weights)
    device = jax.jit(lambda x: colors.blur(x, weights))(images.astype(np.float32))
    np.testing.assert_array_equal(device, found)
    wanted = ndimage.gaussian_filter(images.astype(np.float64), (0, deviation, deviation, 0), mode="nearest")
    assert np.abs(found - wanted).max() <= 1.2
    for ours, image in zip(found[:2], images[:2], strict=True):
        pillow = np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(deviation))).astype(int)
        assert np.abs(ours - pillow).mean() < 0.8  # which is three box filters


def test_three_augment_is_grey_or_inverted_light_or_blurred() -> None:
    spec, index = policy("3-augment"), np.arange(300, dtype=np.int32)
    images = smooth_images(300)
    found = change_colors(images.astype(np.float32), index, 1, spec)
    number, which = spec.choose(index, 1, 0)
    assert np.bincount(number).min() > 70
    for n in range(300):
        image = images[n].astype(np.float64)
        if spec.operations[number[n]] == "grayscale":
            wanted = np.repeat(np.asarray(Image.fromarray(images[n]).convert("L"))[..., None], 3, 2)
        elif spec.operations[number[n]] == "solarize":
            wanted = np.where(image >= 128, 255 - image, image)
        else:
            sigma = 0.1 + 1.9 * (which[n] // 2) / 15
            wanted = ndimage.gaussian_filter(image, (sigma, sigma, 0), mode="nearest")
        assert np.abs(found[n] - wanted).max() <= 1.2
    device = jax.jit(lambda x, i, e: change_colors(x, i, e, spec))(
        images[:40].astype(np.float32), index[:40], np.uint32(1)
    )
    np.testing.assert_array_equal(device, found[:40])


def test_augmix_against_the_papers_loop() -> None:
    """Chains of Pillow's operations as in the paper's program, weighted and mixed, with the draws of this one."""
    spec = augmix_of(config_from({"auto_augment": "augmix"}).augment, 5)
    assert spec is not None
    images, index = smooth_images(60, (20, 24)), RNG.permutation(9999)[:60].astype(np.int32)
    found = augmix(images.astype(np.float32), index, 2, spec)
    weights, share = mixing_weights(index, 2, spec)
    drawn = [[chain.choose(index, 2, layer) for layer in range(3)] for chain in spec.chains]
    off = []
    for n in range(len(images)):
        mixed = np.zeros((20, 24, 3))
        for weight, chain, layers in zip(weights[n], spec.chains, drawn, strict=True):
            image, moves = Image.fromarray(images[n]), []
            for number, which in layers:
                if number[n] == len(chain.operations):
                    continue
                name, sign = chain.operations[number[n]], 1 - 2 * (which[n] % 2)
                level = 0.1 + 2.9 * (which[n] // 2) / 15  # of 10
                if name in ("autocontrast", "equalize"):
                    image = getattr(ImageOps, name)(image)
                elif name == "posterize":
                    image = ImageOps.posterize(image, 4 - int(level * 4 / 10))
                elif name == "solarize":
                    image = ImageOps.solarize(image, 256 - int(level * 256 / 10))
                else:
                    moves.append((name, sign, level))
            for name, sign, level in moves:
                image = moved(image, name, sign, level)
            mixed += weight * np.asarray(image)
        wanted = (1 - share[n]) * images[n] + share[n] * mixed
        off.append(np.abs(wanted - found[n]))
    # The nearest pixel, once for all moves of a chain or move by move: edges of steps differ.
    assert np.median(off) <= 1
    assert (np.array(off) <= 12).mean() > 0.97


def moved(image: Image.Image, name: str, sign: int, level: float) -> Image.Image:
    """Move as Pillow does, about the centre where the paper's program shears about the corner."""
    width, height = image.size
    if name == "rotate":
        return image.rotate(sign * int(level * 30 / 10))
    slope = sign * level * 0.3 / 10
    by = sign * int(level * (width if name == "translate_x" else height) / 3 / 10)
    matrix = {
        "shear_x": (1, slope, -slope * height / 2, 0, 1, 0),
        "shear_y": (1, 0, 0, slope, 1, -slope * width / 2),
        "translate_x": (1, 0, by, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, by),
    }[name]
    return image.transform(image.size, Image.Transform.AFFINE, matrix)


def test_augmix_draws_its_weights_and_depths() -> None:
    spec = augmix_of(config_from({"auto_augment": "augmix"}).augment, 5)
    assert spec is not None
    index = np.arange(20_000, dtype=np.int32)
    weights, share = mixing_weights(index, 0, spec)
    np.testing.assert_array_equal(weights.sum(1), 1)
    # Dirichlet(1, 1, 1): means of a third, variances of 1/18; Beta(1, 1): 1/2 and 1/12.
    np.testing.assert_allclose(weights.mean(0), 1 / 3, atol=0.01)
    np.testing.assert_allclose(weights.var(0), 1 / 18, atol=0.002)
    assert (share.mean(), share.var()) == (pytest.approx(0.5, abs=0.01), pytest.approx(1 / 12, abs=0.002))
    chain = spec.chains[1]
    depth = sum((chain.choose(index, 0, layer)[0] < len(chain.operations)).astype(int) for layer in range(3))
    np.testing.assert_allclose(np.bincount(depth) / len(index), [0, 1 / 3, 1 / 3, 1 / 3], atol=0.015)
    others = [each.choose(index, 0, 0)[0] for each in spec.chains]
    assert (others[0] == others[1]).mean() == pytest.approx(1 / 9, abs=0.01)


def test_plain_changes_have_their_shares() -> None:
    images, index = smooth_images(400, (32, 32)), np.arange(400, dtype=np.int32)
    grey = preprocess(images, index, 0, spec_of(grayscale=0.3), True)
    is_grey = (grey == grey[..., :1]).all((1, 2, 3))
    assert is_grey.mean() == pytest.approx(0.3, abs=0.08)
    assert (grey[~is_grey] == images[~is_grey]).all()
    for n in np.flatnonzero(is_grey)[:5]:
        assert np.abs(grey[n, ..., 0] - np.asarray(Image.fromarray(images[n]).convert("L")).astype(int)).max() <= 1
    soft = preprocess(images, index, 0, spec_of(gaussian_blur=0.5), True)
    changed = (soft != images).any((1, 2, 3))
    assert 0.35 < changed.mean() < 0.55  # blurs of 0.1 pixels change nothing
    upside = preprocess(images, index, 0, spec_of(vertical_flip=True), True)
    down = (upside == images[:, ::-1]).all((1, 2, 3))
    assert ((upside == images).all((1, 2, 3)) | down).all()
    assert down.mean() == pytest.approx(0.5, abs=0.1)
    both = preprocess(images, index, 0, spec_of(vertical_flip=True, train_augmentation="flip"), True)
    assert {(both[n] == images[n, ::-1, ::-1]).all() for n in np.flatnonzero(down)} == {True, False}


def test_a_rotation_turns_by_up_to_so_many_degrees() -> None:
    images, index = smooth_images(200, (32, 32)), np.arange(200, dtype=np.int32)
    how = spec_of(rotation=40)
    found = preprocess(images, index, 2, how, True)
    rows, columns = source_pixels(index, 2, None, (32, 32), (40.0, how.seed))
    across = np.stack([rows[:, 16, 31] - rows[:, 16, 0], columns[:, 16, 31] - columns[:, 16, 0]], 1)
    angles = np.degrees(np.arctan2(across[:, 0], across[:, 1]))
    assert -42 < angles.min() < -34
    assert 34 < angles.max() < 42
    assert abs(angles.mean()) < 5
    for n in range(20):
        turned = np.asarray(Image.fromarray(images[n]).rotate(float(angles[n])))
        assert np.median(np.abs(turned.astype(int) - found[n])) < 6
    # With a policy that moves pixels, one look-up for both.
    with_policy = spec_of(rotation=40, rand_augment=1, rand_augment_operations=["translate_x"])
    assert (preprocess(images, index, 2, with_policy, True) != found).any((1, 2, 3)).mean() > 0.9


@pytest.mark.parametrize(
    "options",
    [
        {"auto_augment": "imagenet"},
        {"auto_augment": "trivial", "train_augmentation": "flip-crop"},
        {"auto_augment": "3-augment", "color_jitter": 0.3},
        {"auto_augment": "augmix", "normalization": "per-image"},
        {"grayscale": 0.3, "gaussian_blur": 0.3, "vertical_flip": True, "rotation": 20},
    ],
)
def test_host_and_device_and_every_batch_agree(options: dict[str, Any]) -> None:
    how = spec_of(**options)
    images, index = RNG.integers(0, 256, (12, 32, 32, 3), np.uint8), RNG.permutation(999)[:12].astype(np.int32)
    host = preprocess(images, index, 7, how, True)
    device = jax.jit(lambda x, i, e, s: preprocess(x, i, e, how.with_seed(s), True))(
        images, index, np.uint32(7), np.uint32(5)
    )
    assert (np.abs(host - np.asarray(device)) <= 1e-4 * 255).mean() > 0.999
    alone = preprocess(images[5:6], index[5:6], 7, how, True)
    assert (alone == host[5:6]).all()
    assert (preprocess(images, index, 8, how, True) != host).any()
    np.testing.assert_array_equal(
        preprocess(images, index, 7, how, False), preprocess(images, index, 7, spec_of(**plain(options)), False)
    )


def plain(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in ("normalization", "train_augmentation")}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"auto_augment": "imagenet", "rand_augment": 2}, "Both are given: rand_augment 2.* and auto_augment imagenet"),
        ({"auto_augment": "cifar"}, "trivial"),
        ({"grayscale": 1.2}, "from 0 to 1"),
        ({"rotation": 200}, "from 0 to 180"),
        ({"grayscale": 0.2, "dataset": "mnist"}, "grayscale is 0.2, but the images of .* have 1 channels"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        spec_of(**options)
