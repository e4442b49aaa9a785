"""Weights in and out against torch itself: logits of torchvision, timm and CIFAR models, both ways, loaded strictly.

Slow, and skipped unless HEADRACE_TORCH_PYTHON names a Python with torch, torchvision and timm:
HEADRACE_TORCH_PYTHON=/path/to/python pytest -m slow tests/weights/test_torch_parity.py
"""

import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from headrace.model.context import Ctx
from headrace.weights.convert import export_names, load_into
from headrace.weights.torch_file import write_torch_file
from headrace.weights.weight_file import read_file
from tests.model.build import network

PYTHON = os.environ.get("HEADRACE_TORCH_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="HEADRACE_TORCH_PYTHON is not set")]
# library, its model, ours, image size
CASES = [
    ("torchvision", "resnet18", "resnet18", 64),
    ("torchvision", "resnet50", "resnet50", 64),
    ("timm", "resnet50", "resnet50", 65),
    ("torchvision", "resnext50_32x4d", "resnext50", 64),
    ("torchvision", "efficientnet_b0", "efficientnet_b0", 64),
    ("timm", "efficientnet_b0", "efficientnet_b0", 64),
    ("torchvision", "mobilenet_v2", "mobilenet_v2", 64),
    ("timm", "mobilenetv2_100", "mobilenet_v2", 64),
    ("torchvision", "mobilenet_v3_small", "mobilenet_v3_small", 64),
    ("timm", "mobilenetv3_small_100", "mobilenet_v3_small", 64),
    ("torchvision", "mobilenet_v3_large", "mobilenet_v3_large", 64),
    ("timm", "mobilenetv3_large_100", "mobilenet_v3_large", 64),
    ("common", "20-both", "cifar_resnet20", 32),
    ("common", "20-end", "cifar_resnet20", 32),
]


def torch_side(command: str, library: str, model: str, size: int, folder: Path) -> None:
    script = Path(__file__).with_name("torch_side.py")
    subprocess.run([PYTHON, script, command, library, model, str(size), folder], check=True, timeout=250)


@pytest.mark.parametrize(("library", "model", "name", "size"), CASES, ids=str)
def test_logits_are_those_of_torch_both_ways(tmp_path, library, model, name, size):
    torch_side("make", library, model, size, tmp_path)
    options = {"model_dialect": "torchvision" if library == "common" else library}
    if library == "common":
        options["shortcut"] = f"pad-{model.partition('-')[2]}"
    images, logits = np.load(tmp_path / "images.npy"), np.load(tmp_path / "logits.npy")
    net = network(name, num_classes=logits.shape[1], image=images.shape[1:], **options)
    found = load_into(net, net.init(3), read_file(tmp_path / "weights.pth"), min_share=1.0)
    assert found.unused == ()
    run = jax.jit(lambda x: net.apply(found.params, found.stats, x, Ctx(train=False))[0])
    ours = np.asarray(run(images))
    print(f"{library} {model}: logits up to {np.abs(logits).max():.3g}, differ by {np.abs(ours - logits).max():.2g}")
    np.testing.assert_allclose(ours, logits, atol=1e-4 * max(1, np.abs(logits).max()))

    scheme, arrays = export_names(found.params, found.stats, "" if library == "common" else library)
    assert scheme == library
    (tmp_path / "back.pth").write_bytes(write_torch_file(arrays))
    torch_side("check", library, model, size, tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "back.npy"), logits)
