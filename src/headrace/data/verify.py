"""Check every image of a dataset, compare known sets with their published statistics, and list all problems."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from headrace.config.schema import Data
from headrace.config.section_data import IMAGE_DATASETS
from headrace.core.errors import DataError
from headrace.data.dataset import describe_dataset, resolved_set
from headrace.data.decoding.image import BadImage, decode, read_header
from headrace.data.feeding.balance import EVEN_OUT, describe_uneven
from headrace.data.feeding.block_reader import num_threads_of
from headrace.data.sets.catalog import KNOWN_SETS, SetRow
from headrace.data.sets.digits import read_digits
from headrace.data.sets.duplicates import DIGEST, describe_duplicates, digest_of
from headrace.data.sets.file_problem import SplitPart
from headrace.data.sets.image_sets import open_image_set
from headrace.data.sets.known_sets import SPLITS, Found, class_names, locate_set, read_split
from headrace.data.sets.output_labels import count_labels
from headrace.data.sets.samples import Samples
from headrace.rows.tasks import CLASSIFICATION

_AT_ONCE = 4096  # images submitted to the threads at a time, so that a large set needs little memory
_NUM_NAMED = 5  # problems that an error message names
_MEAN_TOLERANCE = 0.002  # of the scale 0 to 1; published means are exact to 0.00001


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The result of `verify`: the number of images of each class and split, and a description of each problem.

    Identical images in both splits or in two classes are listed apart: a run on them works, but means less.
    """

    name: str
    place: str
    class_names: tuple[str, ...]
    counts: dict[str, tuple[int, ...]]
    problems: tuple[str, ...]
    duplicates: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # such as skipped files


def verify(data: Data) -> VerifyReport:
    """Check the configured set."""
    data = resolved_set(data)
    if data.synthetic_on:
        return _synthetic_report(data)
    if data.dataset in IMAGE_DATASETS:
        return _images_report(data)
    row = KNOWN_SETS[data.dataset]
    if row.name == "digits":
        return _report(row, "inside the package", row.class_names, read_digits(), [])
    try:
        found = locate_set(row, data.dataset_path)
    except DataError as error:
        return VerifyReport(
            name=row.name, place="not found", class_names=row.class_names, counts={}, problems=(str(error),)
        )
    return verify_found(found, row)


def refuse_problems(data: Data) -> None:
    """Check the configured set; problems are a DataError that names the first ones."""
    report = verify(data)
    if report.problems:
        more = f" And {len(report.problems) - _NUM_NAMED} more." if len(report.problems) > _NUM_NAMED else ""
        first = "; ".join(report.problems[:_NUM_NAMED])
        raise DataError(
            f"The dataset {report.name} has {len(report.problems)} problem(s): {first}.{more}",
            remedy="`headrace data verify` lists all of them; without --verify-dataset broken images are replaced.",
        )


def verify_found(found: Found, row: SetRow) -> VerifyReport:
    """Check the files of a set that was found."""
    names = class_names(found, row)
    problems = []
    if names != row.class_names:
        strange = [f"{mine} for {known}" for mine, known in zip(names, row.class_names, strict=True) if mine != known]
        problems.append(f"{found.directory / str(found.layout.names_file)}: class names differ: {', '.join(strange)}")
    parts = {split: read_split(found, row, split) for split in SPLITS}
    return _report(row, f"{found.directory} ({found.layout.kind})", names, parts, problems)


def format_report(report: VerifyReport) -> str:
    """Return the report as text: a table of counts, then the problems."""
    lines = [f"{report.name}: {report.place}"]
    if report.counts:
        width = max(len(name) for name in report.class_names)
        lines.append(f"{'class':<{width + 5}}" + "".join(f"{split:>12}" for split in report.counts))
        for label, name in enumerate(report.class_names):
            numbers = "".join(f"{counts[label]:>12,}" for counts in report.counts.values())
            lines.append(f"{label:>3}  {name:<{width}}{numbers}")
        lines.append(f"{'all':<{width + 5}}" + "".join(f"{sum(counts):>12,}" for counts in report.counts.values()))
    lines += [f"note: {text}" for text in report.notes]
    problems = (*report.problems, *report.duplicates)
    if not problems:
        return "\n".join([*lines, "No problems found."])
    lines.append(f"{len(problems)} problem(s):")
    return "\n".join([*lines, *(f"  {number}. {text}" for number, text in enumerate(problems, 1))])


