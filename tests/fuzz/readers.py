"""The readers that are fuzzed: a good file of each kind, and the function that reads it."""

import importlib.util
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import load as load_safetensors

from headrace.config.yaml_blocks import read_blocks
from headrace.core.errors import HeadraceError
from headrace.core.json_text import parse_json
from headrace.core.tensor_file import write_safetensors
from headrace.data.decoding.image import BadImage, decode, read_header
from headrace.data.sets.build_tfrecords import read_boxes, read_metadata
from headrace.data.sets.catalog import CIFAR100, MNIST
from headrace.data.sets.cifar import read_batch_pickle, read_binary, read_class_names
from headrace.data.sets.formats.csv import read_csv_set
from headrace.data.sets.formats.folder import read_folders
from headrace.data.sets.formats.npz import read_npz_set
from headrace.data.sets.formats.tar import _make_index
from headrace.data.sets.idx_files import read_pair
from headrace.data.sets.indexed_samples import check_rows, read_names, read_npz
from headrace.data.sets.pack import open_pack, write_pack
from headrace.data.sets.table_set import TableSet
from headrace.data.sets.tf_example import Floats, write_example
from headrace.data.sets.tfrecord_file import write_records
from headrace.data.sets.tfrecords import IMAGENET, samples_of, tfds_schema
from headrace.data.sets.tfrecords import _make_index as index_records
from headrace.telemetry.records import parse_record
from headrace.weights.torch_file import write_torch_file
from headrace.weights.weight_file import read_file
from tests.data.image_files import ObjectSamples
from tests.fuzz import structure
from tests.fuzz.h5_process import read_h5

WEIGHTS = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3, np.int64)}
FILES = Path(__file__).parents[1] / "weights" / "files"


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One reader: its good files, how it reads a path, and the errors that are clear ones.

    `check` takes a file's bytes and what was read, and raises AssertionError where that is not in them.
    """

    good: tuple[bytes, ...]
    read: Callable[[Path], Any]
    check: Callable[[bytes, Any], None] | None = None
    mutations: tuple[structure.Mutation, ...] = ()  # that know its structure
    max_bytes: int = 0  # that may be taken for one case; 0: not measured
    clear: tuple[type[BaseException], ...] = (HeadraceError,)
    weight: float = 1  # cases in proportion to it
    max_seconds: float = 10.0  # for one case


def _npz() -> bytes:
    buffer = io.BytesIO()
    column = np.arange(3)
    np.savez(buffer, number=column, offset=column, length=column, labels=column)
    return buffer.getvalue()


def _read_index(path: Path) -> Any:
    columns = read_npz(path.read_bytes(), ("number", "offset", "length", "labels"))
    columns["file"] = columns.pop("number")
    check_rows(columns, [10, 10, 10], 3)
    return columns


def _check_index(data: bytes, columns: dict[str, np.ndarray]) -> None:
    with np.load(io.BytesIO(data), allow_pickle=False) as kept:
        for name, column in columns.items():
            assert np.array_equal(column, kept["number" if name == "file" else name]), name
    rows = zip(*(columns[name].tolist() for name in ("file", "offset", "length", "labels")), strict=True)
    for file, offset, length, label in rows:
        assert file in (0, 1, 2)
        assert 0 <= offset <= offset + length <= 10
        assert 0 <= label < 3


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in (("a.jpg", b"x" * 20), ("a.cls", b"1"), ("b.jpg", b"y"), ("b.json", b'{"label": 0}')):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


PIXELS = np.arange(8 * 9 * 3, dtype=np.uint8).reshape(8, 9, 3)


def _image(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, kind)
    return buffer.getvalue()


def _written(write: Callable[[Path], Any]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "file")
        return (Path(folder) / "file").read_bytes()


def _records() -> bytes:
    box = {f"image/object/bbox/{side}": Floats([0.25]) for side in ("xmin", "ymin", "xmax", "ymax")}
    image = {"image/encoded": [_image("PNG")]} | box
    rows = [image | {"image/class/label": [n], "image/filename": [b"%d" % n]} for n in (1, 2)]
    return _written(lambda path: write_records(path, map(write_example, rows)))


def _contents(samples: Any) -> list[bytes]:
    """Return the images that can be read."""
    found = []
    for number in range(len(samples)):
        with suppress(BadImage):
            found.append(bytes(samples.content(number).image))
    return found


def _read_records(path: Path) -> list[bytes]:
    return _contents(samples_of([path], index_records([path], IMAGENET, ()), IMAGENET))


def _check_records(data: bytes, images: list[bytes]) -> None:
    """Each record has checksums: they are right, and what is read is what was written."""
    assert set(images) <= {_image("PNG")}
    place = intact = 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        assert data[place + 8 : place + 12] == _masked_crc(data[place : place + 8])
        end = place + 12 + length
        intact += data[end : end + 4] == _masked_crc(data[place + 12 : end])
        place = end + 4
    assert len(images) == intact


def _masked_crc(data: bytes) -> bytes:
    """Return a TFRecord's checksum, bit by bit as Castagnoli's polynomial defines it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _read_example(path: Path) -> None:
    """Read a record whose checksum is that of what is in it."""
    write_records(path.with_name("record"), [path.read_bytes()])
    _read_records(path.with_name("record"))


