"""Devices counted from the files of their drivers, none opened; the files here are copies of what drivers write."""

import importlib.metadata
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from headrace.config.schema import Run
from headrace.core.errors import RunStopped
from headrace.engine import machine, visible
from headrace.engine.devices import start_devices
from headrace.engine.visible import Visible, has_bfloat16, visible_devices

GIB = 1 << 30


@pytest.fixture
def unopened(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that says which packages are installed, and what nvidia-smi prints."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(visible, "devices_are_started", lambda: False)

    def set_packages(*names: str, smi: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(visible, "find_spec", lambda name: name if name in names else None)
        monkeypatch.setattr(visible, "_nvidia_smi", lambda: smi)

    return set_packages


def make_files(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


@pytest.mark.parametrize(("chosen", "count"), [(None, 4), ("0,2", 2), ("", 0), ("-1", 0), ("0,1,2,3,4,5", 4)])
def test_nvidia(tmp_path, monkeypatch, unopened, chosen, count):
    make_files(tmp_path, *(f"proc/driver/nvidia/gpus/0000:0{number}:00.0/information" for number in range(4)))
    unopened("jax_cuda12_plugin", smi=("81559, 9.0, NVIDIA H100", "40960, 8.0, NVIDIA A100"))
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    found = visible_devices("cuda", tmp_path)
    if count:
        assert found == Visible(platform="gpu", count=count, memory_bytes=40 * GIB, bfloat16=True, name="NVIDIA H100")
    else:
        assert found.platform == "cpu"
    assert visible_devices("cpu", tmp_path).platform == "cpu"


def test_nvidia_without_bfloat16_and_without_the_plugin(tmp_path, unopened):
    make_files(tmp_path, "dev/nvidia0", "dev/nvidia1", "dev/nvidiactl")
    unopened("jax_cuda13_plugin", smi=("16384, 7.0, Tesla V100",))
    found = visible_devices("cuda", tmp_path)
    assert found == Visible(platform="gpu", count=2, memory_bytes=16 * GIB, bfloat16=False, name="Tesla V100")
    unopened()
    assert visible_devices("cuda", tmp_path).platform == "cpu"


def write_amd(root: Path, *versions: int) -> None:
    """Write a topology of one processor (version 0) or GPU per number."""
    for number, version in enumerate(versions):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        bank = node / "mem_banks/0"
        bank.mkdir(parents=True)
        simds = 304 if version else 0
        (node / "properties").write_text(f"cpu_cores_count 96\nsimd_count {simds}\ngfx_target_version {version}\n")
        (bank / "properties").write_text(f"heap_type 1\nsize_in_bytes {64 * GIB}\nflags 0\n")


def test_amd(tmp_path, monkeypatch, unopened):
    write_amd(tmp_path, 0, 0, 90010, 90402, 90402)
    unopened("jax_rocm60_plugin")
    gpus = Visible(platform="gpu", count=3, memory_bytes=64 * GIB, bfloat16=True)
    assert visible_devices("rocm", tmp_path) == gpus
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert visible_devices("rocm", tmp_path).count == 1
    unopened()
    assert visible_devices("rocm", tmp_path) == Visible(platform="rocm", count=1, bfloat16=True), "named, not counted"


def test_an_older_amd_gpu_has_no_bfloat16(tmp_path, unopened):
    write_amd(tmp_path, 90006)
    unopened("jax_rocm7_plugin")
    assert not visible_devices("rocm", tmp_path).bfloat16


@pytest.mark.parametrize("names", [("dev/accel0", "dev/accel1"), ("dev/vfio/0", "dev/vfio/1", "dev/vfio/vfio")])
def test_tpu(tmp_path, monkeypatch, unopened, names):
    make_files(tmp_path, *names)
    unopened("libtpu")
    assert visible_devices("tpu", tmp_path) == Visible(platform="tpu", count=2, bfloat16=True)
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0")
    assert visible_devices("tpu", tmp_path).count == 1
    unopened()  # virtual machines pass other devices through vfio, too
    assert visible_devices("tpu", tmp_path).count == 1


@pytest.mark.parametrize(("capability", "has"), [("9.0", True), ("8.0", True), ("7.5", False), ("", True)])
def test_bfloat16(capability, has):
    assert has_bfloat16(capability) is has


def test_a_platform_that_comes_too_late_is_refused():
    assert start_devices("cpu", 1) == jax.devices()[:1]
    with pytest.raises(RunStopped, match="Platform cuda was requested, but JAX already uses cpu"):
        start_devices("cuda", 1)
    assert jax.config.values["jax_platforms"] == "cpu", "what has no effect is not set either"


def test_a_module_of_another_distribution_is_no_error(monkeypatch):
    def version(name):
        if name == "numpy":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(importlib.metadata, "version", version)
    versions = machine.describe_machine().versions
    assert "numpy" not in versions
    assert versions["onnxruntime-gpu"] == "1.2.3"


@pytest.fixture
def opened(tmp_path, monkeypatch, unopened):
    """Return the list of what is opened on a machine with two GPUs."""
    found: list[object] = []
    make_files(tmp_path, "dev/nvidia0", "dev/nvidia1")
    unopened("jax_cuda12_plugin")
    monkeypatch.setattr(visible, "_nvidia_smi", lambda: found.append("nvidia-smi") or ())
    monkeypatch.setattr(visible, "visible_devices", partial(visible_devices, root=tmp_path))
    monkeypatch.setattr(visible, "start_devices", lambda platform, count: found.append(platform) or [count])
    monkeypatch.setattr(visible, "warm_up", found.append)
    monkeypatch.setattr(jax.config, "update", lambda name, value: found.append((name, value)))
    return found


def test_a_gpu_starts_while_the_rest_is_imported(opened, monkeypatch):
    thread = visible.start_early(Run(platform="cuda"))
    assert thread is not None
    thread.join(10)
    assert opened == [("jax_num_cpu_devices", 2), "cuda", [1]]
    # What a run chooses by the devices that it sees does not depend on whether they have started yet.
    monkeypatch.setattr(visible, "devices_are_started", lambda: True)
    assert visible.visible_devices("cuda").count == 2
    assert visible.start_early(Run(platform="cuda")) is None


@pytest.mark.parametrize("run", [Run(platform="cpu"), Run(platform="cuda", first_device=1), Run(platform="tpu")])
def test_other_devices_wait_for_the_plan(opened, run):
    assert visible.start_early(run) is None
    assert not opened


def test_a_gpu_that_does_not_start_is_reported_by_the_run(opened, monkeypatch):
    def fail(*_):
        raise RunStopped("No device of platform cuda can be used.")

    monkeypatch.setattr(visible, "start_devices", fail)
    thread = visible.start_early(Run(platform="auto"))
    assert thread is None or thread.join(10) is None
