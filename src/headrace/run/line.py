"""A line between two processes of a job: messages of JSON, one per row, over a socket. No tensor takes this way."""

import json
import socket
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

_MOST = 1 << 20  # bytes without an end of row: not one of us


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process of a job, as people find it again: its number, its id at the operating system, its host."""

    process: int
    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.process} (pid {self.pid}, host {self.host})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


class Gone(Exception):
    """The other end of a line is closed."""


class Line:
    """One end of a line. `send` may be called by any thread, `receive` by one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._buffer, self._lock = connection, b"", threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(5.0)  # a peer that does not read any more must not hold us up

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; one that cannot be sent is lost, and `receive` will tell that the other end is gone."""
        with self._lock, suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float = 5.0) -> list[dict[str, Any]]:
        """Return the messages that have come, after waiting for some bytes; raise Gone when the other end is closed."""
        self._socket.settimeout(timeout)
        try:
            data = self._socket.recv(65536)
        except TimeoutError:
            return []
        except OSError as error:
            raise Gone from error
        finally:
            with suppress(OSError):
                self._socket.settimeout(5.0)
        if not data:
            raise Gone
        *rows, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > _MOST:
            raise Gone
        try:
            messages = [json.loads(row) for row in rows]
        except ValueError as error:
            raise Gone from error
        if not all(isinstance(message, dict) for message in messages):
            raise Gone
        return messages

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
