"""A hub on the loopback address, with files made in the test: answers, redirections, faults, and what it was asked."""

import hashlib
import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
    """Serves `files` of repositories ({"OWNER/NAME/FILE": bytes}) and `plain` ones ({"/path": bytes}).

    Large files are redirected to another host name, as on the real one. `private` repositories need a token; `breaks`
    connections are cut after `cut` bytes; `wrong` content has the right length.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.plain: dict[str, bytes] = {}
        self.private: set[str] = set()
        self.breaks, self.cut, self.wrong = 0, 0, False
        self.asked: list[tuple[str, str, dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def other_url(self) -> str:
        return f"http://localhost:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_HEAD(self) -> None:
        self._answer(send=False)

    def do_GET(self) -> None:
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        self.server.asked.append((self.command, self.path, {name.lower(): v for name, v in self.headers.items()}))
        repo, _, file = self.path.strip("/").partition("/resolve/main/")
        if not file or self.path in self.server.plain:
            return self._content(self.server.plain.get(self.path), send)
        known = {name.rpartition("/")[0] for name in self.server.files}
        if repo not in known or (repo in self.server.private and "Authorization" not in self.headers):
            return self._error(401, "RepoNotFound", "Invalid username or password.")
        data = self.server.files.get(f"{repo}/{file}")
        if data is None:
            return self._error(404, "EntryNotFound", "Entry not found")
        if file.endswith(".json"):
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            return self._content(data, send, {"X-Repo-Commit": COMMIT, "ETag": f'"{blob}"'})
        self.server.plain["/large/" + file] = data
        self.send_response(302)
        self.send_header("Location", f"{self.server.other_url}/large/{file}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Etag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", "0")
        return self.end_headers()

    def _error(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _content(self, data: bytes | None, send: bool, headers: dict[str, str] | None = None) -> None:
        if data is None:
            return self.send_error(404)
        data = data[::-1] if self.server.wrong else data
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not send:
            return None
        if self.server.breaks:
            self.server.breaks -= 1
            self.wfile.write(data[start : start + self.server.cut])
            self.wfile.flush()
            return self.connection.shutdown(socket.SHUT_RDWR)
        self.wfile.write(data[start:])
        return None

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Hub]:
    """Run a hub in a thread."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
