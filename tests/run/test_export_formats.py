"""Exports with preprocessing and in float16, compared with validation on JPEG files, and what a failed check leaves."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from PIL import Image

from headrace.config.load import Resolved
from headrace.config.schema import Config
from headrace.core.errors import CheckpointError, ConfigError, DataError
from headrace.model.composite import Chain
from headrace.model.layers import Conv, Dense, GlobalAveragePool, Relu
from headrace.model.network import Network
from headrace.model.norm import Norm
from headrace.run.check_images import check_images, network_input
from headrace.run.exports import onnx, write
from headrace.run.exports.values import ExportOptions
from headrace.run.exports.whole_network import as_function
from headrace.run.exports.write import export_model
from headrace.run.prediction import read_image
from headrace.weights.input_form import InputForm
from headrace.weights.weights import Weights

runtime = pytest.importorskip("onnxruntime")
SIZE, NAMES = 24, ('a "quoted" <class>', "Käfer", "c")
SIDES = [(30, 41), (57, 33), (24, 24), (27, 27), (15, 19), (200, 61)]  # the last is decoded at a fraction of its size
BLOCKS = (
    ("stem", Chain((("conv", Conv(channels=8)), ("bn", Norm()), ("relu", Relu())))),
    ("pool", GlobalAveragePool()),
    ("head", Dense(features=3, logits=True)),
)


def drawn(tree, rng):
    return jax.tree.map(lambda array: (array + rng.uniform(0.1, 0.6, array.shape)).astype(np.float32), tree)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A network with drawn weights, as if loaded from a checkpoint whose dataset is gone."""
    network = Network(name="mine", blocks=BLOCKS, input_hwc=(SIZE, SIZE, 3), num_classes=3)
    rng = np.random.default_rng(3)
    params, stats = (drawn(tree, rng) for tree in network.init(0))
    form = InputForm(
        image_hwc=network.input_hwc,
        normalization="per-channel",
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.3, 0.25),
        shorter_side=27,
        antialias=True,
    )
    folder = tmp_path_factory.mktemp("gone")
    config = Config()
    config = replace(config, data=replace(config.data, dataset="folder", dataset_path=str(folder / "nothing")))
    return Weights(
        network=network,
        params=params,
        stats=stats,
        origin="step_1",
        path=folder / "step_1",
        step=1,
        epoch=1.0,
        class_names=NAMES,
        input_form=form,
        resolved=Resolved(config=config, origins={}),
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """JPEG files of several sizes with smooth content, as photographs have."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number, (height, width) in enumerate(SIDES):
        coarse = Image.fromarray(rng.integers(0, 256, (7, 9, 3)).astype(np.uint8))
        image = coarse.resize((width, height), Image.Resampling.BICUBIC)
        image.save(folder / f"{number}.jpg", quality=95, subsampling=0)
    return sorted(folder.iterdir())


def validation_logits(model, file):
    view = np.zeros((1, SIZE, SIZE, 3), np.uint8)
    assert read_image(model.form, file, view[0]) == ""
    return np.asarray(jax.jit(as_function(model, False))(network_input(view, model.form))["logits"])[0]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_pixels_of_any_size_go_in_and_scores_of_named_classes_come_out(model, files, tmp_path, dtype):
    options = ExportOptions(format="onnx", with_preprocessing=True, dtype=dtype, check_images=tuple(files))
    made = export_model(model, tmp_path, options)
    assert "with onnxruntime on 6 given images" in made.remark
    session = runtime.InferenceSession(str(made.path), providers=["CPUExecutionProvider"])
    assert [each.shape for each in session.get_inputs()] == [["batch", "height", "width", 3]]
    assert json.loads(session.get_modelmeta().custom_metadata_map["class_names"]) == list(NAMES)
    limit = 2e-2 if dtype == "float16" else 1e-2
    for file in files:
        pixels = np.asarray(Image.open(file))[None]
        logits, shares = session.run(["logits", "probabilities"], {"images": pixels})
        expected = validation_logits(model, file)
        if file.stem != "5":
            np.testing.assert_allclose(logits[0], expected, atol=limit * np.abs(expected).max())
        else:  # another decoding, so other pixels, by a few levels
            np.testing.assert_allclose(logits[0], expected, atol=5e-2 * np.abs(expected).max())
        assert shares.sum() == pytest.approx(1, abs=1e-5)
    along = json.loads(made.description.read_text())
    assert along["check"]["images"] == "6 given images"
    assert along["dtype"] == dtype
    assert along["class_names"] == list(NAMES)


def test_stablehlo_takes_images_of_any_size_in_half_precision(model, files, tmp_path):
    options = ExportOptions(
        format="stablehlo", with_preprocessing=True, dtype="float16", check_images=(files[0].parent,)
    )
    made = export_model(model, tmp_path / "net", options)
    call = jax.export.deserialize(bytearray(made.path.read_bytes())).call
    logits = call(np.asarray(Image.open(files[0]))[None])["logits"]
    expected = validation_logits(model, files[0])
    np.testing.assert_allclose(logits[0], expected, atol=2e-2 * np.abs(expected).max())


def test_weights_in_half_precision_are_half_as_large_and_checked(model, tmp_path):
    whole, half = (
        export_model(model, tmp_path / f"{dtype}.safetensors", ExportOptions(format="safetensors", dtype=dtype))
        for dtype in ("float32", "float16")
    )
    assert "generated images (the run's dataset is not at hand" in half.remark
    assert "differ by at most 0" in whole.remark
    values = model.network.total_cost().params + 16
    assert whole.path.stat().st_size - half.path.stat().st_size == pytest.approx(2 * values, abs=64)


def test_a_failed_check_leaves_nothing_and_the_old_file_as_it_was(model, tmp_path, monkeypatch):
    target = tmp_path / "net.onnx"
    target.write_bytes(b"old")
    wrong = replace(model, params=model.network.init(5)[0])
    make = onnx.make
    monkeypatch.setattr(onnx, "make", lambda _, path, options: make(wrong, path, options))
    with pytest.raises(CheckpointError, match="does not compute what mine does"):
        export_model(model, target, ExportOptions(format="onnx"))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("net.onnx", b"old")]


def test_a_full_disk_leaves_nothing(model, tmp_path, monkeypatch):
    def full(path, data):
        path.write_bytes(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "write_synced", full)
    with pytest.raises(CheckpointError, match="No space left"):
        export_model(model, tmp_path / "net.safetensors", ExportOptions(format="safetensors"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"format": "safetensors", "with_preprocessing": True}, "no meaning for --format safetensors"),
        ({"format": "torch-names", "input": "float"}, "choose --format onnx or stablehlo"),
        ({"format": "onnx", "names": "timm"}, "choose --format torch-names"),
        ({"format": "onnx", "platforms": ("cpu",)}, "choose --format stablehlo"),
        ({"format": "onnx", "with_preprocessing": True, "input": "float"}, "Leave one of them out"),
        ({"format": "onnx", "dtype": "int8"}, "no type 'int8'"),
    ],
)
def test_requests_that_cannot_work_are_refused(model, tmp_path, options, told):
    with pytest.raises(ConfigError, match=told):
        export_model(model, tmp_path, ExportOptions(**options))
    with pytest.raises(DataError, match="no image"):
        export_model(model, tmp_path, ExportOptions(format="onnx", check_images=(tmp_path,)))
    assert list(tmp_path.iterdir()) == []


def test_generated_images_stand_in_for_validation_images_that_are_all_broken(model, tmp_path):
    for split in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "broken.jpg").write_bytes(b"\xff\xd8 not an image")
    data = replace(model.config.data, dataset_path=str(tmp_path))
    resolved = Resolved(config=replace(model.config, data=data), origins={})
    found = check_images(replace(model, resolved=resolved))
    assert found.what == "8 generated images (none of the validation images tried can be read)"
