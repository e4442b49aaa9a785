"""Keras' files: the layout of version 3, and, where Keras is installed (`make parity`), its own files and logits."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.model.context import Ctx
from headrace.model.zoo import build_network
from headrace.weights.convert import load_into
from headrace.weights.weight_file import read_file


def test_the_weights_of_keras_3_are_read_by_class_and_number(tmp_path):
    h5py = pytest.importorskip("h5py")
    file = tmp_path / "it.weights.h5"
    layers = {
        "conv2d_3": ("conv1_conv", 2),
        "batch_normalization": ("conv1_bn", 4),
        "depthwise_conv2d_1": ("block1a_dwconv", 1),
        "dense": ("predictions", 2),
        "add_2": ("block_add", 0),
    }
    with h5py.File(file, "w") as out:
        for group, (name, count) in layers.items():
            variables = out.create_group(f"layers/{group}/vars")
            variables.attrs["name"] = name
            for number in range(count):
                variables[str(number)] = np.full((number + 1,), len(group) + number, np.float32)
    arrays = read_file(file).arrays
    assert set(arrays) == {
        "conv1_conv/kernel",
        "conv1_conv/bias",
        *(f"conv1_bn/{name}" for name in ("gamma", "beta", "moving_mean", "moving_variance")),
        "block1a_dwconv/depthwise_kernel",
        "predictions/kernel",
        "predictions/bias",
    }
    np.testing.assert_array_equal(arrays["conv1_bn/moving_variance"], np.full(4, len("batch_normalization") + 3))


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("keras"), reason="Keras is not installed")
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("ResNet50", "resnet50"),
        ("EfficientNetB0", "efficientnet_b0"),
        ("MobileNetV2", "mobilenet_v2"),
        pytest.param("EfficientNetV2B0", "efficientnet_v2_b0", marks=pytest.mark.parity),
    ],
)
def test_keras_own_files_compute_what_they_did_there(tmp_path, theirs, ours):
    script = Path(__file__).parent / "keras_side.py"
    subprocess.run([sys.executable, str(script), theirs, str(tmp_path)], check=True, timeout=300, capture_output=True)
    told = np.load(tmp_path / "it.npz")
    config = config_from({"model_name": ours, "model_dialect": "keras", "dataset": "imagenet", "generated_data": True})
    network = build_network(config.model, 1000, (224, 224, 3))
    for name in ("it.h5", "it.weights.h5"):
        found = load_into(network, network.init(0), read_file(tmp_path / name))
        assert (found.loading.scheme, found.loading.share) == ("keras", 1.0)
        logits = network.apply(found.params, found.stats, told["images"], Ctx(train=False))[0]
        assert np.abs(np.asarray(logits) - told["logits"]).max() < 1e-4 * np.abs(told["logits"]).max()
