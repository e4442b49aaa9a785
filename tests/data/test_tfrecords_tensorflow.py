"""Records that we write are read by TensorFlow, and those that it writes by us, where it is installed (`make parity`).

TensorFlow runs in a process of its own.
"""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.cli.main import main
from headrace.data.sets.tfrecords import IMAGENET, index_of, samples_of, shards

from .image_files import encode, smooth, write_classes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parity,
    pytest.mark.skipif(not importlib.util.find_spec("tensorflow"), reason="TensorFlow is not installed"),
]

READ = """
import glob, hashlib, json, sys
import tensorflow as tf
spec = {name: tf.io.FixedLenFeature([], kind) for name, kind in (
    ("image/encoded", tf.string), ("image/class/label", tf.int64), ("image/class/text", tf.string),
    ("image/filename", tf.string), ("image/height", tf.int64), ("image/width", tf.int64))}
spec |= {f"image/object/bbox/{side}": tf.io.VarLenFeature(tf.float32) for side in ("xmin", "ymin", "xmax", "ymax")}
rows = []
for record in tf.data.TFRecordDataset(sorted(glob.glob(sys.argv[1] + "/train-*"))):
    row = tf.io.parse_single_example(record, spec)
    data = row["image/encoded"].numpy()
    pixels = tf.io.decode_jpeg(data, channels=3).numpy()
    rows.append({
        "name": row["image/filename"].numpy().decode(), "label": int(row["image/class/label"]),
        "text": row["image/class/text"].numpy().decode(), "digest": hashlib.sha256(data).hexdigest(),
        "said": [int(row["image/height"]), int(row["image/width"]), 3], "shape": list(pixels.shape),
        "xmin": [round(float(x), 4) for x in tf.sparse.to_dense(row["image/object/bbox/xmin"]).numpy()]})
print(json.dumps(rows))
"""

WRITE = """
import glob, sys
import tensorflow as tf
def feature(kind, values):
    return tf.train.Feature(**{kind: {"bytes_list": tf.train.BytesList, "int64_list": tf.train.Int64List,
                                      "float_list": tf.train.FloatList}[kind](value=values)})
files = sorted(glob.glob(sys.argv[1] + "/*.jpg"))
for shard in range(2):
    with tf.io.TFRecordWriter(f"{sys.argv[1]}/train-{shard:05d}-of-00002") as writer:
        for number, path in list(enumerate(files))[shard::2]:
            writer.write(tf.train.Example(features=tf.train.Features(feature={
                "image/encoded": feature("bytes_list", [open(path, "rb").read()]),
                "image/class/label": feature("int64_list", [number % 3 + 1]),
                "image/class/text": feature("bytes_list", [b"class of %d" % (number % 3)]),
                "image/object/bbox/xmin": feature("float_list", [0.25]),
                "image/object/bbox/ymin": feature("float_list", [0.125]),
                "image/object/bbox/xmax": feature("float_list", [0.5]),
                "image/object/bbox/ymax": feature("float_list", [0.75]),
            })).SerializeToString())
"""


def tensorflow(script: str, place: Path) -> str:
    """Run a script in the Python that has TensorFlow; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-c", script, str(place)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_tensorflow_reads_the_records_that_are_built(tmp_path: Path) -> None:
    root = tmp_path / "set"
    write_classes(root / "train", {"ant": 4, "bee": 5}, hw=(40, 50))
    (root / "train" / "bee" / "png.jpg").write_bytes(encode(smooth(33, 21), "PNG"))
    write_classes(root / "val", {"ant": 1, "bee": 1})
    (tmp_path / "boxes.csv").write_text("2.jpg,0.1,0.2,0.5,0.6\n2.jpg,0.3,0.2,0.5,0.6\n")
    words = ["data", "build", "--dataset-path", str(root), "--output-dir", str(tmp_path / "records")]
    words += ["--train-shards", "3", "--validation-shards", "1", "--boxes", str(tmp_path / "boxes.csv")]
    assert main(words) == 0
    rows = json.loads(tensorflow(READ, tmp_path / "records"))
    files = sorted((root / "train").rglob("*.jpg"))
    assert sorted((row["text"], row["name"]) for row in rows) == [(path.parent.name, path.name) for path in files]
    for row in rows:
        path = root / "train" / row["text"] / row["name"]
        assert row["label"] == {"ant": 1, "bee": 2}[row["text"]]
        assert row["shape"] == row["said"] == ([33, 21, 3] if path.name == "png.jpg" else [40, 50, 3])
        assert row["xmin"] == ([0.1, 0.3] if path.name == "2.jpg" else [])
        if path.name != "png.jpg":
            assert row["digest"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_records_that_tensorflow_writes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "records"
    place.mkdir()
    images = [encode(smooth(30 + number, 40, seed=number)) for number in range(9)]
    for number, data in enumerate(images):
        (place / f"{number}.jpg").write_bytes(data)
    tensorflow(WRITE, place)
    files = shards(place, "train")
    index = index_of(files, IMAGENET)
    samples = samples_of(files, index, IMAGENET)
    order = [*range(0, 9, 2), *range(1, 9, 2)]
    assert index.labels.tolist() == [number % 3 for number in order]
    assert index.class_names == ("class of 0", "class of 1", "class of 2")
    for sample, number in enumerate(order):
        content = samples.content(sample)
        assert content.image == images[number]
        assert np.allclose(content.boxes, [(0.125, 0.25, 0.75, 0.5)])
