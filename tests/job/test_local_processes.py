"""The output of local processes: their lines, without what C++ libraries print about the end of other processes."""

import subprocess
import sys

import pytest

from headrace.job.local_processes import Output

OURS = """\
two: coordination_service, :UNAVAILABLE: and a stack @ 0x1 in a line of a program
two: UNAVAILABLE, external/xla is what it came through
"""
# Some lines are cut, or glued to what another thread was printing.
PRINTED = f"""\
one

:UNAVAILABLE:Stream removed (Socket closed)
=== Source Location Trace: ===
external/xla+/xla/pjrt/distributed/coordination/coordination_service_error_util.cc:64

[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
E1115 17:40:01.123456  4242 client.h:97] the other side is gone
sum 3.0E1116 01:02:03.123456    4242 coordination_service_agent.cc:342] Polled an error from coordination service (this
nt.cc:342] Polled an error from coordination service (this can be an error from this or another task).
3.123456    4242 coordination_service.cc:1461] an error of the coordination service
RPC: /tensorflow.CoordinationService/PollForError, polled an error from the coordination service.
{OURS}
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
    wanted = ["one", "", "sum 3.0", *OURS.splitlines(), "", "three"]
    assert printed.err == ("" if only == 8 else "".join(f"[7] {line}\n" for line in wanted))
    assert printed.out == ("" if only == 8 else "[7] out\n")
