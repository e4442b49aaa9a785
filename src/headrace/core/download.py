"""Download a file: streamed, resumed where a connection broke, checked, and renamed into place as a whole.

What has arrived stays in `NAME.part` until it is complete, so that the next attempt, or the next command, continues.
Proxies are taken from the environment (http_proxy, https_proxy, no_proxy).
"""

import errno
import fcntl
import hashlib
import http.client
import os
import re
import shutil
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO, Any

from headrace.core import __version__
from headrace.core.addresses import hide_addresses
from headrace.core.errors import DownloadError
from headrace.core.files import sync_directory
from headrace.core.units import format_bytes

ATTEMPTS = 5  # in a row without a new byte, for each address
_CHUNK = 1 << 18
_TIMEOUT_SECONDS = 30.0  # without a byte
_ANSWER_SECONDS = 60.0  # until all headers are there
# A whole download may take as long as it takes, but a server that sends a byte now and then is given up.
_SLOW_SECONDS, _SLOW_BYTES = 120.0, 1 << 16
_BACK_OFF_SECONDS = 0.5  # doubled after each attempt

Tell = Callable[[int, int | None], None]  # (bytes that have arrived, bytes of the whole file if known)


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A file on the network: the addresses to try in order, and the checksum that proves its content."""

    urls: tuple[str, ...]
    # Such as sha256:0123..., of which the first digits are enough; git:0123... is git's hash of a file's content.
    checksum: str = ""  # empty if none is known
    headers: tuple[tuple[str, str], ...] = ()  # sent to these addresses, but not to where they redirect

    def is_right(self, path: Path) -> bool:
        """Say whether a file has the checksum; without one every file does."""
        return not self.checksum or _digest(path, self.checksum).startswith(self.checksum)

    @property
    def name(self) -> str:
        """Return the file's name."""
        # Not by urlsplit, which refuses some addresses: those are reported when they are downloaded.
        path = re.split(r"[?#]", self.urls[0])[0].partition("://")[2].partition("/")[2]
        return path.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Head:
    """A server's answer to a HEAD request."""

    status: int
    headers: Message  # whose names are in any case


def download(remote: Remote, target: Path, tell: Tell = lambda done, total: None) -> Path:
    """Download a file unless it is there; return its path. Whatever goes wrong is a DownloadError."""
    for url in remote.urls:
        _refuse_address(url)
    partial = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Without the lock first: a cache that is filled may be one that this user cannot write to.
        if target.is_file() and remote.is_right(target):
            return target
        with locked(target.with_name(f".{target.name}.lock")):
            if target.is_file() and remote.is_right(target):
                return target  # another process has downloaded it meanwhile
            _from_any(remote, partial, tell)
            if not remote.is_right(partial):
                found = _digest(partial, remote.checksum)
                # Kept, the next attempt would continue behind wrong bytes.
                partial.unlink()
                raise DownloadError(
                    f"{remote.name} has the checksum {found}, not {remote.checksum}.",
                    rule="A file that differs from the published one is not used; it was deleted.",
                    remedy="Try again later, or from another address.",
                )
            partial.replace(target)
            sync_directory(target.parent)
    # Errors of the network are OSErrors as well, and are caught where they occur: what arrives here is the disk's.
    except OSError as error:
        raise _local_error(error, remote.name, target, partial) from None
    return target


def ask(url: str, headers: tuple[tuple[str, str], ...] = ()) -> Head:
    """Ask a server about a file; its answer may be an error. DownloadError if it cannot be reached.

    A redirection to another host is an answer: it says where the content is, and its headers what it is.
    """
    _refuse_address(url)
    agent = {"User-Agent": f"headrace/{__version__}"}
    request = urllib.request.Request(url, headers=agent | dict(headers), method="HEAD")
    problem = ""
    for attempt in range(ATTEMPTS):
        time.sleep(_BACK_OFF_SECONDS * 2**attempt if attempt else 0)
        try:
            with _open(urllib.request.build_opener(_SameHost()), request) as answer:
                return Head(status=answer.status, headers=answer.headers)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code not in _TRANSIENT:
                return Head(status=error.code, headers=error.headers)
            problem = f"the server answers {error.code} {error.reason}"
        except _NETWORK_ERRORS as error:
            problem = _words(error)
    raise DownloadError(
        f"{hide_addresses(url)} cannot be reached: {problem}.",
        remedy="Check the network, the address and the proxy variables.",
    )


