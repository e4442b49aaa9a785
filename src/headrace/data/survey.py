"""What a set of images is made of: sizes, formats, brightness, samples of each class, images that are nearly equal."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from headrace.config.section_data import IMAGE_DATASETS
from headrace.core.errors import ConfigError
from headrace.core.rng import bits, name_id
from headrace.data.dataset import resolved_set
from headrace.data.decoding.image import BadImage, decode, read_header
from headrace.data.feeding.block_reader import num_threads_of
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.image_sets import open_image_set
from headrace.data.sets.samples import Samples
from headrace.rows.tasks import CLASSIFICATION

if TYPE_CHECKING:
    from headrace.config.schema import Data

SPLITS = ("training", "validation")
_GRID = 16  # pixels of a side of the copy by which images are compared
_MOST_BITS = 6  # of 64, in which the fingerprints of two copies of one image may differ
_MOST_LEVELS = 6.0  # of 255, by which their pixels differ on average
_MOST_COMPARED = 30_000  # images: each is compared with each
_MOST_PAIRS = 10_000
_AT_ONCE = 1_024


@dataclass(frozen=True, kw_only=True)
class Surveyed:
    """One image: where it is, its class, its size as stored, and a small grey copy of it."""

    split: int  # of SPLITS
    sample: int
    name: str
    label: int
    kind: str = ""
    hw: tuple[int, int] = (0, 0)
    num_bytes: int = 0
    grey: np.ndarray | None = None  # uint8 [16, 16]; None where it cannot be read
    sums: tuple[np.ndarray, np.ndarray] | None = None  # of each channel: mean, mean square, from 0 to 1
    problem: str = ""


class Pair(NamedTuple):
    """Two images that are nearly equal, and by how many levels of 255 they differ on average."""

    first: Surveyed
    second: Surveyed
    difference: float


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The images of both splits."""

    images: ImageSet
    found: tuple[Surveyed, ...]

    @property
    def readable(self) -> list[Surveyed]:
        return [each for each in self.found if each.grey is not None]

    def counts(self) -> np.ndarray:
        """Return the number of images of each split and class [2, classes]."""
        table = np.zeros((len(SPLITS), len(self.images.class_names)), np.int64)
        for each in self.found:
            table[each.split, each.label] += 1
        return table

    def channel_statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation of the training images' pixels; every image counts the same."""
        sums = [each.sums for each in self.found if each.sums is not None and each.split == 0]
        mean = np.mean([first for first, _ in sums], 0)
        return mean, np.sqrt(np.maximum(np.mean([second for _, second in sums], 0) - mean**2, 0))

    def samples_of(self, label: int, count: int) -> list[Surveyed]:
        """Return training images of a class, chosen by their names."""
        mine = [each for each in self.found if each.label == label and each.split == 0 and each.grey is not None]
        draw = bits(name_id("samples of a class"), np.array([name_id(each.name) for each in mine], np.uint32))
        return [mine[place] for place in np.argsort(draw, kind="stable")[:count]]

    def content(self, each: Surveyed) -> np.ndarray:
        """Return the pixels of an image as it is stored, uint8 [h, w, 3]."""
        return _pixels((self.images.train, self.images.validation)[each.split], each.sample)


def survey(data: "Data") -> Survey:
    """Read every image of the configured set."""
    data = resolved_set(data)
    if data.task != CLASSIFICATION.name:
        raise ConfigError(
            f"There is no report on a dataset of the task {data.task}.",
            rule="It shows the images of each class.",
            remedy="`headrace data verify` checks the images.",
        )
    if data.synthetic_on or data.dataset not in IMAGE_DATASETS:
        raise ConfigError(
            f"There is no report on the dataset {data.dataset}.",
            rule="It is made of images of a folder, a list (--labels), or files of them.",
            remedy="`headrace data verify` checks the known datasets.",
        )
    images = open_image_set(data, data.dataset)
    found: list[Surveyed] = []
    with ThreadPoolExecutor(num_threads_of(data)) as pool:
        for split, samples in enumerate((images.train, images.validation)):
            # Waits for each batch: a million futures would take more memory than the images.
            for start in range(0, len(samples), _AT_ONCE):
                numbers = range(start, min(start + _AT_ONCE, len(samples)))
                found += pool.map(lambda number, split=split, samples=samples: _look(split, samples, number), numbers)
    if not any(each.grey is not None for each in found):
        raise ConfigError(f"No image of {images.place} can be read.", remedy="`headrace data verify` says why.")
    return Survey(images=images, found=tuple(found))


def _look(split: int, samples: Samples, sample: int) -> Surveyed:
    known = {"split": split, "sample": sample, "name": samples.name(sample), "label": int(samples.labels[sample])}
    try:
        content = samples.content(sample)
        kind = "pixels" if isinstance(content.image, np.ndarray) else read_header(content.image).kind
        pixels = _pixels(samples, sample)
    except BadImage as error:
        return Surveyed(**known, problem=str(error))
    shares = pixels.reshape(-1, 3) / 255
    small = Image.fromarray(pixels).convert("L").resize((_GRID, _GRID), Image.Resampling.BOX)
    return Surveyed(
        **known,
        kind=kind,
        hw=pixels.shape[:2],
        num_bytes=content.num_bytes,
        grey=np.asarray(small),
        sums=(shares.mean(0), (shares**2).mean(0)),
    )


def _pixels(samples: Samples, sample: int) -> np.ndarray:
    image = samples.content(sample).image
    if not isinstance(image, np.ndarray):
        return decode(image, read_header(image), 3)
    return image if image.shape[-1] == 3 else np.repeat(image[..., :1], 3, -1)


def near_duplicates(found: Sequence[Surveyed]) -> list[Pair]:
    """Return the pairs of readable images that are nearly equal: the same at another quality or size.

    Those of different classes and in both splits come first. Of very many images, the first are compared.
    """
    chosen = [each for each in found if each.grey is not None][:_MOST_COMPARED]
    if not chosen:
        return []
    greys = np.stack([each.grey for each in chosen if each.grey is not None]).astype(np.float32)
    # Whether each of 8 x 8 places is brighter than its right neighbour: hardly changed by compression and size.
    coarse = greys.reshape(-1, 8, 2, _GRID).mean(2)
    steps = np.linspace(0, _GRID - 1, 9).round().astype(int)
    signs = np.where(np.diff(coarse[..., steps], axis=-1) > 0, 1, -1).reshape(len(chosen), -1).astype(np.float32)
    pairs = []
    for start in range(0, len(chosen), _AT_ONCE):
        same = signs[start : start + _AT_ONCE] @ signs.T  # 64 less twice the bits that differ
        for row, column in np.argwhere(same >= signs.shape[1] - 2 * _MOST_BITS).tolist():
            first, second = start + row, column
            if first < second:
                difference = float(np.abs(greys[first] - greys[second]).mean())
                if difference <= _MOST_LEVELS and len(pairs) < _MOST_PAIRS:
                    pairs.append(Pair(chosen[first], chosen[second], difference))
    return sorted(pairs, key=lambda pair: (-_weight(pair), pair.difference))


def _weight(pair: Pair) -> int:
    return 2 * (pair.first.label != pair.second.label) + (pair.first.split != pair.second.split)
