"""Python processes that start with JAX imported: copies of one process per worker, which saves each 1.5 s of imports.

They are real processes and children of the test: with a number, signals, an environment, a directory and files of
their own. Only the interpreter's start and the imports are shared. A test of these takes `subprocess`.
"""

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax._src.interpreters import mlir

import headrace

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
_LARGEST_REQUEST = 1 << 17
_lock = threading.Lock()


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the loader, the interpreter or JAX reads only once, but for those in `_become`."""
    names = [name for name in environ if name.startswith(("JAX_", "PYTHON", "LD_", "OMP_", "MALLOC_"))]
    later = {"JAX_PLATFORMS", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS"}
    later |= {"PYTHONDONTWRITEBYTECODE"}  # which conftest.py takes away, and no test looks at
    return {name: environ[name] for name in names if name not in later}


_READ_AT_START = _read_at_start(os.environ)


def load_few_dialects() -> None:
    """Lower programs with the one dialect that those for a CPU need besides JAX's own, not with those of all targets.

    Loading these takes a fifth of the time of a small program, and tests compile thousands. What needs more fails.
    """
    context = getattr(mlir, "JaxIrContext", None)
    if context is not None:
        context.load_all_available_dialects = lambda self: self.get_dialect_descriptor("func")


class Popen(subprocess.Popen):
    """`subprocess.Popen` of `[sys.executable, words...]`; what cannot be copied is started in the usual way."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _, pass_fds, cwd, env, _, _, shell, *pipes = rest
        environ = dict(os.environ if env is None else env)
        if shell or preexec_fn or pass_fds or rest[-2] or not _can_copy(args, environ):
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        request = {"words": list(map(os.fspath, args[1:])), "environ": environ, "cwd": os.fspath(cwd or Path.cwd())}
        standard = [end if end >= 0 else number for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        with _lock:
            server, prctl = _server(), ctypes.CDLL(None).prctl
            prctl(_SUBREAPER, 1, 0, 0, 0)  # the copy becomes this process's child; other orphans stay those of init
            socket.send_fds(server, [json.dumps(request).encode()], standard)
            self.pid = int(server.recv(20))
            prctl(_SUBREAPER, 0, 0, 0, 0)
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])  # type: ignore[attr-defined]


def _can_copy(args: Any, environ: dict[str, str]) -> bool:
    """Tell whether a copy would be what these words make: nothing but imports happened to it before."""
    return (
        sys.platform == "linux"
        and isinstance(args, list)
        and args[0] == sys.executable
        and (args[1] in ("-W", "-c", "-m") or not str(args[1]).startswith("-"))
        and _read_at_start(environ) == _READ_AT_START
    )


def run(words: list[Any], *, check: bool = False, timeout: float = 280, **options: Any) -> subprocess.CompletedProcess:
    """Do what `subprocess.run` does with captured text."""
    with Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


@cache
def _server() -> socket.socket:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environ = {**os.environ, "PYTHONPATH": str(Path(headrace.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.fork_server", str(there.fileno())]
    process = subprocess.Popen(command, pass_fds=[there.fileno()], cwd=Path(__file__).parents[1], env=environ)
    there.close()
    atexit.register(process.wait)
    atexit.register(here.close)
    return here


def _serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Make a copy for each request; return in the copies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    while True:
        message, files, _, _ = socket.recv_fds(requests, _LARGEST_REQUEST, 3)
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            if (copy := os.fork()) == 0:
                for file in (requests.detach(), reading, writing):
                    os.close(file)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                return json.loads(message), files
            os.write(writing, str(copy).encode())
            os._exit(0)
        os.waitpid(between, 0)  # after this the copy is the test's child
        requests.send(os.read(reading, 20))
        for file in (reading, writing, *files):
            os.close(file)


def _become(request: dict[str, Any], files: list[int]) -> list[str]:
    """Take on the environment, the directory and the files that were asked for; return the words after Python's own."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    environ, words = request["environ"], request["words"]
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(request["cwd"])
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=bool(os.isatty(1) or environ.get("PYTHONUNBUFFERED")))
    # Behind them what this server found: of an installed Headrace, its folder is also that of all other packages.
    sys.path[:] = [*filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    jax.config.update("jax_platforms", environ.get("JAX_PLATFORMS") or None)
    filters = environ.get("PYTHONWARNINGS", "").split(",")
    while words[0] == "-W":
        filters, words = [*filters, words[1]], words[2:]
    for each in filter(None, filters):
        warnings._setoption(each)  # type: ignore[attr-defined]
    return words


def _run(words: list[str]) -> None:
    """Do what Python does with these words."""
    if words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    elif words[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    for module in pkgutil.walk_packages(headrace.__path__, "headrace."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    load_few_dialects()
    gc.freeze()  # collections in the copies leave these pages shared
    _run(_become(*_serve(socket.socket(fileno=int(sys.argv[1])))))
