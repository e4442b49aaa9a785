"""What the launcher prints of its processes: their lines, and not what C++ libraries say about each other's ends."""

import subprocess
import sys

import pytest

from headrace.job.local_processes import Output

PRINTED = """\
one

:UNAVAILABLE:Stream removed (Socket closed)
=== Source Location Trace: ===
external/xla+/xla/pjrt/distributed/coordination/coordination_service_error_util.cc:64

[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
E1115 17:40:01.123456  4242 client.h:97] the other side is gone
two: UNAVAILABLE, external/xla is what it came through

three
"""


@pytest.mark.parametrize("only", [None, 7, 8])
def test_lines_without_noise(only: int | None, capfd: pytest.CaptureFixture[str]) -> None:
    words = [sys.executable, "-c", f"import sys; sys.stderr.write({PRINTED!r}); print('out')"]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        Output(only) as output,
    ):
        output.follow(7, process)
        process.wait()
    printed = capfd.readouterr()
    wanted = ["one", "", "two: UNAVAILABLE, external/xla is what it came through", "", "three"]
    assert printed.err == ("" if only == 8 else "".join(f"[7] {line}\n" for line in wanted))
    assert printed.out == ("" if only == 8 else "[7] out\n")
