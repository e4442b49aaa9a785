"""Small real runs: a toy network on the embedded digits, through the real `train` and `resume`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint.store import load, newest_good
from headrace.config.load import Resolved, resolve

QUICK: dict[str, Any] = {
    "dataset": "digits",
    "model_name": "toy_model_bn",  # small and quick; it does not learn much
    "micro_batch_size": 4,
    "global_batch_size": 16,
    "weight_updates_per_epoch": 20,
    "num_epochs": 4,
    "optimizer_params": {"momentum": 0.9},
    # a rate that does not depend on the number of epochs: one program for most runs
    "lr_schedule": "const",
    "lr_warmup_params": "none",
    "lr_schedule_params": {"initial_learning_rate": 0.002},
    "bn_momentum": 0.9,
    "ema_decay": 0.9,
    "progress": "none",
}


@pytest.fixture
def quick(tmp_path: Path) -> Callable[..., Resolved]:
    """Return a builder of resolved configurations: `quick(num_epochs=2)`."""

    def make(**options: Any) -> Resolved:
        return resolve(QUICK | {"log_dir": str(tmp_path / "runs")} | options, "none", environ={})

    return make


def final_state(run_dir: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a run's newest checkpoint."""
    found, damaged = newest_good(run_dir / "checkpoints")
    assert found is not None
    assert not damaged
    return load(found)[0]


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float = 2e-4) -> None:
    """Compare weights, statistics, averages and optimizer state of two checkpoints to rounding."""
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        if name.startswith(("params/", "stats/", "ema/", "opt/")):
            np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance / 10, err_msg=name)


def assert_same_bits(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    """Compare two sets of tensors bit for bit."""
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.dtype == second[name].dtype, name
        assert array.tobytes() == second[name].tobytes(), name