# What a server can make of a request. ValueErrors (UnicodeError is one) come from its own words: a redirection to a
# host that is none, the size of a chunk that is no number.
_NETWORK_ERRORS = (OSError, http.client.HTTPException, ValueError)


def _open(opener: urllib.request.OpenerDirector, request: urllib.request.Request) -> http.client.HTTPResponse:
    """Open an address; TimeoutError if its headers are not there in time, however busily they drip."""
    ended: list[Any] = []

    def work() -> None:
        try:
            ended.append(opener.open(request, timeout=_TIMEOUT_SECONDS))
        except Exception as error:
            ended.append(error)

    # In a thread, because the time limit of a socket is that of one byte. One that is given up ends with its socket.
    thread = threading.Thread(target=work, name="open-address", daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    if not ended:
        raise TimeoutError(f"no answer within {_ANSWER_SECONDS:.0f} s")
    if isinstance(ended[0], Exception):
        raise ended[0]
    return ended[0]


def _refuse_address(url: str) -> None:
    """Refuse what is not the address of a file, before anything is sent."""
    try:
        parts = urllib.parse.urlsplit(url)
        (parts.hostname or "").encode("idna")  # as the resolver does it
        right = parts.scheme in ("http", "https") and re.fullmatch(r"[\x21-\x7e]+", url)
    except ValueError:  # an address of IPv6 whose bracket is not closed, a name that is too long
        right = False
    if not right:
        raise DownloadError(
            f"{_short(hide_addresses(url.partition('?')[0]))} is no address of a file to download.",
            rule="It begins with https:// or http://, and what is not ASCII is escaped: a space is %20.",
        )


def _short(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirections, and closes the answer of one that leads to no address."""

    def http_error_302(self, req, fp, code, msg, headers):
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        except ValueError:
            fp.close()
            raise

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


class _SameHost(_Redirects):
    """Follows a redirection within the host, which may have a new name for the file, and no other."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        if urllib.parse.urlsplit(newurl)[:2] != urllib.parse.urlsplit(req.full_url)[:2]:
            return None
        return urllib.request.Request(newurl, headers=req.headers, method="HEAD")


def terminal_progress() -> Callable[[str, int, int | None], None]:
    """Return a function of (file, bytes, bytes in all) that keeps one line on a terminal, and prints nothing else."""
    shown = [0.0]

    def tell(file: str, done: int, total: int | None) -> None:
        if not sys.stderr.isatty() or (time.monotonic() - shown[0] < 0.2 and done != total):
            return
        shown[0] = time.monotonic()
        of = f" of {total / 1e6:,.1f} MB ({100 * done / max(total, 1):.0f} %)" if total else " MB"
        print(f"\r{file}: {done / 1e6:,.1f}{of} ", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return tell


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds this lock; the kernel releases that of a process which dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # a file system without locks
                raise
        yield


def _from_any(remote: Remote, partial: Path, tell: Tell) -> None:
    """Fill the partial file from the first address that has it."""
    problems = []
    for url in remote.urls:
        try:
            return _from_url(url, remote.headers, partial, tell)
        except _Unavailable as error:
            problems.append(f"{hide_addresses(url)}: {error}")
    kept = f" {format_bytes(partial.stat().st_size)} are kept in {partial}." if partial.is_file() else ""
    raise DownloadError(
        f"{remote.name} could not be downloaded: {'; '.join(problems)}.{kept}",
        remedy="Check the network and the proxy variables; the same command continues where it stopped.",
    )


# Answers after which the same request may succeed: time-outs, too many requests, errors inside the server.
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


class _Unavailable(Exception):
    """An address that does not deliver the file."""


def _from_url(url: str, headers: tuple[tuple[str, str], ...], partial: Path, tell: Tell) -> None:
    failed = 0
    while True:
        before = partial.stat().st_size if partial.is_file() else 0
        # A new one: the shared one would remember the proxies of its first use.
        opener = urllib.request.build_opener(_Redirects())
        try:
            answer = _open(opener, _request(url, headers, before))
        except urllib.error.HTTPError as error:
            error.close()
            problem = f"the server answers {error.code} {error.reason}"
            if error.code == 416 and before:  # the part is as long as the file, or longer
                if error.headers.get("Content-Range") in (None, f"bytes */{before}"):
                    return
                partial.unlink()  # the part of another file, which had this address before
            elif error.code not in _TRANSIENT:
                raise _Unavailable(problem) from None
        except _NETWORK_ERRORS as error:
            problem = _words(error)
        else:
            with answer:
                if _receive(answer, partial, before, tell):
                    return
            problem = "the connection broke"
        # New bytes reset the count: a line that breaks every minute still brings the whole file.
        failed = failed + 1 if not partial.is_file() or partial.stat().st_size <= before else 0
        if failed >= ATTEMPTS:
            raise _Unavailable(problem)
        time.sleep(_BACK_OFF_SECONDS * 2**failed)


def _words(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    return _short(hide_addresses(str(getattr(reason, "strerror", None) or reason or type(error).__name__)))


def _request(url: str, headers: tuple[tuple[str, str], ...], start: int) -> urllib.request.Request:
    asked = {"User-Agent": f"headrace/{__version__}"} | ({"Range": f"bytes={start}-"} if start else {})
    request = urllib.request.Request(url, headers=asked)
    for name, value in headers:
        request.add_unredirected_header(name, value)  # a token is not for whom a server redirects to
    return request


def _receive(answer: http.client.HTTPResponse, partial: Path, start: int, tell: Tell) -> bool:
    """Append what the server sends; say whether the file is complete."""
    resumed = bool(start) and answer.status == 206
    if answer.status == 206 and not (resumed and answer.headers.get("Content-Range", "").startswith(f"bytes {start}-")):
        raise _Unavailable("the server sends another part of the file than it was asked for")
    if not resumed:
        start = 0  # the server sends the whole file
    length = answer.headers.get("Content-Length", "")
    # No number of more digits is a size: int() refuses thousands of them, and isdigit takes a raised two for one.
    total = start + int(length) if re.fullmatch(r"[0-9]{1,18}", length) else None
    if total is not None and total - start > shutil.disk_usage(partial.parent).free:
        raise OSError(errno.ENOSPC, f"{format_bytes(total - start)} are needed")
    with partial.open("r+b" if resumed else "wb") as file:
        file.seek(start)
        done, ended = _copy(answer, file, start, lambda done: tell(done, total))
        file.flush()
        os.fsync(file.fileno())
    return ended and total in (None, done)


def _copy(
    answer: http.client.HTTPResponse, file: IO[bytes], done: int, tell: Callable[[int], None]
) -> tuple[int, bool]:
    """Return how many bytes are there then, and whether the server said that these are all."""
    since, then = time.monotonic(), done
    while True:
        try:
            data = answer.read1(_CHUNK)  # what is there: read() would wait until a whole chunk has dripped in
        except http.client.IncompleteRead as error:
            file.write(error.partial)
            return done + len(error.partial), False
        # An answer in chunks names no length: that it was cut off shows here only. TLS raises plain OSErrors.
        except _NETWORK_ERRORS:
            return done, False
        if time.monotonic() - since > _SLOW_SECONDS:
            if done + len(data) - then < _SLOW_BYTES:
                raise _Unavailable(f"only {done + len(data) - then:,} bytes came in {_SLOW_SECONDS:.0f} s")
            since, then = time.monotonic(), done
        if not data:
            return done, True
        file.write(data)
        done += len(data)
        tell(done)


def _digest(path: Path, checksum: str) -> str:
    kind = checksum.partition(":")[0]
    if kind == "git":
        content = path.read_bytes()
        blob = b"blob %d\0" % len(content) + content
        return f"git:{hashlib.sha1(blob, usedforsecurity=False).hexdigest()}"
    with path.open("rb") as file:
        # usedforsecurity=False: published MD5 sums guard against accidents, also where MD5 is switched off
        return f"{kind}:{hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()}"


def _local_error(error: OSError, name: str, target: Path, partial: Path) -> DownloadError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        partial.unlink(missing_ok=True)  # it would fill the disk
        free = format_bytes(shutil.disk_usage(target.parent).free)
        return DownloadError(
            f"There is no space for {name} in {target.parent}: {error.strerror}, {free} are free.",
            remedy="Free some space, or choose another directory.",
        )
    return DownloadError(f"{target} cannot be written: {error.strerror or error}.", remedy="Choose another directory.")
