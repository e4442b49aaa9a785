"""TFRecords as TFDS prepares them, with their description beside them."""

from pathlib import Path

from headrace.config.schema import Data
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.shard_set import ShardReader, set_of_shards
from headrace.data.sets.tfrecords import (
    TFDS_SHARD,
    has_shards,
    index_of,
    samples_of,
    shards,
    tfds_names,
    tfds_schema,
)


def fits(path: Path) -> bool:
    """Say whether a folder has such shards."""
    return has_shards(path, TFDS_SHARD)


def open_set(path: Path, data: Data) -> ImageSet:
    """List the records of both splits."""
    schema, names = tfds_schema(path), tfds_names(path)
    reader = ShardReader(
        kind="tfds",
        index=lambda files: index_of(files, schema, names),
        samples=lambda files, part: samples_of(files, part, schema),
    )
    train = shards(path, "train", TFDS_SHARD)
    validation = shards(path, "validation", TFDS_SHARD) or shards(path, "test", TFDS_SHARD)
    return set_of_shards(path, data, reader, train, validation)
