"""A server on the loopback that speaks enough of S3's protocol for s3fs, and fails when it is asked to."""

import hashlib
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from xml.sax.saxutils import escape

# (method, bucket/key) -> what goes wrong: "", "503", "403", "cut" (half of the body, then the connection breaks)
Fault = Callable[[str, str], str]


class S3Server(ThreadingHTTPServer):
    """Buckets in memory. `fault` decides about each request; `requests` has (method, path, fault)."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.buckets: dict[str, dict[str, bytes]] = {}
        self.fault: Fault = lambda method, path: ""
        self.bytes_per_second: float | None = None
        self.requests: list[tuple[str, str, str]] = []
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def count(self, method: str, fault: str | None = None) -> int:
        return sum(one[0] == method and (fault is None or one[2] == fault) for one in list(self.requests))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that leave are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: S3Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        path, _, query = self.path.partition("?")
        path = urllib.parse.unquote(path).lstrip("/")
        asked = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        body = self._body()
        if body is None:  # the client died: nothing is stored, as with S3
            self.close_connection = True
            return None
        fault = self.server.fault(self.command, path)
        with self.server.lock:
            self.server.requests.append((self.command, path, fault))
        if fault == "503":
            return self._error(503, "SlowDown")
        if fault == "403":
            return self._error(403, "AccessDenied")
        bucket, _, key = path.partition("/")
        content = self.server.buckets.get(bucket)
        if content is None:
            if self.command == "PUT" and not key:
                self.server.buckets[bucket] = {}
                return self._answer(200)
            return self._error(404, "NoSuchBucket")
        if not key:
            return self._list(bucket, content, asked)
        if self.command == "PUT":
            content[key] = body
            return self._answer(200, headers={"ETag": _etag(body)})
        if self.command == "DELETE":
            content.pop(key, None)
            return self._answer(204)
        if key not in content:
            return self._error(404, "NoSuchKey")
        return self._get(content[key], cut=fault == "cut")

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _handle

    def _body(self) -> bytes | None:
        size = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(size)
        if len(data) < size:
            return None
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return data
        whole, rest = b"", data
        while rest:
            head, _, rest = rest.partition(b"\r\n")
            size = int(head.split(b";")[0], 16)
            if not size:
                break
            whole, rest = whole + rest[:size], rest[size + 2 :]
        return whole

    def _get(self, data: bytes, *, cut: bool) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        headers, status, etag = {}, 200, _etag(data)
        if found:
            first, last = int(found[1]), min(int(found[2] or len(data) - 1), len(data) - 1)
            headers, status = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}, 206
            data = data[first : last + 1]
        headers |= {"ETag": etag, "Last-Modified": "Thu, 19 Nov 2026 10:00:00 GMT"}
        self._answer(status, data, headers, cut=cut)

    def _list(self, bucket: str, content: dict[str, bytes], asked: dict[str, str]) -> None:
        prefix, delimiter, folders, rows = asked.get("prefix", ""), asked.get("delimiter", ""), set(), []
        for key in sorted(content):
            inner = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in inner:
                folders.add(prefix + inner.partition(delimiter)[0] + delimiter)
            else:
                rows.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(content[key])}</Size><ETag>{_etag(content[key])}</ETag>"
                    "<LastModified>2026-11-19T10:00:00.000Z</LastModified></Contents>"
                )
        most = int(asked.get("max-keys", 100_000))
        rows += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
        text = f"<ListBucketResult><Name>{bucket}</Name><KeyCount>{len(rows[:most])}</KeyCount>"
        text += "<IsTruncated>false</IsTruncated>" + "".join(rows[:most]) + "</ListBucketResult>"
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _error(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{code} on purpose</Message></Error>"
        self._answer(status, text.encode(), {"Content-Type": "application/xml"})

    def _answer(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in ((headers or {}) | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut:
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        rate = self.server.bytes_per_second
        for first in range(0, len(body), 1 << 14):
            self.wfile.write(body[first : first + (1 << 14)])
            if rate:
                time.sleep((1 << 14) / rate)


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


@contextmanager
def running(monkeypatch: Any) -> Iterator[S3Server]:
    """Run a server, with a bucket `data`, that this process and those it starts take for S3."""
    server = S3Server()
    server.buckets["data"] = {}
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    for name, value in (
        ("AWS_ENDPOINT_URL", server.address),
        ("AWS_ACCESS_KEY_ID", "somebody"),
        ("AWS_SECRET_ACCESS_KEY", "nothing"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(name, value)
    import s3fs  # pyright: ignore[reportMissingImports]

    s3fs.S3FileSystem.clear_instance_cache()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
