"""TFRecords as ImageNet's are written."""

from pathlib import Path

from headrace.config.schema import Data
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.shard_set import ShardReader, set_of_shards
from headrace.data.sets.tfrecords import IMAGENET, has_shards, index_of, samples_of, shards


def fits(path: Path) -> bool:
    """Say whether a folder has such shards."""
    return has_shards(path)


def open_set(path: Path, data: Data) -> ImageSet:
    """List the records of both splits."""
    reader = ShardReader(
        kind="tfrecord",
        index=lambda files: index_of(files, IMAGENET),
        samples=lambda files, part: samples_of(files, part, IMAGENET),
    )
    return set_of_shards(path, data, reader, shards(path, "train"), shards(path, "validation"))
