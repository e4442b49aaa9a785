"""Shrinking on host and device against Pillow's bilinear filter, and what is fetched at a smaller size."""

import jax
import numpy as np
import pytest
from PIL import Image

from headrace.config.schema import Augment
from headrace.data.augmentation.crop_resize import shrink, shrink_matrix
from headrace.data.augmentation.mix import cutmix_box, mix_of
from headrace.data.augmentation.preprocess import Preprocess
from headrace.data.feeding.fetch import fetch, fetch_labels

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("size", "wanted"), [((32, 32), (16, 16)), ((40, 24), (15, 23)), ((32, 32), (28, 20))])
def test_against_pillow(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    values = RNG.normal(size=(3, *size, 2)).astype(np.float32)
    host, device = shrink(values, wanted), jax.jit(lambda v: shrink(v, wanted))(values)
    for n in range(3):
        for channel in range(2):
            image = Image.fromarray(values[n, :, :, channel])
            expected = np.asarray(image.resize((wanted[1], wanted[0]), Image.Resampling.BILINEAR))
            assert np.abs(host[n, :, :, channel] - expected).max() < 2e-6
    assert np.abs(np.asarray(device) - host).max() < 2e-6


def test_half_the_size_by_hand() -> None:
    """Two new pixels of four old ones: weights 3, 3, 1 (the fourth is too far), over 7."""
    np.testing.assert_allclose(shrink_matrix(4, 2), np.array([[3, 3, 1, 0], [0, 1, 3, 3]]) / 7, rtol=1e-6)
    np.testing.assert_array_equal(shrink_matrix(5, 5), np.eye(5))


def test_a_smaller_size_is_shrunk_and_then_mixed_in_its_own_pixels() -> None:
    spec = Preprocess(
        augmentation="none",
        normalization="none",
        mean=(0.0,),
        std=(1.0,),
        seed=4,
        image_hwc=(16, 16, 1),
        mix=mix_of(Augment(cutmix_alpha=1.0), 4, (16, 16)),
    ).at_size((8, 8))
    values, index = np.arange(4, dtype=np.uint8) * 50, np.arange(4, dtype=np.int32)
    block = {
        "images": np.broadcast_to(values[:, None, None, None], (4, 16, 16, 1)),
        "labels": index,
        "index": index,
        "epoch": np.uint32(0),
    }
    assert spec.mix is not None
    top, bottom, left, right = (int(end[0]) for end in cutmix_box(index, 0, spec.mix))
    images, mixed = jax.jit(lambda b: fetch(None, b, spec, True))(block)
    alone = jax.jit(lambda b: fetch_labels(None, b, spec, True))(
        {key: block[key] for key in ("labels", "index", "epoch")}
    )
    area = (bottom - top) * (right - left)
    assert 0 < area < 64
    assert images.shape == (4, 8, 8, 1)
    for n in range(4):
        counts = np.unique(np.round(np.asarray(images[n])), return_counts=True)
        other = values[(n - 2) % 4]
        assert dict(zip(*counts, strict=True)) == {values[n]: 64 - area, other: area}
    for labels in (mixed, alone):
        np.testing.assert_allclose(labels.weights, [[1 - area / 64, area / 64]] * 4, rtol=1e-6)
    assert fetch(None, block, spec, False)[0].shape == (4, 16, 16, 1)  # validation has the full size