def _pack() -> bytes:
    split = ObjectSamples([(_image("PNG"), 0), (_image("BMP"), 1)])
    return _written(lambda path: write_pack(path, ["a", "b"], (split, split), (8, 90), 1))


def _read_pack(path: Path) -> tuple[list[bytes], list[int], int]:
    pack = open_pack(path)
    splits = pack.train, pack.validation
    labels = [label for samples in splits for label in samples.labels.tolist()]
    return [image for samples in splits for image in _contents(samples)], labels, len(pack.class_names)


def _check_pack(data: bytes, found: tuple[list[bytes], list[int], int]) -> None:
    """Each image and the index has a checksum: what is read is what was written."""
    images, labels, num_classes = found
    place, length, crc = struct.unpack_from("<QQI", data, len(data) - 20 - len(b"end of pack\n"))
    index = data[place : place + length]
    assert zlib.crc32(index) == crc
    with np.load(io.BytesIO(index), allow_pickle=False) as kept:
        assert labels == kept["labels"].tolist()
    assert set(images) <= _packed_images()
    assert all(0 <= label < num_classes for label in labels)


@cache
def _packed_images() -> set[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pack").write_bytes(_pack())
        return set(_read_pack(Path(folder) / "pack")[0])


def _read_features(path: Path) -> None:
    path.replace(path.with_name("features.json"))
    tfds_schema(path.parent)


def _idx(*sizes: int) -> bytes:
    return bytes((0, 0, 8, len(sizes))) + np.array(sizes, ">u4").tobytes() + bytes(int(np.prod(sizes)))


def _read_idx(path: Path) -> None:
    other = path.with_name("labels")
    other.write_bytes(_idx(3))
    zipped = path.with_name("images.gz")
    zipped.write_bytes(path.read_bytes())
    row = replace(MNIST, image_hwc=(4, 4, 1))
    for images, labels in ((path, other), (zipped, other), (other, path)):
        if read_pair(images, labels, row, 3).findings and labels == other and images == path:
            raise HeadraceError("damaged")


def _read_cifar(path: Path) -> None:
    if read_binary(path, CIFAR100, 1).findings:
        raise HeadraceError("damaged")


def _read_lists(path: Path) -> None:
    read_class_names(path, 2)
    text = path.with_suffix(".txt")
    text.write_bytes(path.read_bytes())
    read_class_names(text, 2)
    for read in (read_names, read_metadata, read_boxes):
        read(path)


def _read_csv(path: Path) -> None:
    for number in range(4):
        (path.parent / f"{number}.png").touch()
    read_csv_set(path, str(path.parent), 0.5)


def _read_folders(path: Path) -> None:
    """Make folders and files of the names in a file, a line each, and list them."""
    root = path.with_name("folders")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for line in path.read_bytes().split(b"\n")[:20]:
        place = root / os.fsdecode(line.replace(b"\0", b"").replace(b"..", b"").lstrip(b"/")[:100])
        if place == root:
            continue
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        except OSError:
            continue
    read_folders(root, 0.5)


def _npz_set() -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer, images=PIXELS[None].repeat(4, 0), labels=np.arange(4) % 2, class_names=np.array(["a", "b"])
    )
    return buffer.getvalue()


def _check_npz_set(data: bytes, table: TableSet) -> None:
    with np.load(io.BytesIO(data), allow_pickle=False) as kept:
        images, labels = (
            kept[name] for wanted in ("images", "labels") for name in kept.files if name.lower() == wanted
        )
    labels = labels.reshape(-1)
    assert len(table.train) == len(images) == len(labels)
    assert np.array_equal(table.train.labels, labels)
    assert 0 <= labels.min() <= labels.max() < len(table.class_names)
    for number, image in enumerate(images):
        assert np.array_equal(np.squeeze(table.train.content(number).image), np.squeeze(image))


def _check_image(data: bytes, pixels: np.ndarray) -> None:
    """Compare with Pillow, which reads with other settings but for JPEGs of single pixels' difference."""
    with Image.open(io.BytesIO(data)) as image:
        kind, orientation = image.format, image.getexif().get(274, 1)
        if image.mode not in ("RGB", "L") or orientation != 1:
            return
        wanted = np.asarray(image.convert("RGB")).astype(int)
    assert pixels.shape == wanted.shape
    assert np.abs(pixels - wanted).max() <= (2 if kind in ("JPEG", "MPO") else 0)


def _check_json(data: bytes, value: Any) -> None:
    assert json.dumps(value) == json.dumps(json.loads(data))


def _check_tensors(data: bytes, arrays: dict[str, np.ndarray]) -> None:
    wanted = load_safetensors(data)
    assert set(arrays) == set(wanted)
    assert all(np.array_equal(arrays[name], value, equal_nan=value.dtype.kind == "f") for name, value in wanted.items())


