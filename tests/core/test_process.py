"""This process: its memory."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import numpy as np
from headrace.core.process import keep_freed_memory

def faults():
    np.ones(8_000_000)  # 64 MB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(8_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory(keep=True)
kept = faults()
keep_freed_memory(keep=False)
print(kept, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator alone has the setting")
@pytest.mark.parametrize("chosen_by_the_user", [False, True])
def test_freed_memory_is_kept_until_it_is_not_or_as_the_user_chose(chosen_by_the_user):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    environ |= {"MALLOC_MMAP_MAX_": "65536"} if chosen_by_the_user else {}
    done = subprocess.run([sys.executable, "-c", FAULTS], env=environ, capture_output=True, text=True, check=True)
    kept, returned = map(int, done.stdout.split())
    assert returned > 10  # 15,625 pages of 4 KiB, or 30 huge ones
    assert (kept < returned // 2) != chosen_by_the_user