def _report(
    row: SetRow, place: str, names: tuple[str, ...], parts: dict[str, SplitPart], problems: list[str]
) -> VerifyReport:
    counts = {}
    for split, part in parts.items():
        good = part.labels[(part.labels >= 0) & (part.labels < row.num_classes)]
        counts[split] = tuple(int(count) for count in np.bincount(good, minlength=row.num_classes))
        problems += [str(finding) for finding in part.findings]
        problems += _count_problems(row, split, counts[split])
    if row.check_mean and not problems:
        problems += _mean_problems(row, parts["train"])
    return VerifyReport(name=row.name, place=place, class_names=names, counts=counts, problems=tuple(problems))


def _count_problems(row: SetRow, split: str, counts: tuple[int, ...]) -> list[str]:
    expected = row.train_counts if split == "train" else row.validation_counts
    wrong = [
        f"{row.class_names[label]} {count:,} (not {want:,})"
        for label, (count, want) in enumerate(zip(counts, expected, strict=True))
        if count != want
    ]
    return [f"{split}: images per class differ from the published set: {', '.join(wrong)}"] if wrong else []


def _mean_problems(row: SetRow, part: SplitPart) -> list[str]:
    """Compare channel means of the training images with the published ones: reveals a wrong channel order or scale."""
    num_images, *hwc = part.images.shape
    # Sums of whole numbers over the images first: 30 times faster than means.
    pixel_sums = np.add.reduce(part.images.reshape(num_images, -1), axis=0, dtype=np.uint32)
    means = pixel_sums.reshape(-1, hwc[-1]).mean(0, dtype=np.float64) / (255 * num_images)
    if np.abs(means - np.array(row.channel_mean)).max() <= _MEAN_TOLERANCE:
        return []
    return [
        f"train: the mean of the pixels is {', '.join(f'{mean:.4f}' for mean in means)}, in the published set "
        f"{', '.join(f'{mean:.4f}' for mean in row.channel_mean)}: these are not its images"
    ]


def _images_report(data: Data) -> VerifyReport:
    """Decode every image of the set; an error that makes the rest unreadable (a truncated shard) is raised."""
    images = open_image_set(data, data.dataset)
    counts, problems, digests = {}, [], []
    num_classes = len(images.class_names)
    with ThreadPoolExecutor(num_threads_of(data)) as pool:
        for split, samples in (("train", images.train), ("validation", images.validation)):
            counts[split] = count_labels(samples.labels, num_classes)
            digest = np.zeros(len(samples), DIGEST)
            # Waits for each batch: a million futures would take more memory than the images.
            for start in range(0, len(samples), _AT_ONCE):
                numbers = range(start, min(start + _AT_ONCE, len(samples)))
                found = list(pool.map(lambda number, samples=samples: _checked(samples, number), numbers))
                problems += [f"{split}: {problem}" for problem, _ in found if problem]
                digest[numbers.start : numbers.stop] = [each for _, each in found]
            digests.append(digest)
    duplicates, repeats = describe_duplicates((images.train, images.validation), digests)
    is_class = data.task == CLASSIFICATION.name
    uneven = describe_uneven(images.class_names, counts["train"], EVEN_OUT) if is_class else ()
    return VerifyReport(
        name=images.kind,
        place=f"{images.place} ({images.split_by})",
        class_names=images.class_names,
        counts=counts if all(counts.values()) else {},  # numbers are not counted
        problems=tuple(problems),
        duplicates=tuple(duplicates),
        notes=(*images.remarks, *uneven, *repeats),
    )


def _checked(samples: Samples, sample: int) -> tuple[str, bytes]:
    """Return what is wrong with a sample (empty if nothing is) and the digest of its bytes."""
    try:
        image = samples.content(sample).image
        if not isinstance(image, np.ndarray):
            decode(image, read_header(image))
    except BadImage as error:
        return f"{samples.name(sample)}: {error}", b""
    return "", digest_of(image)


def _synthetic_report(data: Data) -> VerifyReport:
    info = describe_dataset(data)
    return VerifyReport(name=info.name, place="synthetic, nothing to check", class_names=(), counts={}, problems=())
