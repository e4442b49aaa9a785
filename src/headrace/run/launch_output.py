"""What processes print, line by line, with the process's number in front."""

import re
import subprocess
import sys
import threading
from typing import IO

# What C++ libraries print at every start, or about the end of another process, which the watch tells in one line.
NOISE = re.compile(
    rb"\[Gloo\] Rank \d+ is connected|[EFW]\d{4} [\d:.]+ +\d+ (coordination_service|client\.h|preemption_sync)"
    rb"|Additional GRPC error information|:UN(KNOWN|AVAILABLE):|=== Source Location Trace: ===|external/xla\S*:\d+\s*$"
    rb"|\*\*\* Check failure stack|    @ +0x"
)


class Output:
    """Follows the output of processes; use as a context, which waits for the last lines."""

    def __init__(self, only: int | None) -> None:
        self._only, self._threads, self._lock = only, list[threading.Thread](), threading.Lock()

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(5)

    def follow(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """Print what a process prints, from now on."""
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert source is not None
            thread = threading.Thread(target=self._copy, args=(number, source, target), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _copy(self, number: int, source: IO[bytes], target: IO[str]) -> None:
        noise = False
        for row in source:
            noise = bool(NOISE.match(row)) or (noise and not row.strip())  # an empty line after it belongs to it
            if noise or (self._only is not None and number != self._only):
                continue
            text = row.decode(errors="replace").rstrip("\r\n")
            with self._lock:
                print(f"[{number}] {text}", file=target, flush=True)
        source.close()
