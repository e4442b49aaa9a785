"""Local processes: their lines, without what C++ libraries print; those that stop; a driver that does not end."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from headrace.job.launcher import _drive
from headrace.job.local_processes import LaunchedProcess, Output, _JobEnd, _SignalForwarding

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


def test_a_process_whose_output_nobody_reads_goes_on() -> None:
    """`headrace launch ... | head`: more is printed than a pipe holds, and nobody reads it."""
    chatty = "for _ in range(3000): print('x' * 100)"
    program = f"""
import subprocess, sys
from headrace.job.local_processes import Output
words = [sys.executable, "-c", {chatty!r}]
with Output(None) as output:
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output.follow(0, process)
    sys.exit(process.wait(20))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.close()
        assert launcher.stderr is not None
        assert launcher.stderr.read() == ""
    assert launcher.returncode == 0


def test_a_stopped_process_of_a_job_of_one_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    """No other process notices: without this the launcher would wait for ever."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        job = [LaunchedProcess(0, process)]
        process.send_signal(signal.SIGSTOP)
        # Continued before the time is over, it lives on; stopped again, it does not.
        threading.Timer(0.3, lambda: process.send_signal(signal.SIGCONT)).start()
        threading.Timer(0.6, lambda: process.send_signal(signal.SIGSTOP)).start()
        begin = time.monotonic()
        end = _JobEnd(job, _SignalForwarding(job), stopped_seconds=1.0).wait()
    assert 1.5 < time.monotonic() - begin < 10
    assert (end.code, end.is_final) == (137, False)
    assert end.reason.endswith("hung and was killed")
    assert capfd.readouterr().err == f"headrace launch: {end.reason}\n"


def test_a_driver_that_waits_for_a_lost_host_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    """mpirun does that: the process that is left has reported the loss and ended, mpirun stays."""
    said = "headrace: Process 0 ends, because process 1 (pid 7, host b) has not responded for 3 s: it hangs"
    begin = time.monotonic()
    end = _drive(["sh", "-c", f"echo first; echo '[1,0]<stderr>:{said}' >&2; sleep 60"], {"PATH": "/bin:/usr/bin"}, 0.3)
    assert time.monotonic() - begin < 10
    assert end.reason == "process 1 (pid 7, host b) has not responded for 3 s: it hangs"
    assert (end.code, end.is_final) == (137, False)
    printed = capfd.readouterr()
    assert printed.out == "first\n"
    assert said in printed.err
    tagged = r"printf '[1,0]<stdout>:zero\n[prterun-a-1@1,1]<stdout>: one\n 1: one of srun\n10: ten\nmpirun itself\n'"
    _drive(["sh", "-c", tagged], {"PATH": "/bin:/usr/bin"}, 0.3, only=1)
    assert capfd.readouterr().out == "[prterun-a-1@1,1]<stdout>: one\n 1: one of srun\nmpirun itself\n"
    plain = _drive(["sh", "-c", "exit 5"], {"PATH": "/bin:/usr/bin"}, 0.3)
    assert (plain.code, plain.reason) == (5, "sh ended with exit code 5")
