"""`--weights NAME` in the commands and in Model: the network, its input and its classes come from a hub in the test."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from headrace import Model
from headrace.cli.main import main
from headrace.config.load import config_from
from headrace.core.tensor_file import write_safetensors
from headrace.model.context import Ctx
from headrace.model.zoo import build_network
from headrace.weights import published
from headrace.weights.convert import flat_weights
from tests.core.file_server import serving, without_proxies
from tests.model.build import compute
from tests.weights.hub_server import Hub

NAME = "timm/toy.test"
ROW = "timm/toy.test,toy_model_bn,norm_epsilon=0.5,hf:timm/toy.test,,32,36,bicubic,half,3"
COLUMNS = "name,network,options,source,sha256,image,resize,interpolation,pixels,classes"
CONFIG = {"architecture": "toy", "num_classes": 3, "label_names": ["ant", "bee", "cow"], "pretrained_cfg": {
    "input_size": [3, 32, 32], "crop_pct": 0.88, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic",
}}  # fmt: skip
NETWORK = build_network(config_from({"model_name": "toy_model_bn", "norm_epsilon": 0.5}).model, 3, (32, 32, 3))
PARAMS, STATS = NETWORK.init(5)
CACHES = (published.published_weights, published.published_file, published.network_of)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """Serve the weights of a toy, and put it into the table."""
    with pytest.MonkeyPatch.context() as patch, serving(Hub()) as server:
        folder = tmp_path_factory.mktemp("table")
        (folder / "published.csv").write_text(f"{COLUMNS}\n{ROW}\n")
        patch.setattr(published, "FILES", folder)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        patch.setenv("HF_ENDPOINT", server.url)
        without_proxies(patch)
        for name in ("HF_TOKEN", "HF_HUB_CACHE"):
            patch.delenv(name, raising=False)
        weights = {name: np.asarray(array) for name, array in flat_weights(PARAMS, STATS).items()}
        for repo in (NAME, "me/mine"):
            server.repositories[f"{repo}/model.safetensors"] = write_safetensors(weights, {})
            server.repositories[f"{repo}/config.json"] = json.dumps(CONFIG).encode()
        for cached in CACHES:
            cached.cache_clear()
        yield server
    for cached in CACHES:
        cached.cache_clear()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of three classes, in a training and a validation part; 48x60 pixels."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(3)
    for part, count in (("train", 4), ("val", 6)):
        for name in ("ant", "bee", "cow"):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (6, 6, 3)).astype(np.uint8).repeat(8, 0).repeat(10, 1)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")
    return folder


def expected(file: Path) -> np.ndarray:
    """Return the probabilities by the formulas: bicubic to a shorter side of 36, the centre, -1 to 1, the network."""
    image = Image.open(file).resize((45, 36), Image.Resampling.BICUBIC)
    pixels = np.asarray(image)[2:34, 6:38]
    inputs = (pixels[None] / np.float32(255) - 0.5) / 0.5
    logits, _ = compute(NETWORK, PARAMS, STATS, np.asarray(inputs, np.float32), Ctx(train=False))
    return np.asarray(jax.nn.softmax(logits))[0]


def test_predictions_are_those_of_the_network_with_its_preprocessing(hub, photos, tmp_path, capsys, monkeypatch):
    image = photos / "val/bee/2.png"
    assert main(["predict", "--weights", NAME, str(image), "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    found = {entry["label"]: entry["probability"] for entry in row["predictions"]}
    np.testing.assert_allclose([found[label] for label in range(3)], expected(image), atol=2e-5)
    # the description of a repository, with its classes
    assert main(["predict", "--weights", "hf:me/mine", str(image), "--format", "json"]) == 0
    (other,) = json.loads(capsys.readouterr().out)
    assert [entry["probability"] for entry in other["predictions"]] == pytest.approx(
        [entry["probability"] for entry in row["predictions"]]
    )
    assert {entry["class"] for entry in other["predictions"]} == {"ant", "bee", "cow"}

    # without a network from here on: converted, exported, and used from Python
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["convert", "hf:me/mine", "--out", str(tmp_path / "toy")]) == 0
    assert "toy_model_bn, 3 classes: ant, ..." in capsys.readouterr().out
    assert main(["predict", str(tmp_path / "toy"), str(image), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == [other]
    assert main(["export", "--weights", NAME, "--format", "safetensors", "--out", str(tmp_path / "a.safetensors")]) == 0
    assert "toy_model_bn, weights timm/toy.test" in capsys.readouterr().out
    about = json.loads((tmp_path / "a.safetensors.json").read_text())
    assert (about["interpolation"], about["resize_shorter_side"], about["mean"]) == ("bicubic", 36, [0.5] * 3)
    # a file of ours says what it is, except for options that are not in its description
    model = Model(weights=tmp_path / "a.safetensors", norm_epsilon=0.5)
    np.testing.assert_allclose(model.predict(image).probabilities[0], expected(image), atol=2e-5)
    model = Model(weights="hf:me/mine")
    assert model.network.num_classes == 3
    np.testing.assert_allclose(model.predict(image).probabilities[0], expected(image), atol=2e-5)
    assert model.class_names == ("ant", "bee", "cow")
    assert model.evaluate(photos)["num_samples"] == 18


def test_validation_of_named_weights(hub, photos, tmp_path, capsys):
    files = sorted((photos / "val").rglob("*.png"))
    right = np.mean([("ant", "bee", "cow")[expected(file).argmax()] == file.parent.name for file in files])
    assert main(["validate", "--weights", NAME, "--dataset-path", str(photos), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["raw"]["top1"] == pytest.approx(right)
    two = tmp_path / "two"
    shutil.copytree(photos, two)
    for part in ("train", "val"):
        shutil.rmtree(two / part / "cow")
    assert main(["validate", "--weights", NAME, "--dataset-path", str(two)]) == 2
    assert "with the 2 classes of" in capsys.readouterr().err
    for words in ([], [str(tmp_path), "--weights", NAME]):
        assert main(["validate", *words]) == 2
        assert "Name a run or a checkpoint, or give --weights NAME" in capsys.readouterr().err
        assert main(["export", *words, "--format", "onnx"]) == 2
        assert "Name a run or a checkpoint, or give --weights NAME" in capsys.readouterr().err


def test_fine_tuning_starts_from_named_weights_and_resumes_without_them(hub, photos, tmp_path, capsys, monkeypatch):
    words = f"--weights {NAME} --dataset-path {photos} --micro-batch-size 4 --num-epochs 1 --progress none --lr 0"
    assert main(["train", *words.split(), "--output", str(tmp_path / "run"), "--no-validation"]) == 0
    saved = json.loads((tmp_path / "run/config.json").read_text())
    values, origins = saved["values"], saved["origins"]
    assert (values["weights"], values["model_name"], values["norm_epsilon"]) == (NAME, "toy_model_bn", 0.5)
    assert (values["image_size"], values["eval_resize_size"], values["eval_interpolation"]) == (32, 36, "bicubic")
    assert values["pixel_mean"] == [0.5] * 3
    assert origins["model_name"] == {"kind": "chosen", "where": f"with {NAME}"}
    table = json.loads((tmp_path / "run/init.json").read_text())
    assert (table["source"], {row["status"] for row in table["tensors"]}) == (NAME, {"loaded"})
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    assert main(["resume", str(tmp_path / "run"), "--num-epochs", "2"]) == 0
    # weights of a run bring their network and input as well
    assert main(["convert", str(tmp_path / "run"), "--out", str(tmp_path / "x")]) == 2
    assert "is a run or a checkpoint" in capsys.readouterr().err


def test_a_file_that_does_not_fit_shows_its_names_beside_ours(hub, tmp_path, capsys):
    file = tmp_path / "other.safetensors"
    renamed = {f"backbone.{name.replace('/', '.')}": np.asarray(a) for name, a in flat_weights(PARAMS, STATS).items()}
    file.write_bytes(write_safetensors(renamed, {}))
    assert main(["convert", str(file), "--model", "toy_model_bn", "--out", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert f"Only 0.0 % of toy_model_bn's weights are in {file}" in error
    assert "the network's" in error
    line = next(line for line in error.splitlines() if line.strip().startswith("conv2d_0/conv/kernel"))
    assert line.split()[-2:] == ["backbone.params.conv2d_0.conv.kernel", "3x3x3x4"]
    assert not (tmp_path / "x").exists()
    assert main(["convert", str(file), "--out", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert "The network of" in error
    assert "--model NAME" in error
    assert main(["predict", "--weights", str(file), str(tmp_path)]) == 2
    assert "headrace convert" in capsys.readouterr().err
