"""The energy of GPUs through a library with NVML's functions, compiled here; nothing where there is none."""

import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.telemetry.energy import energy_meter

COMPILER = shutil.which("cc") or shutil.which("gcc")
# Two boards, 0 and 1 (GPU-b): a reading adds 1,500 and 250 mJ.
SOURCE = """
#include <string.h>
static unsigned long long used[2] = {5000, 9000}, more[2] = {1500, 250};
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **handle) {
  if (number > 1) return 2;
  *handle = used + number;
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char *name, void **handle) {
  if (strcmp(name, "GPU-b")) return 6;
  *handle = used + 1;
  return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *value) {
  unsigned long long *place = handle;
  *value = *place;
  *place += more[place - used];
  return 0;
}
"""


@pytest.fixture
def library(tmp_path: Path) -> str:
    if COMPILER is None:
        pytest.skip("no C compiler is installed")
    (tmp_path / "nvml.c").write_text(SOURCE)
    made = tmp_path / "libnvml.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", made, tmp_path / "nvml.c"], check=True)
    return str(made)


@pytest.mark.parametrize(
    ("visible", "devices", "joules"),
    [("", 2, 1.75), ("", 1, 1.5), ("1", 1, 0.25), ("GPU-b,0", 1, 0.25), ("GPU-b, 0", 2, 1.75), ("7", 1, None)],
)
def test_joules_are_differences_of_the_counters_of_visible_boards(library, monkeypatch, visible, devices, joules):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    used = energy_meter(devices, library)
    assert used() == joules
    assert used() == (None if joules is None else 2 * joules), "since the run began"


def test_a_machine_without_it_says_nothing(tmp_path):
    assert energy_meter(1, str(tmp_path / "missing.so"))() is None
    (tmp_path / "no.so").write_text("not a library")
    assert energy_meter(1, str(tmp_path / "no.so"))() is None
