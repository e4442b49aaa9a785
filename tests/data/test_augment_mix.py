"""Mixup and cutmix against a plain loop with the written formulas, and their draws against the distributions."""

import zlib
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from scipy import special

from headrace.config.load import config_from, resolve
from headrace.config.schema import Augment
from headrace.core.errors import ConfigError
from headrace.data.augmentation.mix import (
    Mix,
    MixedLabels,
    beta_quantiles,
    cutmix_box,
    kept_quantiles,
    kept_share,
    mix_images,
    mix_labels,
    mix_of,
    mixup_weights,
)
from headrace.run.design import design_run

HW = (12, 20)


def mix(hw: tuple[int, int] = HW, **options: Any) -> Mix:
    found = mix_of(Augment(**options), 5, hw)
    assert found is not None
    return found


def micro_batch(count: int, hw: tuple[int, int] = HW) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    images = rng.normal(size=(count, *hw, 3)).astype(np.float32)
    return images, rng.integers(0, 10, count).astype(np.int32), rng.permutation(1000)[:count].astype(np.int32)


def by_hand(images: np.ndarray, labels: np.ndarray, share: Any, box: Any) -> tuple[np.ndarray, np.ndarray]:
    """Mix sample by sample and pixel by pixel; return the images and the target of each of 10 classes."""
    count, height, width, _ = images.shape
    shift = 2 if count > 2 else 1
    onehot = np.eye(10)[labels]
    mixed, target = np.zeros(images.shape), np.zeros((count, 10))
    for n in range(count):  # mixup: the neighbour before, round the end
        mixed[n] = share[n] * images[n] + (1 - share[n]) * images[n - 1]
        target[n] = share[n] * onehot[n] + (1 - share[n]) * onehot[n - 1]
    top, bottom, left, right = box
    cut, kept = mixed.copy(), 1 - (bottom - top) * (right - left) / (height * width)
    for n in range(count):
        for y in range(top, bottom):
            for x in range(left, right):
                cut[n, y, x] = mixed[(n - shift) % count, y, x]
    return cut, kept * target + (1 - kept) * target[(np.arange(count) - shift) % count]


def target_of(mixed: MixedLabels) -> np.ndarray:
    target = np.zeros((len(mixed.labels), 10))
    for n, (labels, weights) in enumerate(zip(mixed.labels, mixed.weights, strict=True)):
        for label, weight in zip(labels, weights, strict=True):
            target[n, label] += weight
    return target


WAYS: tuple[tuple[dict[str, Any], int], ...] = (
    ({"mixup_alpha": 0.2}, 2),
    ({"cutmix_lambda": 0.6, "cutmix_version": 2}, 2),
    ({"cutmix_lambda": 0.3}, 2),
    ({"cutmix_alpha": 1.0}, 2),
    ({"cutmix_alpha": 1.0, "mixup_alpha": 0.4}, 4),
    ({"cutmix_lambda": 0.5, "cutmix_version": 2, "mixup_alpha": 1.0}, 4),
)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_against_the_loop(count: int) -> None:
    ways = [(mix(**options), columns) for options, columns in WAYS]
    images, labels, index = micro_batch(count)
    on_device = jax.jit(  # all ways in one program, which is soon compiled
        lambda x, y, i, e: [(mix_images(x, i, e, how), mix_labels(y, i, e, how)) for how, _ in ways]
    )
    for epoch in (0, 3):
        on_devices = on_device(images, labels, index, np.uint32(epoch))
        for (how, columns), device in zip(ways, on_devices, strict=True):
            share = mixup_weights(index, epoch, how) if how.mixup_alpha else np.ones(count)
            box = [int(end[0]) for end in cutmix_box(index, epoch, how)] if how.cuts else (0, 0, 0, 0)
            wanted, target = by_hand(images, labels, share, box)
            host = mix_images(images, index, epoch, how), mix_labels(labels, index, epoch, how)
            for mixed, soft in (host, device):
                assert np.abs(np.asarray(mixed) - wanted).max() <= 1e-6, how
                assert np.asarray(soft.labels).shape == (count, columns)
                assert np.abs(target_of(soft) - target).max() <= 1e-6, how
                np.testing.assert_array_equal(np.asarray(soft.labels)[:, 0], labels)


def test_the_known_example_of_mixup() -> None:
    """Three constant images with a share of 1/2: 2, 1.5, 2.5 from 1, 2, 3."""
    images = np.arange(1, 4, dtype=np.float32).reshape(3, 1, 1, 1)
    mixed = 0.5 * images + 0.5 * np.roll(images, 1, axis=0)
    assert mixed.ravel().tolist() == [2, 1.5, 2.5]
    how = mix((1, 1), mixup_alpha=100.0)  # Beta(100, 100) is near 1/2
    index = np.arange(3, dtype=np.int32)
    share = mixup_weights(index, 0, how)
    found = mix_images(images, index, 0, how).ravel()
    np.testing.assert_allclose(found, share * [1, 2, 3] + (1 - share) * [3, 1, 2], rtol=1e-6)
    np.testing.assert_allclose(found, mixed.ravel(), atol=0.3)


