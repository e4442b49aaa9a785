"""LAMB and the binary cross entropy against timm itself, from Python with torch.

Slow, and skipped unless HEADRACE_TORCH_PYTHON names a Python with torch and timm:
HEADRACE_TORCH_PYTHON=/path/to/python pytest -m slow tests/engine/test_timm_parity.py
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config.schema import Learning
from headrace.data.augmentation.mix import MixedLabels
from headrace.engine.objective import BinaryCrossEntropy, CustomObjective, training_loss
from headrace.engine.optimizer import make_optimizer

PYTHON = os.environ.get("HEADRACE_TORCH_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="HEADRACE_TORCH_PYTHON is not set")]
NUM_STEPS = 8

THEIR_SIDE = """
import sys, numpy as np, torch
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy
from timm.optim import Lamb
torch.set_num_threads(1)
given = dict(np.load(sys.argv[1]))
kernel, gamma = (torch.nn.Parameter(torch.tensor(given[name])) for name in ("kernel", "gamma"))
groups = [{"params": [kernel]}, {"params": [gamma], "weight_decay": 0.0}]
optimizer = Lamb(groups, lr=0.005, weight_decay=0.02, eps=1e-6)
for step in range(len(given["kernel_grads"])):
    kernel.grad, gamma.grad = (torch.tensor(given[name][step]) for name in ("kernel_grads", "gamma_grads"))
    optimizer.step()
found = {"kernel": kernel.detach().numpy(), "gamma": gamma.detach().numpy()}
labels, logits = torch.tensor(given["labels"]).long(), torch.tensor(given["logits"])
for smoothing in (0.0, 0.1):
    target = mixup_target(labels, 10, lam=0.7, smoothing=smoothing)
    for threshold in (None, 0.2):
        loss = BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)
        found[f"loss {smoothing} {threshold}"] = loss(logits, target).numpy()
np.savez(sys.argv[2], **found)
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both sides are given, and what timm makes of it."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("timm")
    shapes = {"kernel": (6, 5), "gamma": (5,), "kernel_grads": (NUM_STEPS, 6, 5), "gamma_grads": (NUM_STEPS, 5)}
    given: dict[str, Any] = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    given |= {"labels": rng.integers(0, 10, 16), "logits": 3 * rng.normal(size=(16, 10)).astype(np.float32)}
    np.savez(folder / "given.npz", **given)
    script = folder / "their_side.py"
    script.write_text(THEIR_SIDE)
    subprocess.run([PYTHON, script, folder / "given.npz", folder / "found.npz"], check=True, timeout=250)
    assert Path(folder / "found.npz").is_file()
    return given, dict(np.load(folder / "found.npz"))


def test_lamb(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    given, theirs = both
    learning = Learning(
        optimizer="lamb",
        optimizer_params={},
        weight_decay=0.02,
        weight_decay_exclude=("gamma",),
        gradient_clipping=1.0,
    )
    tx: Any = make_optimizer(learning, lambda step: jnp.float32(0.005), 1)
    params: Any = {name: jnp.asarray(given[name]) for name in ("kernel", "gamma")}
    state = tx.init(params)
    for step in range(NUM_STEPS):
        grads = {name: given[f"{name}_grads"][step] for name in params}
        updates, state = tx.update(grads, state, params, step=step)
        params = {name: params[name] + updates[name] for name in params}
    for name, value in params.items():
        np.testing.assert_allclose(value, theirs[name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_of_mixed_labels(
    both: tuple[dict[str, Any], dict[str, Any]], smoothing: float, threshold: float | None
) -> None:
    given, theirs = both
    labels = given["labels"].astype(np.int32)
    mixed = MixedLabels(np.stack([labels, labels[::-1]], 1), np.tile(np.array([[0.7, 0.3]], np.float32), (16, 1)))
    custom = CustomObjective(loss=BinaryCrossEntropy(threshold))
    loss, _ = training_loss(given["logits"], mixed, label_smoothing=smoothing, custom=custom)
    np.testing.assert_allclose(float(loss), theirs[f"loss {smoothing} {threshold}"], rtol=2e-6)
