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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from headrace.config.yaml_blocks import read_blocks
from headrace.core.errors import HeadraceError
from headrace.core.files import parse_json
from headrace.core.tensor_file import write_safetensors
from headrace.data.decoding.image import BadImage, decode, read_header
from headrace.data.sets.build_tfrecords import read_boxes, read_metadata
from headrace.data.sets.catalog import CIFAR100, MNIST
from headrace.data.sets.folder import read_csv_set, read_folders
from headrace.data.sets.indexed_samples import _make_index, check_rows, open_pack, read_names, read_npz, write_pack
from headrace.data.sets.known_sets import read_batch_pickle, read_binary, read_class_names, read_pair
from headrace.data.sets.table_files import read_npz_set
from headrace.data.sets.tfrecords import IMAGENET, Floats, samples_of, tfds_schema, write_example, write_records
from headrace.data.sets.tfrecords import _make_index as index_records
from headrace.telemetry.records import parse_record
from headrace.weights.torch_file import write_torch_file
from headrace.weights.weight_file import read_file
from tests.data.image_files import ObjectSamples
from tests.fuzz.h5_process import read_h5

WEIGHTS = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3, np.int64)}
FILES = Path(__file__).parents[1] / "weights" / "files"


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One reader: its good files, how it reads a path, and the errors that are clear ones."""

    good: tuple[bytes, ...]
    read: Callable[[Path], Any]
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


def _read_records(path: Path) -> None:
    """Read an index, and each record as it is stored and with its checksum made right."""
    index = index_records([path], IMAGENET, ())
    samples = samples_of([path], index, IMAGENET)
    for number in range(len(samples)):
        try:
            samples.content(number)
        except BadImage:
            continue


def _read_example(path: Path) -> None:
    write_records(path.with_name("record"), [path.read_bytes()])
    _read_records(path.with_name("record"))


def _pack() -> bytes:
    split = ObjectSamples([(_image("PNG"), 0), (_image("BMP"), 1)])
    return _written(lambda path: write_pack(path, ["a", "b"], (split, split), (8, 90), 1))


def _read_pack(path: Path) -> None:
    pack = open_pack(path)
    for samples in (pack.train, pack.validation):
        for number in range(len(samples)):
            try:
                samples.content(number)
            except BadImage:
                continue


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


_RECORD = {"kind": "note", "step": 1, "time": 1.0, "text": "ä", "level": "info"}
READERS: dict[str, Reader] = {
    "torch": Reader(
        good=(write_torch_file(WEIGHTS), *(file.read_bytes() for file in sorted(FILES.glob("*.pth")))),
        read=lambda path: read_file(path).arrays,
        weight=4,
    ),
    "safetensors": Reader(
        good=(write_safetensors(WEIGHTS, {"a": [1]}),), read=lambda path: read_file(path).arrays, weight=3
    ),
    "cifar": Reader(
        good=tuple(pickle.dumps({"data": np.zeros((2, 6), np.uint8), "labels": [1, 2]}, p) for p in (0, 2, 4, 5)),
        read=lambda path: read_batch_pickle(path.read_bytes()),
        clear=(ValueError,),
        weight=4,
    ),
    "json": Reader(
        good=(json.dumps(_RECORD).encode(),), read=lambda path: parse_json(path.read_bytes()), clear=(ValueError,)
    ),
    "record": Reader(
        good=(json.dumps(_RECORD).encode(),), read=lambda path: parse_record(path.read_bytes()), clear=(ValueError,)
    ),
    "yaml": Reader(good=(b"a: &a {seed: 1}\nb:\n  <<: *a\n  lr: [0.1, 2]\n  m: {x: {y: 1}}\n",), read=read_blocks),
    "index": Reader(good=(_npz(),), read=_read_index, clear=(ValueError,), weight=2),
    "tar": Reader(good=(_tar(),), read=lambda path: _make_index([path], ()), weight=2),
    "records": Reader(good=(_records(),), read=_read_records),
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
    "packed": Reader(good=(_pack(),), read=_read_pack),
    "idx": Reader(good=(_idx(3, 4, 4),), read=_read_idx),
    "cifar100": Reader(good=(bytes(3074),), read=_read_cifar),
    "lists": Reader(good=(b"a\tb,0,0,1,1\nc\td,0,0,1,1\n",), read=_read_lists),
    "csv": Reader(
        good=(b"path,label,split\n0.png,a,train\n1.png,b,train\n2.png,a,val\n3.png,b,test\n",), read=_read_csv
    ),
    "folders": Reader(good=(b"a/0.png\na/1.png\nb/2.png\nb/c/3.png\nb/x.txt\n",), read=_read_folders),
    "npz": Reader(good=(_npz_set(),), read=read_npz_set),
    "image": Reader(
        good=tuple(map(_image, ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM"))),
        read=lambda path: decode(path.read_bytes(), read_header(path.read_bytes())),
        clear=(BadImage,),
        weight=3,
    ),
}
if good := _h5():
    READERS["h5"] = Reader(good=good, read=read_h5, weight=0.25, max_seconds=60.0)  # a process with a second each
NUMBERS = tuple(struct.pack("<q", number) for number in (0, 1, -1, 2**31, 2**40, 2**62, -(2**63)))
