"""Ray's JaxTrainer runs a job of two workers; one is killed, and Ray starts both again where the run was saved."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.core.errors import ConfigError
from headrace.ray import ray_trainer
from tests.job.processes import PATIENCE, SRC

FIT = """
OPTIONS = dict(epochs=3, batch_size=64, weight_updates_per_epoch=4, ckpts_per_epoch=1, seed=1, progress="none")

def fit(**given):
    import headrace
    return headrace.Model("toy_model_bn").fit("digits", **OPTIONS, **given)
"""
PROGRAM = f"""
import os, signal, sys, time
from pathlib import Path
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
import headrace
from headrace.ray import ray_trainer
{FIT}
storage = sys.argv[1]

def train(**given):
    class Kill(headrace.Callback):
        every_process = True

        def on_epoch_end(self, event):
            marker, saved = Path(storage, "killed"), Path(storage, "one/run/checkpoints/step_00000004")
            if event.step == 8 and not marker.exists() and ray.train.get_context().get_world_rank() == 1:
                while not saved.is_dir():
                    time.sleep(0.1)
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    fit(callbacks=[*given.pop("callbacks"), Kill()], **given)

ray.init(num_cpus=2, include_dashboard=False)
keep = RunConfig(name="one", storage_path=storage, failure_config=FailureConfig(max_failures=1))
result = ray_trainer(train, scaling_config=ScalingConfig(num_workers=2), run_config=keep).fit()
print("metrics", sorted(result.metrics.items()))
print("checkpoint", result.checkpoint.path)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.timeout(900)
def test_a_killed_worker_is_started_again_where_the_run_was_saved(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "XLA_FLAGS"))}
    environ |= {"PYTHONPATH": SRC, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": ""}
    # Ray gives workers 60 s to start, and tries again for ever: on a busy machine in vain.
    environ |= {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600"}
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py", str(storage)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=6 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (storage / "killed").exists()
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("metrics")]
    assert "('epoch', 3.0)" in said
    assert "('step', 12)" in said
    assert "val_accuracy" in said
    (path,) = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("checkpoint")]
    # resumed after the first epoch, not begun anew
    starts = [record.step for record in headrace.read_records(path) if type(record).__name__ == "RunStart"]
    assert len(starts) == 2
    assert starts[0] == 0 < starts[1]
    # Ray's copy is a run, with the weights of one process that nobody killed
    spaces: dict[str, Any] = {}
    exec(FIT, spaces)
    alone = spaces["fit"](output=str(tmp_path / "alone"), num_replicas=2)
    assert alone.last_checkpoint
    expected, _ = headrace.load_checkpoint(alone.last_checkpoint)
    copied, _ = headrace.newest_checkpoint(Path(path) / "checkpoints")
    assert copied
    found, manifest = headrace.load_checkpoint(copied)
    assert manifest["step"] == 12
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=5e-4, err_msg=name)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(ConfigError, match="Ray cannot be imported") as raised:
        ray_trainer(print, scaling_config=SimpleNamespace(use_gpu=False, use_tpu=False))
    assert "pip install 'headrace[ray]'" in str(raised.value)
