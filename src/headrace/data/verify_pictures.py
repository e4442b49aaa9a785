"""Check a set of pictures: decode every one of them, and name each that is broken."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from headrace.config.schema import Data
from headrace.data.blocks import num_threads_of
from headrace.data.picture import BadPicture, decode, read_header
from headrace.data.picture_sets import PictureSet, open_pictures
from headrace.data.samples import Samples

_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was seen of a set of pictures."""

    pictures: PictureSet
    counts: dict[str, tuple[int, ...]]
    problems: tuple[str, ...]


def check_pictures(data: Data) -> Checked:
    """Decode every picture of the set; an error that hides the rest (a shard that is cut short) is raised."""
    pictures = open_pictures(data, data.dataset)
    counts, problems = {}, []
    num_classes = len(pictures.class_names)
    with ThreadPoolExecutor(num_threads_of(data)) as pool:
        for split, samples in (("train", pictures.train), ("validation", pictures.validation)):
            counts[split] = tuple(int(count) for count in np.bincount(samples.labels, minlength=num_classes))
            for start in range(0, len(samples), _AT_ONCE):
                numbers = range(start, min(start + _AT_ONCE, len(samples)))
                found = pool.map(lambda number, samples=samples: problem_of(samples, number), numbers)
                problems += [f"{split}: {problem}" for problem in found if problem]
    return Checked(pictures=pictures, counts=counts, problems=tuple(problems))


def problem_of(samples: Samples, sample: int) -> str:
    """Return what is wrong with a sample, empty if nothing is."""
    try:
        picture = samples.content(sample).picture
        if not isinstance(picture, np.ndarray):
            decode(picture, read_header(picture))
    except BadPicture as error:
        return f"{samples.name(sample)}: {error}"
    return ""
