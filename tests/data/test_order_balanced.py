"""Weights of classes, balanced sampling and repeated augmentation against counting."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.core.errors import ConfigError
from headrace.data.augmentation.preprocess import Preprocess, preprocess
from headrace.data.feeding.balance import balanced_order, class_weights, repeated_order
from headrace.data.feeding.block_reader import FeedOptions
from headrace.data.feeding.cache import CacheChoice
from headrace.data.feeding.feed import CallSpans, TrainFeed
from headrace.data.feeding.order import StepShape, epoch_order, step_indices
from headrace.data.sets.source import memory_source


def test_balanced_weights_make_every_class_count_the_same() -> None:
    labels = np.array([0] * 90 + [1] * 9 + [3], np.int32)
    weights = class_weights(("balanced",), labels, 4)
    assert weights is not None
    np.testing.assert_allclose(weights, [100 / 360, 100 / 36, 0, 25], rtol=1e-12)
    assert [weights[label] * count for label, count in ((0, 90), (1, 9), (3, 1))] == [pytest.approx(25)] * 3


def test_given_weights_are_taken_as_they_are() -> None:
    labels = np.zeros(3, np.int32)
    assert class_weights((), labels, 2) is None
    assert class_weights((0.5, 2), labels, 2) == (0.5, 2.0)


@pytest.mark.parametrize(
    ("written", "value"), [("balanced", ("balanced",)), ("1, 2 0.5", (1.0, 2.0, 0.5)), ([3, 1], (3.0, 1.0))]
)
def test_ways_to_write_them(written: object, value: tuple[object, ...]) -> None:
    assert config_from({"class_weights": written}).learning.class_weights == value


@pytest.mark.parametrize("written", ["even", "1 -1", "0 0", ["balanced", 1], "1 nan"])
def test_wrong_weights_are_refused(written: object) -> None:
    with pytest.raises(ConfigError, match="class_weights"):
        config_from({"class_weights": written})


LABELS = np.array([0] * 70 + [1] * 20 + [2] * 9 + [4], np.int32)[np.random.default_rng(0).permutation(100)]


def test_every_class_comes_equally_often() -> None:
    order = balanced_order(LABELS)
    spare: Counter[int] = Counter()
    for epoch in range(40):
        numbers = order(3, epoch, 100, True, 0)
        assert len(numbers) == len(set(numbers.tolist())) == 100
        shown = Counter(LABELS[numbers % 100].tolist())
        assert set(shown) == {0, 1, 2, 4}
        assert set(shown.values()) == {25}
    order = balanced_order(LABELS[:98])
    for epoch in range(200):
        shown = Counter(LABELS[:98][order(3, epoch, 98, True, 0) % 98].tolist())
        assert sorted(shown.values()) == [24, 24, 25, 25]
        spare.update(label for label, count in shown.items() if count == 25)
    assert all(spare[label] == pytest.approx(100, abs=30) for label in (0, 1, 2, 4))


def test_a_class_is_gone_through_before_it_begins_again() -> None:
    numbers = balanced_order(LABELS)(1, 0, 100, True, 0)
    times = Counter((numbers % 100).tolist())
    for label, (least, most) in {0: (0, 1), 1: (1, 2), 2: (2, 3), 4: (25, 25)}.items():
        seen = [times[sample] for sample in np.flatnonzero(label == LABELS).tolist()]
        assert (min(seen), max(seen)) == (least, most)
    assert sorted(numbers[numbers % 100 == np.flatnonzero(LABELS == 4)[0]] // 100) == list(range(25))


def test_the_order_is_a_function_of_seed_and_epoch_and_is_mixed() -> None:
    order = balanced_order(LABELS)
    numbers = order(1, 0, 100, True, 0)
    assert (numbers == order(1, 0, 100, True, 0)).all()
    for other in (order(2, 0, 100, True, 0), order(1, 1, 100, True, 0), order(1, 0, 100, True, 1)):
        assert (numbers != other).mean() > 0.8
    first_half = LABELS[numbers % 100][:50]
    assert max(Counter(first_half.tolist()).values()) < 25  # the classes are not one after the other


@pytest.mark.parametrize("on_device", [True, False])
def test_a_balanced_feed_sends_the_images_of_its_samples(put: Callable[[Any, str], Any], on_device: bool) -> None:
    images = np.random.default_rng(1).integers(0, 256, (100, 4, 4, 3), np.uint8)
    how = Preprocess(
        augmentation="flip-crop",
        normalization="zero-one",
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        seed=5,
        image_hwc=(4, 4, 3),
        on_device=on_device,
    )
    cache = CacheChoice("host", "a test")
    options = FeedOptions(preprocess=how, cache=cache, eight_bit_transfer=on_device, num_threads=2, prefetch_depth=1)
    shape = StepShape(
        seed=3,
        num_samples=100,
        shuffle=True,
        updates_per_epoch=5,
        gradient_accumulation_count=1,
        num_replicas=1,
        micro_batch_size=20,
        balanced=True,
    )
    feed = TrainFeed(
        memory_source(images, LABELS), shape, CallSpans(first_step=0, last_step=5, max_steps=5), options, put
    )
    block = {key: np.asarray(value) for key, value in feed.next().items()}
    feed.close()
    numbers = block["index"].ravel()
    assert (numbers == balanced_order(LABELS)(3, 0, 100, True, 0)).all()
    assert (block["labels"].ravel() == LABELS[numbers % 100]).all()
    shown = block["images"].reshape(100, 4, 4, 3)
    if on_device:
        assert (shown == images[numbers % 100]).all()
    else:
        assert (shown == preprocess(images[numbers % 100], numbers, 0, how, True)).all()
        rare = shown[numbers % 100 == np.flatnonzero(LABELS == 4)[0]]
        assert len({each.tobytes() for each in rare}) > 15  # the one image of a class is augmented anew each time


@pytest.mark.parametrize(
    "given", [{"balanced_sampling": True, "shuffle": False}, {"balanced_sampling": True, "dataset": "synthetic"}]
)
def test_what_cannot_be_balanced_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="balanced_sampling"):
        config_from(given)


@pytest.mark.parametrize(("size", "batch", "repeats"), [(96, 24, 3), (100, 20, 3), (37, 8, 4), (50, 10, 16)])
def test_each_image_of_a_step_is_repeated(size: int, batch: int, repeats: int) -> None:
    order, distinct, seen = repeated_order(repeats, batch), -(-batch // repeats), []
    for epoch in range(3):
        numbers = order(7, epoch, size, True, 0)
        assert len(numbers) == size
        for step in range(size // batch):
            block = numbers[step * batch : (step + 1) * batch]
            assert len(set(block.tolist())) == batch  # every copy has a number, hence an augmentation, of its own
            copies = Counter((block % size).tolist())
            assert len(copies) == min(distinct, batch)
            assert set(copies.values()) <= {-(-batch // distinct), batch // distinct}
            assert max(copies.values()) <= repeats
            if distinct > 1:
                assert (block[1:] % size != block[:-1] % size).all()  # neighbours are mixed
            expected = epoch_order(7, epoch, size, True)[step * distinct : (step + 1) * distinct]
            assert list(dict.fromkeys((block % size).tolist())) == expected.tolist()
        seen.append(frozenset((numbers[: size // batch * batch] % size).tolist()))
    assert len(set(seen)) == 3  # every epoch uses another part of the set
    assert len(seen[0]) == size // batch * distinct


def test_repetition_goes_on_through_further_passes_and_any_division_of_a_step() -> None:
    """Steps of an epoch that is longer than the set are cut from one sequence, whatever the micro batches."""
    shapes = [
        StepShape(
            seed=1, num_samples=30, shuffle=True, updates_per_epoch=9, gradient_accumulation_count=g,
            num_replicas=r, micro_batch_size=12 // g // r, repeats=3,
        )
        for g, r in ((1, 1), (3, 2), (2, 1))
    ]  # fmt: skip
    orders = [step_indices(shape, 0, 18, repeated_order(3, 12))[0].reshape(18, 12) for shape in shapes]
    assert all((order == orders[0]).all() for order in orders[1:])
    within_a_pass = [step for number, step in enumerate(orders[0]) if number % 9 != 7]  # images 28 to 31 of 30
    assert all(set(Counter((step % 30).tolist()).values()) == {3} for step in within_a_pass)
    for epoch in (orders[0][:9], orders[0][9:]):  # 36 images: all 30 once, then 6 of another shuffle
        used = Counter((epoch % 30).ravel().tolist())
        assert len(used) == 30
        assert set(used.values()) == {3, 6}
    later = step_indices(shapes[1], 11, 4, repeated_order(3, 12))[0].reshape(4, 12)
    np.testing.assert_array_equal(later, orders[0][11:15])


@pytest.mark.parametrize(
    "options", [{"shuffle": False}, {"balanced_sampling": True}], ids=lambda options: next(iter(options))
)
def test_repetition_is_refused_beside_other_orders(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="repeated_augmentation 3"):
        config_from({"repeated_augmentation": 3, **options})
