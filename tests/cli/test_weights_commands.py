"""`headrace predict`, `average` and `export` on a real run, as a user types them."""

import csv
import io
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from headrace.cli.main import main
from headrace.core.errors import ConfigError
from headrace.data.sets.digits import read_digits
from headrace.model.context import Ctx
from headrace.run.exports.whole_network import as_function
from headrace.run.model import Model
from headrace.run.named_weights import load_named
from headrace.run.read_weights import read_weights
from headrace.weights.convert import export_names
from headrace.weights.torch_file import write_torch_file
from headrace.weights.weight_file import read_file
from tests.model.build import compute, network


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run of the toy on the digits, with three checkpoints."""
    folder = tmp_path_factory.mktemp("weights")
    options = "--model-name toy_model_bn --dataset digits --micro-batch-size 32 --num-epochs 3 --bn-momentum 0.9"
    options += ' --optimizer-params {"momentum":0.9} --lr-schedule-params {"initial_learning_rate":0.001}'
    options += f" --weight-updates-per-epoch 20 --progress none --run-name r --log-dir {folder}"
    assert main(["train", "--config", "none", *options.split(" ")]) == 0
    return folder / "r"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """The validation digits as PNG files in folders by class."""
    folder = tmp_path_factory.mktemp("images")
    part = read_digits()["validation"]
    for number, (image, label) in enumerate(zip(part.images, part.labels, strict=True)):
        (folder / str(label)).mkdir(exist_ok=True)
        Image.fromarray(image[:, :, 0]).save(folder / str(label) / f"{number:03d}.png")
    return folder


def test_predictions_of_a_folder_have_the_accuracy_of_validation(run, images, capsys):
    capsys.readouterr()
    assert main(["predict", str(run), str(images), "--format", "json", "--top-k", "3"]) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert len(rows) == 360
    assert [row["true_class"] for row in rows] == [Path(row["file"]).parent.name for row in rows]
    right = [row["predictions"][0]["label"] == int(Path(row["file"]).parent.name) for row in rows]
    assert main(["validate", str(run), "--best", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert np.mean(right) == pytest.approx(report["raw"]["top1"], abs=1e-6)
    accuracy = (
        f"accuracy {100 * np.mean(right):.2f} %: {sum(right)} of 360 images are of the class that their folder names"
    )
    assert captured.err.splitlines()[0] == accuracy
    assert "most confident mistakes:" in captured.err
    assert main(["predict", str(run), str(images)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[360] == accuracy
    assert lines[361].startswith("worst classes (recall): ")
    lines = lines[:360]
    assert not any(" 0.00 %" in line for line in lines)
    assert main(["predict", str(run), "--top-k", "1", str(images)]) == 0, "an option before the images"
    assert capsys.readouterr().out.splitlines()[360] == accuracy
    assert main(["predict", str(run), str(images / "7"), "--format", "csv", "--top-k", "1"]) == 0
    table = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert table[0] == ["file", "class_1", "probability_1", "problem", "true_class"]
    assert {row[4] for row in table[1:]} == {"7"}
    unnamed = next(images.rglob("*.png")).rename(images / "one.png")
    assert main(["predict", str(run), str(unnamed)]) == 0
    assert "accuracy" not in capsys.readouterr().out
    unnamed.rename(images / rows[0]["file"])
    for row in rows[:20]:
        shares = [each["probability"] for each in row["predictions"]]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 1.000001
        assert row["predictions"][0]["class"] == str(row["predictions"][0]["label"])


def test_every_kind_of_image_is_read_and_broken_ones_are_named(run, images, tmp_path, capsys):
    source = Image.open(sorted(images.rglob("*.png"))[0])
    grey, colour = source.convert("L"), source.convert("RGB")
    grey.save(tmp_path / "a.png")
    colour.save(tmp_path / "b.webp", lossless=True)
    colour.save(tmp_path / "c.jpg", quality=100, subsampling=0)
    colour.convert("CMYK").save(tmp_path / "d.jpeg", quality=100)
    turned = colour.transpose(Image.Transpose.ROTATE_90)
    exif = turned.getexif()
    exif[0x0112] = 6  # turn by 90 degrees to the right to see it upright
    turned.save(tmp_path / "e.jpg", quality=100, subsampling=0, exif=exif)
    (tmp_path / "f.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    (tmp_path / "g.jpg").write_text("no image")
    (tmp_path / "notes.txt").write_text("not looked at")
    capsys.readouterr()
    gone = tmp_path / "gone.png"
    assert main(["predict", str(run), str(tmp_path), str(gone), "--format", "csv", "--top-k", "2"]) == 1
    captured = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(captured.out)))
    assert [Path(row["file"]).name for row in rows] == [
        "a.png",
        "b.webp",
        "c.jpg",
        "d.jpeg",
        "e.jpg",
        "f.png",
        "g.jpg",
        "gone.png",
    ]
    good = rows[:5]
    assert len({row["class_1"] for row in good}) == 1
    for row in good:
        assert float(row["probability_1"]) == pytest.approx(float(rows[0]["probability_1"]), abs=0.02)
    assert [bool(row["problem"]) for row in rows] == [False] * 5 + [True] * 3
    assert "3 of 8 images could not be read" in captured.err
    assert "unreadable: " in captured.err
    assert f"missing: {gone}: the file does not exist" in captured.err
    assert captured.err.count("unreadable: ") == 2
    # the suffix says the format; one that contradicts it is refused before anything is predicted
    for name, first in (("x.csv", "file,class_1"), ("x.json", "["), ("x.txt", str(tmp_path)), ("x.out", str(tmp_path))):
        assert main(["predict", str(run), str(tmp_path / "a.png"), "--output", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_text().startswith(first)
    assert main(["predict", str(run), "a.png", "--output", str(tmp_path / "y.csv"), "--format", "json"]) == 2
    assert "A file that ends in .csv has the format csv" in capsys.readouterr().err
    assert not (tmp_path / "y.csv").exists()


def test_bad_requests_are_refused(run, tmp_path, capsys):
    for words, told in (
        (["predict", str(run), str(tmp_path)], "no image"),
        (["predict", str(run)], "required"),
        (["predict", str(tmp_path), "x.png"], "not a run directory"),
        (["predict", str(run), "x.png", "--weights", "ema"], "no averaged weights"),
        (["predict", str(run), "x.png", "--top-k", "0"], "1 or more"),
        (["predict", str(tmp_path / "missing"), "x.png"], "There is no"),
        (["predict", str(run), "x.png", "--output", str(tmp_path / "no" / "x.csv")], "there is no directory"),
        (["predict", str(run), "x.png", "--page", str(tmp_path)], "it is a directory"),
        (["explain", str(run), "x.png", "-o", str(tmp_path / "no" / "x.png")], "there is no directory"),
        (["report", str(run), "-o", str(tmp_path / "no" / "x.html")], "there is no directory"),
        (["lr-find", "--plot", str(tmp_path / "no" / "x.svg")], "there is no directory"),
        (["plan", "--schedule-file", str(tmp_path / "no" / "x.svg")], "there is no directory"),
        (["data", "pack", "--output", str(tmp_path / "x.hrp")], "digits has no image files to pack"),
        (["bench", "--output", str(tmp_path / "no" / "x.jsonl")], "there is no directory"),
        (["export", str(run)], "Give --format onnx or --out model.onnx"),
        (["export", str(run), "--out", str(tmp_path / "x.pdf")], "The format of x.pdf is not known"),
        (["export", str(run), "--format", "pdf"], "pdf"),
        (["export", str(run), "--format", "torch-names"], "No torch library"),
        (["export", str(run), "--format", "stablehlo", "--platforms", "abacus"], "abacus"),
        (["export", str(run), "--format", "onnx", "--out", str(tmp_path / "no" / "x.onnx")], "no directory"),
        (["average", str(run), "--last", "9"], "average of 9"),
        (["average", str(run), "--last", "0"], "count"),
        (["average", str(run), "--filename", "../x"], "slashes"),
    ):
        assert main(words) == 2, words
        assert told in capsys.readouterr().err, words


def test_a_checkpoint_is_read_once(run, images, tmp_path, monkeypatch):
    """It was read and hashed twice: to find out that it is good, and for its weights."""
    image, read_bytes, files = str(min(images.rglob("*.png"))), Path.read_bytes, []
    monkeypatch.setattr(Path, "read_bytes", lambda path: files.append(path.name) or read_bytes(path))
    for use in (
        lambda: main(["predict", str(run), image]),
        lambda: main(["explain", str(run), image, "-o", str(tmp_path / "why.png")]),
        lambda: main(["export", str(run), "--out", str(tmp_path / "net.safetensors")]),
        lambda: Model.load(run),
    ):
        files.clear()
        use()
        assert [files.count(name) for name in ("manifest.json", "state.safetensors")] == [1, 1]


def test_weights_are_validated_in_another_precision(run, capsys):
    """It was refused, as weights of another type than those of the run."""
    losses = []
    for precision in ("32.32", "16.16"):
        assert main(["validate", str(run), "--best", "--json", "--precision", precision]) == 0
        losses.append(json.loads(capsys.readouterr().out.splitlines()[-1])["raw"]["loss"])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_an_average_is_written_validated_and_used(run, images, capsys):
    assert main(["average", str(run), "-N", "2", "--filename", "two"]) == 0
    out = capsys.readouterr().out
    assert "mean 2: the mean of step_00000040, step_00000060" in out
    assert "   mean 2 " in out.splitlines()[-1], "validated under its own label"
    path = run / "averages" / "two"
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["averaged"] == {"mode": "mean", "of": ["step_00000040", "step_00000060"], "weights": "raw"}
    kernels = [
        read_weights(place).only().params["dense"]["kernel"].astype(np.float64)
        for place in (run / "checkpoints" / "step_00000040", run / "checkpoints" / "step_00000060")
    ]
    model = read_weights(path).only()
    assert model.label == "mean 2"
    np.testing.assert_array_equal(model.params["dense"]["kernel"], ((kernels[0] + kernels[1]) / 2).astype(np.float32))
    assert main(["validate", str(path), "--json"]) == 0
    assert "mean 2" in json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["predict", str(path), str(sorted(images.rglob("*.png"))[0])]) == 0


@pytest.mark.parametrize("kind", ["safetensors", "onnx", "stablehlo"])
def test_exports_hold_the_network_and_its_description(run, tmp_path, capsys, kind):
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    out = tmp_path / f"net.{kind}"
    named = [] if kind == "onnx" else ["--format", kind]  # the suffix says it, too
    assert main(["export", str(run), *named, "--out", str(out)]) == 0
    assert "written" in capsys.readouterr().out
    along = json.loads((tmp_path / f"net.{kind}.json").read_text())
    assert along["class_names"] == [str(digit) for digit in range(10)]
    assert along["normalization"] == "zero-one"
    assert along["image_hwc"] == [32, 32, 1]
    model = read_weights(run).only()
    images = np.random.default_rng(1).integers(0, 256, (5, 32, 32, 1)).astype(np.uint8)
    expected = np.asarray(jax.jit(as_function(model, as_pixels=True))(images)["probabilities"])
    if kind == "safetensors":
        found = read_file(out)
        assert found.metadata["class_names"] == along["class_names"]
        np.testing.assert_array_equal(found.arrays["params/dense/kernel"], model.params["dense"]["kernel"])
    elif kind == "stablehlo":
        assert along["platforms"] == ["cpu", "cuda", "tpu"]
        made = jax.export.deserialize(bytearray(out.read_bytes()))
        assert made.platforms == ("cpu", "cuda", "tpu")
        np.testing.assert_allclose(made.call(images)["probabilities"], expected, rtol=1e-5)
    else:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
        found = np.array(session.run(["probabilities"], {"images": images})[0])
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_exported_file_brings_its_network_with_all_options(tmp_path, monkeypatch, capsys):
    """Also as a .pth, whose description is beside it; with another shortcut it would compute something else."""
    monkeypatch.chdir(tmp_path)
    drawn = network("cifar_resnet8", num_classes=3, model_dialect="torchvision", shortcut="pad-end")
    Path("drawn.pth").write_bytes(write_torch_file(export_names(*drawn.init(5))[1]))
    how = ["--model", "cifar_resnet8", "--model-dialect", "torchvision", "--shortcut", "pad-end"]
    assert main(["convert", "drawn.pth", *how, "--out", "checkpoint"]) == 0
    images = jax.numpy.asarray(np.random.default_rng(0).normal(size=(2, 32, 32, 3)), "float32")
    wanted = compute(drawn, *drawn.init(5), images, Ctx(train=False))[0]
    for out, kind in (("out.pth", "torch-names"), ("out.safetensors", "safetensors")):
        assert main(["export", "checkpoint", "--format", kind, "--out", out]) == 0
        model = load_named(out)
        assert (model.config.model.model_dialect, model.config.model.shortcut) == ("torchvision", "pad-end")
        assert model.class_names == ("class 0", "class 1", "class 2")
        found = compute(model.network, model.params, model.stats, images, Ctx(train=False))[0]
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert "model_dialect" not in capsys.readouterr().err, "it came with the file"
    Path("out.pth.json").write_text('{"model": "cifar_resnet8", "options": []}')
    with pytest.raises(ConfigError, match=r"network of out\.pth is not known"):
        load_named("out.pth")
