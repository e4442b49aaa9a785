"""Fuzz whole sets: shards and tars with damage at random places are refused, or their bad samples are; nothing else."""

import io
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import DataError
from headrace.data.decoding.image_source import ViewSpec, decoded_source
from headrace.data.sets.bad_samples import BadSamples
from headrace.data.sets.formats.tar import plain_content, tar_index
from headrace.data.sets.indexed_samples import StoredSamples
from headrace.data.sets.samples import Samples
from headrace.data.sets.tf_example import write_example
from headrace.data.sets.tfrecord_file import write_records
from headrace.data.sets.tfrecords import IMAGENET, index_of, samples_of

from .image_files import encode, smooth

COUNT = 4


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def write_shard(path: Path) -> None:
    write_records(
        path,
        [
            write_example({"image/encoded": [encode(smooth(24, 30, seed=n))], "image/class/label": [1 + n % 2]})
            for n in range(COUNT)
        ],
    )


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number in range(COUNT):
            for name, data in ((f"{number}.jpg", encode(smooth(24, 30, seed=number))), (f"{number}.cls", b"1")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def open_shard(path: Path) -> Samples:
    return samples_of([path], index_of([path], IMAGENET), IMAGENET)


def open_tar(path: Path) -> Samples:
    return StoredSamples([path], tar_index([path]), plain_content)


@pytest.mark.parametrize(("write", "opener", "least"), [(write_shard, open_shard, 70), (write_tar, open_tar, 20)])
def test_damage_is_refused_and_never_crashes(
    tmp_path: Path, write: Callable[[Path], None], opener: Callable[[Path], Samples], least: int
) -> None:
    path, rng = tmp_path / "train-0", random.Random(write.__name__)
    write(path)
    whole = path.read_bytes()
    refused = 0
    for _ in range(120):
        data = bytearray(whole[: rng.randrange(1, len(whole))] if rng.random() < 0.3 else whole)
        for _ in range(rng.randrange(0, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            samples = opener(path)
            source = decoded_source(samples, ViewSpec(size=16), "train", BadSamples("set", len(samples), 0.0))
            images = source.read(np.arange(len(samples)), 0)
        except DataError:
            refused += 1
        else:
            assert images.shape == (len(samples), 16, 16, 3)
    assert refused > least, "records have checksums; of a tar only what does not decode is found"
