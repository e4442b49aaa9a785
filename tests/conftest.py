"""What tests share: eight virtual CPU devices, strict JAX, quiet reproducible hypothesis, a tiny configuration."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, settings

from headrace.config.load import config_from
from headrace.config.schema import Config

# A subprocess or a test that forgets to say where must not write into the home of the person who runs the suite.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="headrace-test-cache-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# Before any backend starts: afterwards these stand as they are. The suite is for the CPU, also on a machine with a GPU.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile(
    "headrace", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("headrace")

MakeConfig = Callable[..., Config]

TINY: dict[str, Any] = {
    "dataset": "generated",
    "image_size": 8,
    "num_classes": 4,
    "num_samples": 64,
    "model_name": "cifar_resnet8",
    "micro_batch_size": 4,
    "num_epochs": 2,
    "compilation_cache_dir": "none",
    "progress": "none",
}


@pytest.fixture
def tiny_config(tmp_path: Path) -> MakeConfig:
    """Return a builder of small configurations: `tiny_config(num_replicas=2)`; runs are written below tmp_path."""

    def make(**options: Any) -> Config:
        return config_from(TINY | {"log_dir": str(tmp_path / "runs")} | options)

    return make
