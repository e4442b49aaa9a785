"""A server of files on the loopback address, with the faults that a test asks for, and a list of what it was asked."""

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import pytest

from headrace.core import download


class Request(NamedTuple):
    """What was asked; the names of headers are in lower case."""

    command: str
    path: str
    headers: dict[str, str]


class FileServer(http.server.ThreadingHTTPServer):
    """Serves `files` ({"/path": bytes}).

    The next `busy` requests are turned away, `breaks` connections are cut after `cut` bytes, `wrong` content has the
    right length, without `ranges` a part cannot be asked for, and `chunked` answers do not say their length.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.files: dict[str, bytes] = {}
        self.breaks, self.cut, self.busy = 0, 0, 0
        self.ranges, self.wrong, self.chunked = True, False, False
        self.asked: list[Request] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    class Handler(http.server.BaseHTTPRequestHandler):
        server: "FileServer"  # pyright: ignore[reportIncompatibleVariableOverride]

        def do_HEAD(self) -> None:
            self._asked()

        def do_GET(self) -> None:
            self._asked()

        def _asked(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.server.asked.append(Request(self.command, self.path, headers))
            if self.server.busy:
                self.server.busy -= 1
                return self.send_error(503)
            return self.answer()

        def answer(self) -> None:
            """Answer one request."""
            self.content(self.server.files.get(self.path))

        def content(self, data: bytes | None, headers: dict[str, str] | None = None) -> None:
            """Send the data, or the part of it that was asked for."""
            if data is None:
                return self.send_error(404)
            data = data[::-1] if self.server.wrong else data
            asked = self.headers.get("Range", "")
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.ranges else 0
            if start >= len(data) > 0:
                return self.head(416, {"Content-Range": f"bytes */{len(data)}"})
            length = (
                {"Transfer-Encoding": "chunked"} if self.server.chunked else {"Content-Length": str(len(data) - start)}
            )
            fields = length | (headers or {})
            if start:
                fields["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.head(206 if start else 200, fields)
            if self.command == "HEAD":
                return None
            if self.server.breaks:
                self.server.breaks -= 1
                self.part(data[start : start + self.server.cut])
                self.wfile.flush()
                return self.connection.shutdown(socket.SHUT_RDWR)
            self.part(data[start:])
            return self.part(b"")

        def part(self, data: bytes) -> None:
            """Send a part of the content; of chunks, an empty one is the end."""
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if self.server.chunked else data)

        def head(self, status: int, headers: dict[str, str]) -> None:
            """Send the status and the headers."""
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass


S = TypeVar("S", bound=FileServer)


@contextmanager
def serving(server: S) -> Iterator[S]:
    """Run a server in a thread."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask servers directly, whatever the machine's settings are, and do not wait before asking again."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(download, "_BACK_OFF_SECONDS", 0.001)
