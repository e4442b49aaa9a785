"""Whose network a plain file of weights holds: by its names, in every way to it; what they leave open is refused."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import lax
from PIL import Image

from headrace import Model
from headrace.cli.main import main
from headrace.config.load import config_from, resolve_code
from headrace.core.errors import ConfigError, DataError
from headrace.model.network import weights_like
from headrace.run.choices import with_definition
from headrace.run.named_weights import load_named
from headrace.run.read_weights import read_weights
from headrace.weights.convert import export_names, flat_weights
from headrace.weights.definitions import find_definition
from headrace.weights.name_schemes import pair_names
from headrace.weights.name_tables import SCHEMES
from headrace.weights.torch_file import write_torch_file
from tests.model.build import network
from tests.weights.test_convert_load import torch_resnet

CLASSES = ("ant", "bee", "cow")
SIZE = 32
MEAN = np.array([0.485, 0.456, 0.406], np.float32).reshape(1, 1, 1, 3)
STD = np.array([0.229, 0.224, 0.225], np.float32).reshape(1, 1, 1, 3)


@jax.jit
def torch_resnet10(w, images):
    """Compute a ResNet of a unit in each group by torch's definition: NCHW, equal padding, epsilon 1e-5."""

    def conv(x, name, stride, pad):
        return lax.conv_general_dilated(x, w[f"{name}.weight"], (stride, stride), ((pad, pad), (pad, pad)))

    def norm(x, name):
        weight, bias, mean, variance = (
            w[f"{name}.{part}"].reshape(1, -1, 1, 1) for part in ("weight", "bias", "running_mean", "running_var")
        )
        return (x - mean) / (variance + 1e-5) ** 0.5 * weight + bias

    x = jax.nn.relu(norm(conv(((images / 255 - MEAN) / STD).transpose(0, 3, 1, 2), "conv1", 2, 3), "bn1"))
    x = lax.reduce_window(x, -np.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1)))
    for group in range(1, 5):
        at, stride = f"layer{group}.0", 1 if group == 1 else 2
        y = jax.nn.relu(norm(conv(x, f"{at}.conv1", stride, 1), f"{at}.bn1"))
        y = norm(conv(y, f"{at}.conv2", 1, 1), f"{at}.bn2")
        short = norm(conv(x, f"{at}.downsample.0", stride, 0), f"{at}.downsample.1") if group > 1 else x
        x = jax.nn.relu(y + short)
    return x.mean((2, 3)) @ w["fc.weight"].T + w["fc.bias"][None]


@pytest.fixture(scope="module")
def weights():
    arrays = torch_resnet((1, 1, 1, 1), (64, 128, 256, 512), 1, len(CLASSES))
    return {name: a * np.float32(0.03) if name.endswith("conv1.weight") else a for name, a in arrays.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, weights):
    """A folder with photos in classes, and the weights as a plain file in torch's names."""
    folder, rng = tmp_path_factory.mktemp("here"), np.random.default_rng(3)
    for part, count in (("train", 2), ("val", 8)):
        for name in CLASSES:
            (folder / "photos" / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (8, 8, 3)).astype(np.uint8).repeat(4, 0).repeat(4, 1)
                Image.fromarray(pixels).save(folder / "photos" / part / name / f"{number}.png")
    (folder / "plain.pth").write_bytes(write_torch_file(weights))
    return folder


@pytest.fixture(scope="module")
def photos(folder, weights):
    """The files of the validation photos, and their logits by torch's definition."""
    files = sorted((folder / "photos/val").rglob("*.png"))
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    return files, np.asarray(torch_resnet10({k: v for k, v in weights.items() if v.ndim}, pixels)), pixels


def assert_close(found, wanted):
    assert np.abs(found - wanted).max() < 2e-5 * np.abs(wanted).max()


def test_a_model_of_a_plain_file_gives_torchs_logits(folder, photos, capsys):
    files, wanted, pixels = photos
    model = Model("resnet10", weights=folder / "plain.pth", input_shape=(SIZE, SIZE, 3), eval_resize_size=SIZE)
    assert (
        f"note: model_dialect is torchvision, chosen by the names in {folder / 'plain.pth'}" in capsys.readouterr().err
    )
    assert_close(model.logits(pixels), wanted)
    assert_close(model.logits([str(file) for file in files]), wanted)
    assert_close(model.logits(folder / "photos/val"), wanted)
    assert model.network.num_classes == 3
    with pytest.raises(DataError, match=r"missing\.png: the file does not exist\."):
        model.logits(["missing.png", files[0]])
    quiet = Model("resnet10", weights=folder / "plain.pth", progress="none")
    assert (quiet.config.model.model_dialect, capsys.readouterr().err) == ("torchvision", "")
    # what was saved, or exported, is the same network
    model.save(folder / "saved")
    assert_close(Model.load(folder / "saved").logits(pixels), wanted)


