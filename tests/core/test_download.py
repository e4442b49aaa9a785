"""Downloads from a server on the loopback address: resumed, checked, whole or not at all; every fault a clear error."""

import contextlib
import errno
import hashlib
import http.client
import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core import download as module
from headrace.core.download import Remote, ask, download
from headrace.core.errors import DownloadError
from tests.core.file_server import FileServer, serving, without_proxies

DATA = bytes(range(256)) * 5000
RIGHT = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    without_proxies(monkeypatch)
    with serving(FileServer()) as found:
        found.files["/a/file.bin"] = DATA
        yield found


def remote(server: FileServer, checksum: str = RIGHT, path: str = "/a/file.bin") -> Remote:
    return Remote(urls=(server.url + path,), checksum=checksum)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_file_is_downloaded_once(server: FileServer, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    target = download(remote(server), tmp_path / "new" / "file.bin", lambda done, total: seen.append((done, total)))
    assert target.read_bytes() == DATA
    assert seen[-1] == (len(DATA), len(DATA))
    assert left(target.parent) == ["file.bin"]
    download(remote(server), target)
    assert len(server.asked) == 1
    target.write_bytes(b"damaged")
    assert download(remote(server), target).read_bytes() == DATA


def test_the_name_of_a_file_is_the_last_part_of_its_path() -> None:
    names = {"https://a.b/c/d.pth?x=1/2#y": "d.pth", "http://a.b/c/": "c", "http://a.b": "", "http://a.b/": ""}
    assert {url: Remote(urls=(url,)).name for url in names} == names


def test_a_broken_connection_is_resumed(server: FileServer, tmp_path: Path) -> None:
    server.breaks, server.cut = 3, 300_000
    assert download(remote(server), tmp_path / "file.bin").read_bytes() == DATA
    starts = [request.headers.get("range") for request in server.asked]
    assert starts == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_an_answer_of_unknown_length_is_not_taken_for_whole_when_it_breaks(server: FileServer, tmp_path: Path) -> None:
    server.chunked, server.breaks, server.cut = True, 2, 300_000
    assert download(remote(server, checksum=""), tmp_path / "file.bin").read_bytes() == DATA
    assert len(server.asked) == 3


def test_errors_of_tls_are_those_of_the_network(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = iter([ssl.SSLError(1, "bad record"), OSError(errno.EHOSTUNREACH, "No route to host")])
    read = http.client.HTTPResponse.read1

    def break_at_first(answer: http.client.HTTPResponse, size: int = -1) -> bytes:
        for error in failing:
            raise error
        return read(answer, size)

    monkeypatch.setattr(http.client.HTTPResponse, "read1", break_at_first)
    assert download(remote(server), tmp_path / "file.bin").read_bytes() == DATA
    assert len(server.asked) == 3


def test_a_part_longer_than_the_file_is_of_another_one(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(DATA + b"more")
    assert download(remote(server, checksum=""), tmp_path / "file.bin").read_bytes() == DATA
    (tmp_path / "b.bin.part").write_bytes(DATA)  # complete, but its download was ended before the rename
    assert download(remote(server, checksum=""), tmp_path / "b.bin").read_bytes() == DATA
    assert [request.headers.get("range") for request in server.asked][1:] == [None, f"bytes={len(DATA)}-"]


def test_the_next_command_continues(server: FileServer, tmp_path: Path) -> None:
    server.breaks, server.cut = 1000, 0
    (tmp_path / "file.bin.part").write_bytes(DATA[:70_000])
    with pytest.raises(DownloadError, match=r"the connection broke\. 68.4 KiB are kept .*continues where it stopped"):
        download(remote(server), tmp_path / "file.bin")
    assert left(tmp_path) == ["file.bin.part"]
    server.breaks = 0
    assert download(remote(server), tmp_path / "file.bin").read_bytes() == DATA
    assert server.asked[-1].headers["range"] == "bytes=70000-"
    assert left(tmp_path) == ["file.bin"]


def test_a_server_without_ranges_sends_everything_again(server: FileServer, tmp_path: Path) -> None:
    server.breaks, server.cut, server.ranges = 1, 1000, False
    assert download(remote(server), tmp_path / "file.bin").read_bytes() == DATA


def test_a_busy_server_is_asked_again(server: FileServer, tmp_path: Path) -> None:
    server.busy = 2
    assert download(remote(server), tmp_path / "file.bin").read_bytes() == DATA


@pytest.mark.parametrize("before", [b"", DATA[:10], DATA + b"more"])
def test_a_wrong_checksum_leaves_nothing(server: FileServer, tmp_path: Path, before: bytes) -> None:
    if before:
        (tmp_path / "file.bin.part").write_bytes(before)
    with pytest.raises(DownloadError, match=f"has the checksum md5:[0-9a-f]{{32}}, not md5:{'0' * 32}"):
        download(remote(server, f"md5:{'0' * 32}"), tmp_path / "file.bin")
    assert left(tmp_path) == []


def test_a_missing_file_and_the_second_address(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="/none: the server answers 404 Not Found"):
        download(remote(server, path="/none"), tmp_path / "none")
    assert left(tmp_path) == []
    both = Remote(urls=(f"{server.url}/none", f"{server.url}/a/file.bin"), checksum=RIGHT)
    assert download(both, tmp_path / "x").read_bytes() == DATA
    long = f"http://{'a' * 70}.example/x"
    for address in ("file:///etc/passwd", "http://[::1/x", "http://127.0.0.1/a b", "http://127.0.0.1/\xe4", long):
        with pytest.raises(DownloadError, match="no address of a file to download"):
            download(Remote(urls=(address,)), tmp_path / "y")
        with pytest.raises(DownloadError, match="no address of a file to download"):
            ask(address)


def test_no_network(server: FileServer, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/x"
    with pytest.raises(DownloadError, match=r"Connection refused.*Check the network"):
        download(Remote(urls=(url,)), tmp_path / "x")
    with pytest.raises(DownloadError, match="Check the network"):
        download(Remote(urls=("http://no-such-host.invalid/x",)), tmp_path / "x")
    assert left(tmp_path) == []


def test_a_proxy_of_the_environment_is_used(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "")
    server.files["http://elsewhere.invalid/x"] = b"by proxy"
    assert download(Remote(urls=("http://elsewhere.invalid/x",)), tmp_path / "x").read_bytes() == b"by proxy"


def test_no_space(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DownloadError, match=r"no space for file.bin .*1.2 MiB are needed, 1000 B are free"):
        download(remote(server), tmp_path / "file.bin")
    assert left(tmp_path) == []
    monkeypatch.undo()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(DownloadError, match=r"no space for file.bin .*No space left on device"):
        download(remote(server), tmp_path / "file.bin")
    assert left(tmp_path) == []


class Says:
    """A server that answers every request with these bytes, one after the other with a pause, and then hangs up."""

    def __init__(self, *parts: bytes, pause: float = 0.0) -> None:
        self.parts, self.pause = parts, pause
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/file.bin"
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while not self.ended.is_set():
            line, _ = self.listener.accept()
            with line, contextlib.suppress(OSError):
                line.recv(1 << 16)
                for part in self.parts:
                    if self.ended.wait(self.pause):
                        return
                    line.sendall(part)

    def __enter__(self) -> "Says":
        return self

    def __exit__(self, *ended: object) -> None:
        self.ended.set()
        socket.create_connection(self.listener.getsockname()).close()
        self.thread.join()
        self.listener.close()


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: \xc2\xb2\r\n\r\nab",
        OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\nab",
        OK + b"Content-Length: 1" + b"0" * 400 + b"\r\n\r\nab",
        OK + b"Content-Length: -5\r\n\r\nab",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nab",
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 300 + b"\r\nab",
        b"HTTP/1.1 302 Found\r\nLocation: http://[::1\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://" + b"a" * 100 + b".example/\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n",
        b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 7-9/10\r\nContent-Length: 2\r\n\r\nab",
        b"no answer at all\r\n\r\n",
        b"",
    ],
)
def test_every_wrong_answer_is_a_download_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: bytes) -> None:
    without_proxies(monkeypatch)
    with Says(answer) as server:
        with contextlib.suppress(DownloadError):
            assert download(Remote(urls=(server.url,)), tmp_path / "file.bin").read_bytes() == b"ab"
        with contextlib.suppress(DownloadError):
            ask(server.url)
    assert left(tmp_path) in ([], ["file.bin"], ["file.bin.part"])


@pytest.mark.parametrize("head", [b"", OK])
def test_a_server_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, head: bytes) -> None:
    """A byte or a header now and then keeps a socket's time limit from passing: for ever, before."""
    without_proxies(monkeypatch)
    monkeypatch.setattr(module, "_SLOW_SECONDS", 0.3)
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    drops = [b"\r\n"] + [b"x"] * 400 if head else [b"X-Field: y\r\n"] * 400
    with Says(head or OK, *drops, pause=0.05) as server:
        began = time.monotonic()
        with pytest.raises(DownloadError, match=r"came in 0 s|no answer within 0 s"):
            download(Remote(urls=(server.url,)), tmp_path / "file.bin")
        assert time.monotonic() - began < 15, "20 s and more otherwise"


def test_a_signed_address_is_in_no_message(server: FileServer, tmp_path: Path) -> None:
    for address in (f"{server.url}/none?token=SECRET", "http://user:SECRET@127.0.0.1:1/x", "http://a b/?SECRET"):
        for work in (lambda url: download(Remote(urls=(url,)), tmp_path / "x"), ask):
            with contextlib.suppress(DownloadError):
                assert work(address).status == 404  # pyright: ignore[reportAttributeAccessIssue]
                continue
            with pytest.raises(DownloadError) as caught:
                work(address)
            assert "SECRET" not in str(caught.value), address
