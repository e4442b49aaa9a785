"""Sets of shards: files with many samples each, found through an index."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.config.schema import Data
from headrace.data.sets.held_out import hold_out
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.indexed_samples import Index, empty_classes, refuse_new_labels
from headrace.data.sets.samples import Samples


@dataclass(frozen=True, kw_only=True)
class ShardReader:
    """How shards of one kind are listed, and how their samples are read."""

    kind: str
    index: Callable[[list[Path]], Index]
    samples: Callable[[list[Path], Index], Samples]


def set_of_shards(path: Path, data: Data, reader: ShardReader, files: list[Path], validation: list[Path]) -> ImageSet:
    """Return a set of shards; without validation shards, hold out a fraction of each class by file and offset."""
    index = reader.index(files or validation)
    remarks = ()
    if not files:
        splits = reader.samples(validation, index.take(np.zeros(0, np.int64))), reader.samples(validation, index)
        split_by = f"{len(validation):,} validation shards alone"
    elif validation:
        listed = reader.index(validation)
        refuse_new_labels(path, index, listed)
        splits = reader.samples(files, index), reader.samples(validation, listed)
        split_by = f"{len(files):,} and {len(validation):,} shards"
    else:
        # Names of files, not paths: the split stays the same when the dataset is moved.
        # One at a time: as a list they would take more memory than the index.
        names = (f"{files[file].name}#{offset}" for file, offset in zip(index.file, index.offset, strict=True))
        held_out = hold_out(
            names, index.labels, data.validation_split, index.class_names, str(path), "shards of validation images"
        )
        parts = (index.take(np.flatnonzero(mask)) for mask in (~held_out.mask, held_out.mask))
        splits = tuple(reader.samples(files, part) for part in parts)
        split_by, remarks = held_out.text, held_out.remarks
    return ImageSet(
        kind=reader.kind,
        place=str(path),
        class_names=index.class_names,
        train=splits[0],
        validation=splits[1],
        split_by=split_by,
        remarks=(*empty_classes(index), *remarks) if files else (),
    )
