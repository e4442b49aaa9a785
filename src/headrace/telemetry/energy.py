"""What NVIDIA's GPUs have used since a run began, by their own counters (NVML); nothing where there are none.

The library comes with the driver. Counters are of whole boards: another process on the same GPU counts, too.
"""

import ctypes
import os
from collections.abc import Callable, Mapping
from contextlib import suppress

LIBRARY = "libnvidia-ml.so.1"


def energy_meter(num_devices: int, library: str = LIBRARY) -> Callable[[], float | None]:
    """Return a function that gives the joules used since now by the process's first GPUs; None where they say none."""
    try:
        nvml = ctypes.CDLL(library)
        handles = [_handle(nvml, name) for name in _visible(os.environ, num_devices)]
        begin = [_millijoules(nvml, handle) for handle in handles]
    except (OSError, AttributeError, ValueError):
        return lambda: None

    def joules() -> float | None:
        with suppress(OSError, ValueError):
            now = [_millijoules(nvml, handle) for handle in handles]
            return sum(after - before for after, before in zip(now, begin, strict=True)) / 1000
        return None

    return joules


def _visible(environ: Mapping[str, str], count: int) -> list[str]:
    """Return the numbers or names of the GPUs that a process sees, in its order."""
    named = environ.get("CUDA_VISIBLE_DEVICES", "")
    found = [name.strip() for name in named.split(",") if name.strip()] or [str(number) for number in range(count)]
    return found[:count]


def _handle(nvml: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    _check(nvml.nvmlInit_v2())
    handle = ctypes.c_void_p()
    if name.isdigit():
        _check(nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle)))
    else:
        _check(nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)))
    return handle


def _millijoules(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> int:
    value = ctypes.c_ulonglong()
    _check(nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value)))
    return value.value


def _check(code: int) -> None:
    if code:
        raise ValueError(f"NVML answered {code}")