def test_the_known_example_of_cutmix() -> None:
    """A share of 0.75 of 10 x 10 puts 25 pixels of the sample two before in, with weights 0.75 and 0.25."""
    how = mix((10, 10), cutmix_lambda=0.75, cutmix_version=2)
    images = np.zeros((4, 10, 10, 1), np.float32) + np.arange(4, dtype=np.float32)[:, None, None, None]
    labels = np.arange(4, dtype=np.int32)
    for sample in range(50):
        index = np.arange(sample, sample + 4, dtype=np.int32)
        mixed, soft = mix_images(images, index, 0, how), mix_labels(labels, index, 0, how)
        for n in range(4):
            assert (mixed[n] == n).sum() == 75
            assert (mixed[n] == (n - 2) % 4).sum() == 25
        np.testing.assert_array_equal(soft.weights, [[0.75, 0.25]] * 4)
        np.testing.assert_array_equal(soft.labels[:, 1], [2, 3, 0, 1])


def test_nothing_is_mixed_by_default() -> None:
    assert mix_of(Augment(), 0, HW) is None
    assert mix_of(Augment(cutmix_version=2), 0, HW) is None


@pytest.mark.parametrize("alpha", [0.05, 0.2, 1.0, 1.5, 8.0, 100.0])
def test_quantiles_of_beta(alpha: float) -> None:
    probabilities = np.array([1e-4, 0.01, 0.2, 0.5, 0.7, 0.999])
    np.testing.assert_allclose(
        beta_quantiles(alpha, probabilities), special.betaincinv(alpha, alpha, probabilities), rtol=1e-5, atol=2e-7
    )


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_shares_follow_the_distribution(alpha: float) -> None:
    share = mixup_weights(np.arange(20_000, dtype=np.int32), 1, mix(mixup_alpha=alpha)).astype(np.float64)
    assert share.min() >= 0.5
    # of the greater of x and 1 - x the distribution function is 2 I(x) - 1
    reached = 2 * special.betainc(alpha, alpha, np.sort(share)) - 1
    exact = np.sort(share) < 1 - 1e-6  # float32 has no numbers between, where the distribution of 0.2 still has 3 %
    assert np.abs(reached - (np.arange(20_000) + 0.5) / 20_000)[exact].max() < 0.015
    other = mixup_weights(np.arange(20_000, dtype=np.int32), 2, mix(mixup_alpha=alpha))
    assert abs(np.corrcoef(share, other)[0, 1]) < 0.03


def test_version_1_draws_the_share_as_the_reference_does() -> None:
    """No cutmix with probability 1.55 L - 0.96, else 1 + ln(u) / 4 with u uniform from e^-4 to 1."""
    kept = kept_quantiles(mix(cutmix_lambda=0.85))
    never = 1.55 * 0.85 - 0.96
    assert (kept == 1).mean() == pytest.approx(never, abs=1 / 4096)
    rest = np.sort(kept[kept < 1])
    u = np.exp(-4) + (1 - np.exp(-4)) * (np.arange(len(rest)) + 0.5) / len(rest)
    np.testing.assert_allclose(rest, 1 + np.log(u) / 4, atol=2e-3)
    assert (kept_quantiles(mix(cutmix_lambda=0.3)) < 1).all()  # 1.55 * 0.3 - 0.96 is below 0: always
    np.testing.assert_array_equal(kept_quantiles(mix(cutmix_lambda=0.3, cutmix_version=2)), 0.3)


def boxes(how: Mix, count: int = 3000) -> np.ndarray:
    """Return top, bottom, left, right of many micro-batches, [count, 4]."""
    box_of = partial(cutmix_box, epoch=np.uint32(0), mix=how)
    ends = jax.jit(jax.vmap(box_of))(np.arange(count, dtype=np.int32)[:, None])
    return np.concatenate([np.asarray(end) for end in ends], 1)


def test_boxes_have_the_area_stay_inside_and_are_everywhere() -> None:
    how = mix((32, 64), cutmix_lambda=0.75, cutmix_version=2)
    found = boxes(how)
    height, width = found[:, 1] - found[:, 0], found[:, 3] - found[:, 2]
    assert (found[:, 0].min(), found[:, 1].max(), found[:, 2].min(), found[:, 3].max()) == (0, 32, 0, 64)
    assert (height == 16).all()
    assert (width == 32).all()
    # the centre is uniform over the image and then moved inside: a quarter each at either border, half between
    for first, size in ((found[:, 0], 16), (found[:, 2], 32)):
        assert (first == 0).mean() == pytest.approx(0.25, abs=0.05)
        assert (first == size).mean() == pytest.approx(0.25, abs=0.05)
    assert abs(np.corrcoef(found[:, 0], found[:, 2])[0, 1]) < 0.06


