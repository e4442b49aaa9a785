"""Read `.h5` files as `read_keras_file` does, each in a process of its own with limits, but a hundred times as fast.

Starting Python and its libraries takes most of the time of a real read. A server that has imported them forks for each
file instead: `python h5_process.py` reads paths from standard input and answers exit code and size of what was read.
"""

import atexit
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

CPU_SECONDS = 1  # HDF5 loops for ever on some damaged files; a real read has 20 s


@cache
def _server() -> subprocess.Popen[str]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(Path(__file__).resolve())]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environ)

    def close() -> None:
        process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
        process.stdout.close()  # pyright: ignore[reportOptionalMemberAccess]
        process.wait()

    atexit.register(close)
    return process


def read_h5(path: Path) -> None:
    """Read a file; CheckpointError if the process fails or is ended, as `read_keras_file` would raise."""
    from headrace.core.errors import CheckpointError

    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{path}\n")
    server.stdin.flush()
    code, size = map(int, server.stdout.readline().split())
    if code:
        raise CheckpointError(f"{path} cannot be read: exit code {code}.")
    # The tensors as safetensors: four times the file, and their names and shapes.
    assert size <= 5 * path.stat().st_size + 4096, f"{size} bytes from a file of {path.stat().st_size}"


def _serve() -> None:
    import h5py  # noqa: F401

    from headrace.weights.keras_file import main

    for line in sys.stdin:
        path = Path(line.rstrip("\n"))
        result = path.with_name("tensors")
        if not (child := os.fork()):
            output = os.open(result, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            code = main(path, CPU_SECONDS)
            sys.stdout.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, result.stat().st_size, flush=True)


if __name__ == "__main__":
    _serve()
