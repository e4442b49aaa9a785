"""One training step against torch itself: logits and all gradients of torchvision, timm and CIFAR models.

Slow, and skipped unless HEADRACE_TORCH_PYTHON names a Python with torch, torchvision and timm (the extra `torch`):
HEADRACE_TORCH_PYTHON=/path/to/python pytest -m slow tests/model/test_torch_gradients.py
XLA_FLAGS=--xla_backend_optimization_level=0 makes it much faster: most of the time is compilation.
The other side computes in float64, so a difference is the rounding of float32 here.
"""

import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.core.tree import flatten_named
from headrace.model.context import Ctx
from headrace.weights.convert import load_into
from headrace.weights.weight_file import read_file

from .build import network

PYTHON = os.environ.get("HEADRACE_TORCH_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="HEADRACE_TORCH_PYTHON is not set"),
]
CERTAIN = {"dropout_rate": 0.0}
# library, its model, ours, image size, options
CASES = [
    ("torchvision", "resnet18", "resnet18", 64, {}),
    ("torchvision", "resnet50", "resnet50", 64, {}),
    ("torchvision", "resnext50_32x4d", "resnext50", 64, {}),
    ("torchvision", "efficientnet_b0", "efficientnet_b0", 64, CERTAIN | {"block_survival_prob": 1.0}),
    ("timm", "efficientnet_b0", "efficientnet_b0", 65, CERTAIN | {"block_survival_prob": 1.0}),
    ("torchvision", "mobilenet_v2", "mobilenet_v2", 64, CERTAIN),
    ("torchvision", "mobilenet_v3_small", "mobilenet_v3_small", 64, CERTAIN),
    ("torchvision", "mobilenet_v3_large", "mobilenet_v3_large", 64, CERTAIN),
    ("torchvision", "squeezenet1_0", "squeezenet", 64, CERTAIN),
    ("common", "20-both", "cifar_resnet20", 32, {"shortcut": "pad-both"}),
    ("common", "20-end", "cifar_resnet20", 32, {"shortcut": "pad-end"}),
]


@pytest.mark.parametrize(("library", "model", "name", "size", "options"), CASES)
def test_logits_and_gradients_of_a_training_step(tmp_path, library, model, name, size, options):
    script = Path(__file__).with_name("torch_gradients.py")
    # One thread: several wait for each other by spinning, which takes minutes on a busy machine.
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([PYTHON, script, library, model, str(size), tmp_path], check=True, timeout=900, env=environ)
    images, labels, logits = (np.load(tmp_path / f"{key}.npy") for key in ("images", "labels", "logits"))
    if name != "squeezenet":
        options = options | {"model_dialect": "torchvision" if library == "common" else library}
    net = network(name, num_classes=logits.shape[1], image=images.shape[1:], **options)
    start = load_into(net, net.init(3), read_file(tmp_path / "weights.pth"), min_share=1.0)
    wanted = load_into(net, net.init(3), read_file(tmp_path / "gradients.pth"), min_share=1.0)

    def loss(params):
        found, _ = net.apply(params, start.stats, images, Ctx(train=True, stable_norm=True))
        chances = jax.nn.log_softmax(found)
        return -jnp.mean(jnp.take_along_axis(chances, labels[:, None], 1)), found

    gradients, found = jax.jit(jax.grad(loss, has_aux=True))(start.params)
    flat, flat_wanted = flatten_named(gradients), flatten_named(wanted.params)
    # A shift that the next norm takes out again has no gradient but rounding: smaller ones count as a thousandth.
    least = max(float(np.abs(leaf).max()) for leaf in flat_wanted.values()) / 1000
    errors = {"logits": _error(found, logits)}
    errors |= {key: _error(flat[key], leaf, least) for key, leaf in flat_wanted.items()}
    worst = max(errors, key=lambda key: errors[key])
    print(f"{library} {model}: logits off by {errors['logits']:.1e}, {worst} by {errors[worst]:.1e} of its largest")
    assert errors["logits"] < 1e-4
    assert max(errors.values()) < 1e-3, {key: error for key, error in errors.items() if error >= 1e-3}


def _error(found, wanted, least: float = 0.0) -> float:
    """Return the largest difference as a share of the largest number, or of the least that counts."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), least))