def test_the_usual_formula_cuts_the_box_at_the_border_and_counts_what_is_left() -> None:
    how = mix((32, 32), cutmix_alpha=1.0)
    found = boxes(how)
    area = (found[:, 1] - found[:, 0]) * (found[:, 3] - found[:, 2])
    assert found.min() == 0
    assert found.max() == 32
    # the mean over uniform centre and area: each side on average is s - s^2 / 4 of the image for a box of side s
    side = np.sqrt(np.linspace(0, 1, 10_001))
    assert area.mean() / 1024 == pytest.approx(((side - side**2 / 4) ** 2).mean(), abs=0.02)
    for n in (0, 1, 2):
        box = cutmix_box(np.array([n, 7], np.int32), 0, how)
        assert kept_share(box, how)[0] == np.float32(1 - area[n] / 1024)


def test_host_and_device_draw_the_same_box() -> None:
    for options in ({"cutmix_alpha": 0.7}, {"cutmix_lambda": 0.4}):
        how = mix((224, 160), **options)
        host = [np.ravel(cutmix_box(np.array([n, 7], np.int32), 0, how)) for n in range(100)]
        np.testing.assert_array_equal(host, boxes(how, 100))


def test_the_box_is_addressed_by_the_first_sample() -> None:
    """One draw by the written rule: the address chain of core/rng over (seed, epoch, sample, crc32 of the purpose)."""

    def scrambled(word: int) -> int:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            word = ((word ^ word >> shift) * factor) % 2**32
        return word ^ word >> 16

    word = 0
    for part in (5, 3, 41, zlib.crc32(b"cutmix/centre")):
        word = scrambled(((word ^ part) * 0x9E3779B9 + 0x9E3779B9) % 2**32)
    how = mix((100, 60), cutmix_lambda=0.99, cutmix_version=2)  # sides 10 and 6
    top, bottom, left, right = (int(end[0]) for end in cutmix_box(np.array([41, 2], np.int32), 3, how))
    assert ((top + bottom) / 2, (left + right) / 2) == (
        pytest.approx(np.clip((word >> 16) * 100 / 65536, 5, 95), abs=0.51),
        pytest.approx(np.clip((word % 65536) * 60 / 65536, 3, 57), abs=0.51),
    )


@pytest.mark.parametrize(
    "options",
    [{"cutmix_version": 2}, {"rand_augment_operations": ["rotate"]}, {"progressive_resolution_sizes": 3}],
)
def test_what_has_no_effect_is_said(options: dict[str, Any]) -> None:
    notes = resolve(options, "none", environ={}).notes
    assert any("has no effect without" in note for note in notes)


@pytest.mark.parametrize(
    "options",
    [
        {"mixup_alpha": -0.1},
        {"cutmix_lambda": 1.2},
        {"cutmix_version": 3},
        {"cutmix_alpha": -1},
        {"cutmix_alpha": 1, "cutmix_lambda": 0.5, "micro_batch_size": 4},
        {"mixup_alpha": 0.2, "micro_batch_size": 1},
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config_from(options)


def test_a_batch_that_leaves_one_image_to_mix_is_refused() -> None:
    options = {"dataset": "digits", "batch_size": 2, "num_replicas": 2, "cutmix_lambda": 0.5}
    with pytest.raises(ConfigError, match="micro batch of one image"):
        design_run(config_from(options))


def test_each_micro_batch_gets_mixup_or_cutmix() -> None:
    """With a switch, what is drawn for one of the two is the same as without, and the other one is left out."""
    both = mix(mixup_alpha=0.4, cutmix_alpha=1.0)
    switched = mix(mixup_alpha=0.4, cutmix_alpha=1.0, mixup_switch_prob=0.3)
    cuts = []
    for first in range(400):
        images, labels, _ = micro_batch(6)
        index = np.arange(first * 6, first * 6 + 6, dtype=np.int32)
        box = tuple(int(end[0]) for end in cutmix_box(index, 3, switched))
        share = mixup_weights(index, 3, switched)
        is_cut = bool((share == 1).all())
        cuts.append(is_cut)
        if is_cut:
            assert box == tuple(int(end[0]) for end in cutmix_box(index, 3, both))
        else:
            assert box == (0, 0, 0, 0)
            np.testing.assert_array_equal(share, mixup_weights(index, 3, both))
        if first < 20:
            expected_images, target = by_hand(images, labels, share, box)
            np.testing.assert_allclose(mix_images(images, index, 3, switched), expected_images, atol=1e-6)
            np.testing.assert_allclose(target_of(mix_labels(labels, index, 3, switched)), target, atol=1e-6)
    assert np.mean(cuts) == pytest.approx(0.3, abs=0.07)
    device = jax.jit(lambda i, e: mixup_weights(i, e, switched))(np.arange(6, dtype=np.int32), np.uint32(3))
    np.testing.assert_array_equal(np.asarray(device), mixup_weights(np.arange(6, dtype=np.int32), 3, switched))
    assert mix(mixup_alpha=0.4, mixup_switch_prob=0.3).switch_prob is None  # nothing to switch to
