"""Memory that readers take: at most the factors of docs/explanation/reliability.md, for the most expensive files."""

import io
import json
import re
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headrace.core.errors import DataError, HeadraceError
from headrace.core.json_text import parse_json
from headrace.data.sets.build_tfrecords import read_boxes, read_metadata
from headrace.data.sets.catalog import CIFAR100
from headrace.data.sets.cifar import read_binary
from headrace.data.sets.formats.csv import read_csv_set
from headrace.data.sets.formats.npz import read_npz_set
from headrace.data.sets.formats.parquet import read_parquet_set
from headrace.data.sets.formats.tar import _make_index
from headrace.data.sets.indexed_samples import read_names
from headrace.data.sets.pack import open_pack, write_pack
from headrace.data.sets.tf_example import Floats, write_example
from headrace.data.sets.tfrecord_file import write_records
from headrace.data.sets.tfrecords import IMAGENET, tfds_schema
from headrace.data.sets.tfrecords import _make_index as index_records
from tests.data.image_files import ObjectSamples

DOCUMENT = Path(__file__).parents[2] / "docs" / "explanation" / "reliability.md"


def stated(label: str) -> float:
    """Return the factor of a row of the document's table."""
    found = re.search(rf"^\| {re.escape(label)} \| (\d+) ", DOCUMENT.read_text(), re.MULTILINE)
    assert found, f"no factor is stated for {label}"
    return float(found[1])


def _tar(members: Iterator[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _records(*features: dict[str, Any]) -> Callable[[Path], Any]:
    image = {"image/encoded": [b"x"], "image/class/label": [1]}
    return lambda path: write_records(path, [write_example(image | more) for more in features])


def _pack(path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    split = ObjectSamples([(buffer.getvalue(), 0), (buffer.getvalue(), 1)] * 40)
    write_pack(path, ["a", "b"], (split, split), (8, 90), 1)


def _npz(images: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, images=images, labels=(np.arange(len(images)) % 3).astype(np.uint8))
    return buffer.getvalue()


Write = bytes | Callable[[Path], Any]
_BOXES = {f"image/object/bbox/{side}": Floats([0.25] * 5000) for side in ("xmin", "ymin", "xmax", "ymax")}
# (label of the document, the file that costs most for its size, the reader)
CASES: list[tuple[str, Write, Callable[[Path], Any]]] = [
    ("CSV", b"path,label\n" + b"a,b\n" * 8000, lambda path: read_csv_set(path, str(path.parent), 0.5)),
    ("CSV", b"path,label\n" + b"," * 100000, lambda path: read_csv_set(path, str(path.parent), 0.5)),
    ("tar", _tar((f"{n}.jpg", b"") for n in range(1000)), lambda path: _make_index([path], ())),
    ("tar", _tar((f"{n // 2}.{'cj'[n % 2]}", b"1") for n in range(1000)), lambda path: _make_index([path], ())),
    ("class lists", b"a\n" * 50000, read_names),
    ("class lists", b"a\tb\n" * 25000, read_metadata),
    ("class lists", b"a,0,0,1,1\n" * 4000, read_boxes),
    ("TFRecord, Example", _records(*[{}] * 200), lambda path: index_records([path], IMAGENET, ())),
    ("TFRecord, Example", _records(_BOXES), lambda path: index_records([path], IMAGENET, ())),
    ("TFRecord, Example", _records({"f": [b""] * 20000}), lambda path: index_records([path], IMAGENET, ())),
    ("packed", _pack, open_pack),
    ("`.npz`", _npz(np.zeros((500, 32, 32, 3), np.uint8)), read_npz_set),
    ("`.npz`", _npz(np.zeros((50000, 1, 1), np.uint8)), read_npz_set),
    ("CIFAR binary", bytes(3074 * 50), lambda path: read_binary(path, CIFAR100, 50)),
    ("JSON of any kind", b"[" + b"[]," * 30000 + b"0]", lambda path: parse_json(path.read_bytes())),
    (
        "`features.json`",
        json.dumps({"featuresDict": {"features": {str(n): {} for n in range(10000)}}}).encode(),
        lambda path: tfds_schema(path.parent),
    ),
]


@pytest.mark.parametrize(("label", "write", "read"), CASES, ids=[f"{row[0]}-{n}" for n, row in enumerate(CASES)])
def test_memory_is_within_the_stated_factor(
    tmp_path: Path, label: str, write: Write, read: Callable[[Path], Any]
) -> None:
    path = tmp_path / "features.json"
    if isinstance(write, bytes):
        path.write_bytes(write)
    else:
        write(path)
    tracemalloc.start()
    try:
        with suppress(HeadraceError):
            read(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = path.stat().st_size
    assert size > 10_000, "small files say nothing: Python itself needs some memory"
    assert most <= stated(label) * size + 100_000, f"{most / size:.1f} times the file"


def test_a_compressed_npz_is_bounded_by_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 times its size: what it says is compared with half of the machine's memory before anything is read."""
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, images=np.zeros((100, 64, 64, 3), np.uint8), labels=np.zeros(100, np.int64))
    real = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 400}
    monkeypatch.setattr("headrace.data.sets.formats.npz.os.sysconf", real.__getitem__)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="half of what this machine has"):
            read_npz_set(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_parquet_file_of_more_rows_or_bytes_than_plausible_is_refused(tmp_path: Path) -> None:
    """Equal values take no room: 150 kB may stand for twenty million rows, or 10 kB for an image of 300 MB."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = pa.table({"image": pa.array([b"x"] * 500_000), "label": pa.array([0] * 500_000)})
    large = pa.table({"image": pa.array([bytes(20 << 20)]), "label": pa.array([0])})
    for number, table in enumerate((rows, large)):
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(table, path, compression="zstd")
        before = pa.total_allocated_bytes()
        with pytest.raises(DataError, match="but says that it holds"):
            read_parquet_set(path, 1 << 30)
        assert pa.total_allocated_bytes() <= before
    good = tmp_path / "good.parquet"
    noise = [np.random.default_rng(n).bytes(500) for n in range(50)]
    parquet.write_table(pa.table({"image": pa.array(noise), "label": pa.array([0, 1] * 25)}), good)
    assert len(read_parquet_set(good, 1 << 30).train) == 50