def _h5() -> tuple[bytes, ...]:
    """Return files in the layouts of Keras 2 and 3, none where h5py is not installed."""
    if importlib.util.find_spec("h5py") is None:
        return ()
    import h5py

    def keras_2(path: Path) -> None:
        with h5py.File(path, "w") as out:
            out.attrs["layer_names"] = [b"conv1", b"relu"]
            layer = out.create_group("conv1")
            layer.attrs["weight_names"] = [b"conv1/kernel:0", b"conv1/bias:0"]
            layer["conv1/kernel:0"], layer["conv1/bias:0"] = np.zeros((3, 3, 2, 4), "f4"), np.zeros(4, "f4")
            out.create_group("relu").attrs["weight_names"] = []

    def keras_3(path: Path) -> None:
        with h5py.File(path, "w") as out:
            for name in ("conv2d", "conv2d_1"):
                variables = out.create_group(f"layers/{name}/vars")
                variables["0"], variables["1"] = np.zeros((3, 3, 2, 4), "f4"), np.zeros(4, "f4")

    return _written(keras_2), _written(keras_3)


_MOST_BYTES = 1 << 24
_RECORD = {"kind": "note", "step": 1, "time": 1.0, "text": "ä", "level": "info"}
READERS: dict[str, Reader] = {
    "torch": Reader(
        good=(write_torch_file(WEIGHTS), *(file.read_bytes() for file in sorted(FILES.glob("*.pth")))),
        read=lambda path: read_file(path).arrays,
        weight=4,
    ),
    "safetensors": Reader(
        good=(write_safetensors(WEIGHTS, {"a": [1]}),),
        read=lambda path: read_file(path).arrays,
        check=_check_tensors,
        weight=3,
    ),
    "cifar": Reader(
        good=tuple(pickle.dumps({"data": np.zeros((2, 6), np.uint8), "labels": [1, 2]}, p) for p in (0, 2, 4, 5)),
        read=lambda path: read_batch_pickle(path.read_bytes()),
        clear=(ValueError,),
        weight=4,
    ),
    "json": Reader(
        good=(json.dumps(_RECORD).encode(),),
        read=lambda path: parse_json(path.read_bytes()),
        check=_check_json,
        clear=(ValueError,),
    ),
    "record": Reader(
        good=(json.dumps(_RECORD).encode(),), read=lambda path: parse_record(path.read_bytes()), clear=(ValueError,)
    ),
    "yaml": Reader(good=(b"a: &a {seed: 1}\nb:\n  <<: *a\n  lr: [0.1, 2]\n  m: {x: {y: 1}}\n",), read=read_blocks),
    "index": Reader(
        good=(_npz(),),
        read=_read_index,
        check=_check_index,
        mutations=(structure.npz_values, structure.npz_header),
        max_bytes=_MOST_BYTES,
        clear=(ValueError,),
        weight=2,
    ),
    "tar": Reader(good=(_tar(),), read=lambda path: _make_index([path], ()), weight=2),
    "records": Reader(
        good=(_records(),), read=_read_records, check=_check_records, mutations=(structure.records,), weight=2
    ),
    "example": Reader(
        good=(write_example({"image/encoded": [b"x"], "image/class/label": [1], "image/class/text": [b"a"]}),),
        read=_read_example,
        weight=2,
    ),
    "features": Reader(
        good=(b'{"featuresDict": {"features": {"a": {"pythonClassName": "x.Image"}, "b": {}}}}',),
        read=_read_features,
        clear=(),
    ),
    "packed": Reader(
        good=(_pack(),),
        read=_read_pack,
        check=_check_pack,
        mutations=(structure.packed,),
        max_bytes=_MOST_BYTES,
        weight=2,
    ),
    "idx": Reader(good=(_idx(3, 4, 4),), read=_read_idx),
    "cifar100": Reader(good=(bytes(3074),), read=_read_cifar),
    "lists": Reader(good=(b"a\tb,0,0,1,1\nc\td,0,0,1,1\n",), read=_read_lists),
    "csv": Reader(
        good=(b"path,label,split\n0.png,a,train\n1.png,b,train\n2.png,a,val\n3.png,b,test\n",), read=_read_csv
    ),
    "folders": Reader(good=(b"a/0.png\na/1.png\nb/2.png\nb/c/3.png\nb/x.txt\n",), read=_read_folders),
    "npz": Reader(
        good=(_npz_set(),),
        read=read_npz_set,
        check=_check_npz_set,
        mutations=(structure.npz_values, structure.npz_header),
        max_bytes=_MOST_BYTES,
        weight=2,
    ),
    "image": Reader(
        good=tuple(map(_image, ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM"))),
        read=lambda path: decode(path.read_bytes(), read_header(path.read_bytes())),
        check=_check_image,
        mutations=(structure.jpeg,),
        clear=(BadImage,),
        weight=3,
    ),
}
if good := _h5():
    READERS["h5"] = Reader(good=good, read=read_h5, weight=0.25, max_seconds=60.0)  # a process with a second each
NUMBERS = tuple(struct.pack("<q", number) for number in (0, 1, -1, 2**31, 2**40, 2**62, -(2**63)))