def test_every_command_takes_the_network_of_the_file(folder, photos, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    _, wanted, pixels = photos
    right = wanted.argmax(1) == np.repeat(np.arange(3), 8)
    note = "model_dialect is torchvision, chosen by the names in plain.pth"
    how = f"--model resnet10 --dataset-path photos --image-size {SIZE} --eval-resize-size {SIZE}".split()
    assert main(["convert", "plain.pth", "--model", "resnet10", "--image-size", f"{SIZE}", "--out", "converted"]) == 0
    assert f"note: {note}\n" in capsys.readouterr().err
    assert_close(Model.load("converted").logits(pixels), wanted)
    assert main(["validate", "--weights", "plain.pth", *how, "--json"]) == 0
    out, err = capsys.readouterr()
    assert f"note: {note}\n" in err
    assert json.loads(out.splitlines()[-1])["raw"]["top1"] == pytest.approx(right.mean())
    assert main(["train", "--no-training", "--weights", "plain.pth", *how, "--output", "run"]) == 0
    assert note in Path("run/log.txt").read_text()
    assert_close(Model.load("run").logits(pixels), wanted)
    saved = json.loads(Path("run/config.json").read_text())
    assert saved["origins"]["model_dialect"] == {"kind": "chosen", "where": "by the names in plain.pth"}
    capsys.readouterr()
    assert main(["configs", "show", "images", "--weights", "plain.pth", "--model", "resnet10"]) == 0
    assert re.search(r"model_dialect: torchvision +# chosen by the names in plain.pth", capsys.readouterr().out)


def test_prefixes_of_names_are_left_out_and_named(folder, weights, photos, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    _, wanted, pixels = photos
    for prefix, head in (
        *(("module.",) * 2, ("model.backbone.",) * 2, ("_orig_mod.module.",) * 2, ("net.",) * 2),
        ("backbone.", "head."),  # MMPretrain's
    ):
        arrays = {(head if name.startswith("fc") else prefix) + name: a for name, a in weights.items()}
        arrays |= {"n_averaged": np.array(3)}  # an average's counter has none
        Path("wrapped.pth").write_bytes(write_torch_file(arrays))
        assert main(["convert", "wrapped.pth", "--model", "resnet10", "--image-size", f"{SIZE}", "--out", "w"]) == 0
        first, loaded = capsys.readouterr().out.splitlines()[:2]
        both = " or ".join(dict.fromkeys((prefix, head)))
        assert first == f"weights from wrapped.pth, names as in torchvision, each after {both}:"
        assert loaded.split()[1:3] == ["62", "tensors"]
    assert_close(Model.load("w").logits(pixels), wanted)
    two = {f"{part}.{name}": a for part in ("student", "teacher") for name, a in weights.items()}
    Path("two.pth").write_bytes(write_torch_file(two))
    assert main(["convert", "two.pth", "--model", "resnet10", "--out", "x"]) == 2
    assert "Only 0.0 % of resnet10's weights are in two.pth" in capsys.readouterr().err


def names(model: str, whose: str, names: str = "", **options):
    """Return the shapes of a state dict of a network, in the names of a library."""
    net = network(model, num_classes=7, model_dialect=whose, **options)
    found = export_names(*net.init(0), names=names or whose)[1]
    return {name: array.shape for name, array in found.items()}


def found_for(model: str, shapes, **options):
    """Return what the names say, with these options asked for."""
    return find_definition(config_from({"model_name": model, **options}).model, set(options), shapes, "w.pth")


@pytest.mark.parametrize(
    ("model", "whose", "says"),
    [
        ("resnet10", "torchvision", "torchvision"),
        ("efficientnet_b0", "torchvision", "torchvision"),
        ("mobilenet_v3_small", "torchvision", "torchvision"),
        ("mobilenet_v2", "torchvision", ""),  # the same network in all of them
        ("mobilenet_v2", "timm", ""),
        ("regnet_y_400mf", "timm", ""),
        ("densenet121", "torchvision", ""),
        ("seresnet18", "timm", ""),
    ],
)
def test_names_say_whose_network_it_is(model, whose, says):
    shapes = names(model, whose)
    assert found_for(model, shapes) == ({"model_dialect": says} if says else {})
    # asked for in so many words, it is as well; so is another that computes the same
    assert found_for(model, shapes, model_dialect=whose) == {}
    if model == "resnet10":
        assert found_for(model, shapes, model_dialect="timm") == {}


def test_regnets_of_timm_and_torchvision_have_other_widths():
    shapes = names("regnet_y_800mf", "torchvision")
    assert found_for("regnet_y_800mf", shapes) == {"model_dialect": "torchvision"}


@pytest.mark.parametrize(
    ("model", "other", "told"),
    [
        ("efficientnet_b0", "reference", "that timm calls tf_"),
        ("efficientnet_lite0", "reference", "that timm calls tf_"),
        ("mobilenet_v3_large", "keras", "that timm calls tf_"),
    ],
)
def test_two_networks_of_the_same_names_are_refused_unless_one_is_asked_for(model, other, told):
    shapes = names(model, "timm")
    with pytest.raises(ConfigError, match=f"w.pth holds one of 2 networks {model}") as raised:
        found_for(model, shapes)
    for text in ("--model-dialect timm", f"--model-dialect {other}", told):
        assert text in raised.value.rule
    for dialect in ("timm", other):
        assert found_for(model, shapes, model_dialect=dialect) == {}


def test_timm_has_the_small_efficientnet_v2_as_tf_alone():
    assert found_for("efficientnet_v2_b0", names("efficientnet_v2_b0", "reference", "timm")) == {}


def test_cifar_resnets_need_their_shortcut_unless_the_names_show_it():
    shapes = names("cifar_resnet8", "torchvision", "common")
    with pytest.raises(ConfigError, match="holds one of 2 networks cifar_resnet8") as raised:
        found_for("cifar_resnet8", shapes)
    assert "--model-dialect torchvision --shortcut pad-end (with zero channels at the end)" in raised.value.rule
    assert found_for("cifar_resnet8", shapes, shortcut="pad-end") == {"model_dialect": "torchvision"}
    assert found_for("cifar_resnet8", shapes, model_dialect="torchvision") == {}
    projected = names("cifar_resnet8", "torchvision", "common", shortcut="projection")
    assert "layer2.0.downsample.0.weight" in projected
    assert found_for("cifar_resnet8", projected) == {"model_dialect": "torchvision", "shortcut": "projection"}
    deep = names("cifar_resnet29", "torchvision")  # bottlenecks
    assert found_for("cifar_resnet29", deep) == {"model_dialect": "torchvision"}


def test_another_dialect_than_the_names_is_refused(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    convert = ["convert", "plain.pth", "--model", "resnet10", "--model-dialect", "keras", "--out", "another"]
    assert main(convert) == 2
    error = capsys.readouterr().err
    assert "model_dialect keras is asked for, but the names in plain.pth are those of torchvision." in error
    assert "remedy: Leave --model-dialect out." in error
    assert not Path("another").exists()
    with pytest.raises(ConfigError, match="model_dialect reference is asked for, but the names"):
        Model("resnet10", weights="plain.pth", model_dialect="reference")
    with pytest.raises(ConfigError, match="is of a network with another one"):
        with_definition(resolve_code({"weights": "resnet50-11ad3fa6.pth", "model_dialect": "keras"}))
    given = {"model_name": "resnet10", "weights": "plain.pth", "model_dialect": "keras", "init_min_loaded": 0}
    (warning,) = with_definition(resolve_code(given)).warnings
    assert "model_dialect keras is asked for, but the names in plain.pth" in warning
    assert main([*convert, "--init-min-loaded", "0"]) == 0, "0 accepts any file"
    assert "warning: model_dialect keras is asked for" in capsys.readouterr().err


def test_a_file_of_ours_that_lost_its_description_shows_its_projections():
    """No library has a shortcut with weights in a ResNet's first group of basic units."""
    shapes = names("resnet10", "reference", "torchvision")
    assert "layer1.0.downsample.0.weight" in shapes
    assert found_for("resnet10", shapes) == found_for("resnet10", shapes, model_dialect="reference") == {}


def test_a_file_of_another_network_keeps_its_error(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["convert", "plain.pth", "--model", "mobilenet_v2", "--out", "x"]) == 2
    assert "Only 0.0 % of mobilenet_v2's weights are in plain.pth" in capsys.readouterr().err
    assert main(["convert", "nowhere.pth", "--model", "resnet10", "--out", "x"]) == 2
    assert "There is no nowhere.pth" in capsys.readouterr().err


def test_a_fit_from_a_plain_file_says_so_and_keeps_it(folder, photos, monkeypatch):
    monkeypatch.chdir(folder)
    options = {"input_shape": (SIZE, SIZE, 3), "eval_resize_size": SIZE, "progress": "none"}
    model = Model("resnet10", weights="plain.pth", **options)
    run = model.fit("photos", epochs=1, micro_batch_size=6, learning_rate=1e-9, validation=False, run_name="fitted")
    assert "model_dialect is torchvision, chosen by the names in plain.pth" in (run.directory / "log.txt").read_text()
    assert model.config.model.model_dialect == "torchvision"
    assert (
        Model.load(run.directory).network
        == model.network
        == network("resnet10", num_classes=3, image=(SIZE, SIZE, 3), model_dialect="torchvision")
    )


def test_names_of_efficientnet_pytorch_are_those_of_tensorflows_network():
    net = network("efficientnet_b0", num_classes=5)
    names, arrays = export_names(*net.init(3), names="efficientnet_pytorch")
    assert names == "efficientnet_pytorch"
    # as that package names them: blocks in one sequence, the first without an expansion
    assert arrays["_conv_stem.weight"].shape == (32, 3, 3, 3)
    assert arrays["_blocks.0._depthwise_conv.weight"].shape == (32, 1, 3, 3)
    assert "_blocks.0._expand_conv.weight" not in arrays
    assert arrays["_blocks.1._expand_conv.weight"].shape == (96, 16, 1, 1)
    assert arrays["_blocks.15._se_reduce.bias"].shape == (48,)
    assert arrays["_blocks.15._project_conv.weight"].shape == (320, 1152, 1, 1)
    assert arrays["_bn1.running_var"].shape == (1280,)
    shapes = {name: array.shape for name, array in arrays.items()}
    assert found_for("efficientnet_b0", shapes) == found_for("efficientnet_b0", shapes, model_dialect="reference") == {}
    with pytest.raises(ConfigError, match=r"the names in w\.pth are those of efficientnet_pytorch"):
        found_for("efficientnet_b0", shapes, model_dialect="timm")


def test_the_tensors_of_a_checkpoint_bring_its_network_unless_they_are_alone(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(folder / "plain.pth"), "--model", "resnet10", "--out", "made"]) == 0
    assert load_named("made/state.safetensors").network == read_weights(Path("made")).only().network
    shutil.copy("made/state.safetensors", "alone.safetensors")
    with pytest.raises(ConfigError, match=r"network of alone\.safetensors is not known"):
        load_named("alone.safetensors")
    # torchvision's lacks a projection that Keras' and ours have, and timm's is the same
    said = load_named("alone.safetensors", {"model_name": "resnet10"}).remarks
    assert said == ("note: model_dialect is torchvision, chosen by the names in alone.safetensors",)
    shapes = {name: array.shape for name, array in flat_weights(*weights_like(network("resnet26"))).items()}
    with pytest.raises(ConfigError, match="holds one of 3 networks resnet26, and its names, those of headrace, do not"):
        found_for("resnet26", shapes)
    assert found_for("resnet26", shapes, model_dialect="keras") == {}


def test_names_of_keras_say_that_it_is_keras():
    for model, says in (("resnet50", "keras"), ("mobilenet_v2", "keras"), ("efficientnet_b0", "")):
        ours = flat_weights(*weights_like(network(model, model_dialect="keras")))
        schemes = [scheme for scheme in SCHEMES if scheme.name == "keras"]
        pairs = max((pair_names(scheme, ours) for scheme in schemes), key=len)
        shapes = {pair.theirs: pair.dim_order.write(np.zeros(ours[name].shape)).shape for name, pair in pairs.items()}
        assert len(shapes) == len(ours)
        assert found_for(model, shapes) == ({"model_dialect": says} if says else {})


def test_a_network_whose_head_is_not_in_the_file_says_so(folder, weights, photos, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    headless = {name: array for name, array in weights.items() if not name.startswith("fc.")}
    Path("headless.pth").write_bytes(write_torch_file(headless))
    told = "warning: 2 tensors of the network are not in {}, and are as before any training: predictions/bias, predict"
    model = Model("resnet10", weights="headless.pth", input_shape=(SIZE, SIZE, 3), num_classes=3)
    assert "warning" not in capsys.readouterr().err, "a fit is about to train it"
    model.logits(photos[2])
    model.logits(photos[2])
    assert capsys.readouterr().err.count(told.format("headless.pth")) == 1
    assert main(["convert", "headless.pth", "--model", "resnet10", "--out", "h"]) == 0
    assert told.format("headless.pth") in capsys.readouterr().err
    Model("resnet10", weights="plain.pth", input_shape=(SIZE, SIZE, 3), num_classes=5).logits(photos[2])
    assert told.format("plain.pth") in capsys.readouterr().err
