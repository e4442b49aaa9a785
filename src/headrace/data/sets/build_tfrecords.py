"""Build ImageNet's TFRecords from class folders, in the layout that the reference's readers expect.

Labels count from 1 in order of the folders' names. The order of the images is a shuffle with a fixed seed. Images
that are not RGB or grey JPEGs (PNG named as JPEG, CMYK, WebP), or not upright, are encoded again as RGB JPEGs.
"""

import csv
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.core.errors import ConfigError, DataError
from headrace.core.rng import bits, name_id
from headrace.data.decoding.image import BadImage, decode, encode_jpeg, read_header
from headrace.data.sets.formats.folder import ClassFolders
from headrace.data.sets.indexed_samples import read_names
from headrace.data.sets.samples import FileSamples
from headrace.data.sets.tf_example import Floats, Values, write_example
from headrace.data.sets.tfrecord_file import write_records

SEED = 12345  # the reference's too, whose generator is another
QUALITY = 100  # as the reference encodes these again
LABELS_FILE = "labels.txt"
Boxes = Mapping[str, list[tuple[float, float, float, float]]]  # by file name: xmin, ymin, xmax, ymax


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """What to build."""

    folders: ClassFolders
    output: Path
    train_shards: int
    validation_shards: int
    num_threads: int
    texts: Mapping[str, str]  # readable class names, by folder name
    boxes: Boxes


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """The result of a build."""

    counts: dict[str, int]
    encoded_again: int
    bad: tuple[str, ...]


def build(plan: BuildPlan) -> BuildReport:
    """Write the shards of both splits; bad images are left out and listed in the report."""
    splits = (
        ("train", plan.folders.train, plan.train_shards),
        ("validation", plan.folders.validation, plan.validation_shards),
    )
    for split, samples, num_shards in splits:
        if not 1 <= num_shards <= 99_999:
            raise ConfigError(f"{num_shards} {split} shards were requested.", rule="There are 1 to 99,999.")
        if num_shards > len(samples):
            raise ConfigError(
                f"{num_shards:,} {split} shards for {len(samples):,} images.",
                rule="No shard may be empty.",
                remedy=f"Give fewer with --{split}-shards.",
            )
    plan.output.mkdir(parents=True, exist_ok=True)
    if any(plan.output.glob("train-*-of-*")):
        raise DataError(f"{plan.output} already has shards.", remedy="Choose an empty folder with --output-dir.")
    counts, again, bad = {}, 0, []
    for split, samples, num_shards in splits:
        # Shuffled once, into the shards: readers of the reference shuffle a buffer only, which would see a class at a
        # time.
        order = np.argsort(bits(SEED, np.arange(len(samples), dtype=np.uint32), name_id(split)), kind="stable")
        parts = np.array_split(order, num_shards)

        def write(number: int, split: str = split, samples: FileSamples = samples, parts: list = parts) -> list[str]:
            log: list[str] = []
            path = plan.output / f"{split}-{number:05d}-of-{len(parts):05d}"
            write_records(path, _examples(plan, samples, parts[number], log))
            return log

        with ThreadPoolExecutor(plan.num_threads) as pool:
            logs = [line for log in pool.map(write, range(num_shards)) for line in log]
        bad += [line for line in logs if line]
        again += logs.count("")
        counts[split] = len(samples) - sum(1 for line in logs if line)
    labels = "".join(f"{name}\n" for name in plan.folders.class_names)
    (plan.output / LABELS_FILE).write_text(labels, encoding="utf-8")
    return BuildReport(counts=counts, encoded_again=again, bad=tuple(bad))


def read_metadata(path: Path) -> dict[str, str]:
    """Read the names of classes: a folder's name, a tab, its text."""
    texts = {}
    for number, line in enumerate(read_names(path), 1):
        folder, tab, text = line.partition("\t")
        if line.strip() and not tab:
            raise DataError(
                f"{path}, line {number}: no tab.", rule="A line is a folder's name, a tab, and the class's name."
            )
        texts |= {folder: text} if tab else {}
    return texts


def read_boxes(path: Path) -> dict[str, list[tuple[float, float, float, float]]]:
    """Read boxes: file, xmin, ymin, xmax, ymax from 0 to 1, separated by commas."""
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    try:
        rows = list(csv.reader(read_names(path)))
    except csv.Error as error:
        raise DataError(f"{path}: {error}.", rule="A line is file,xmin,ymin,xmax,ymax.") from None
    for number, row in enumerate(rows, 1):
        try:
            name, *sides = row
            xmin, ymin, xmax, ymax = map(float, sides)
        except ValueError:
            if number == 1:
                continue  # the header line
            problem = f"{path}, line {number}: {','.join(row)[:80]!r} is not a box."
            raise DataError(problem, rule="A line is file,xmin,ymin,xmax,ymax.") from None
        if not (0 <= xmin < xmax <= 1 and 0 <= ymin < ymax <= 1):
            continue  # ImageNet's file has a few empty boxes
        found.setdefault(name, []).append((xmin, ymin, xmax, ymax))
    return found


def _examples(plan: BuildPlan, samples: FileSamples, chosen: np.ndarray, log: list[str]) -> Iterator[bytes]:
    for sample in chosen.tolist():
        path = Path(samples.name(sample))
        try:
            data, size, again = as_jpeg(samples.content(sample).image)
        except BadImage as error:
            log.append(f"{path}: {error}")
            continue
        if again:
            log.append("")
        yield write_example(_features(plan, path, int(samples.labels[sample]), data, size))


def as_jpeg(data: bytes) -> tuple[bytes, tuple[int, int], bool]:
    """Return an RGB or grey JPEG that is upright, its size, and whether it was encoded again; it is decoded once."""
    from PIL import Image

    header = read_header(data)
    # Decoded even if it is kept as it is: a damaged image should be found now, not in training.
    pixels = decode(data, header)
    if header.kind == "jpeg" and header.plain and header.orientation == 1:
        return data, (header.height, header.width), False
    return encode_jpeg(Image.fromarray(pixels), QUALITY), (header.height, header.width), True


def _features(plan: BuildPlan, path: Path, label: int, data: bytes, size: tuple[int, int]) -> dict[str, Values]:
    synset = plan.folders.class_names[label]
    boxes = plan.boxes.get(path.name, [])
    sides = {
        f"image/object/bbox/{side}": Floats(box[number] for box in boxes)
        for number, side in enumerate(("xmin", "ymin", "xmax", "ymax"))
    }
    return {
        "image/height": [size[0]],
        "image/width": [size[1]],
        "image/channels": [3],
        "image/colorspace": [b"RGB"],
        "image/format": [b"JPEG"],
        "image/filename": [path.name.encode()],
        "image/encoded": [data],
        "image/class/label": [label + 1],
        "image/class/synset": [synset.encode()],
        "image/class/text": [plan.texts.get(synset, synset).encode()],
        "image/object/bbox/label": [label + 1] * len(boxes),
        **sides,
    }
