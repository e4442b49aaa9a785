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
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO

from headrace.core import __version__
from headrace.core.errors import DownloadError
from headrace.core.files import sync_directory
from headrace.core.units import format_bytes

ATTEMPTS = 5  # in a row without a new byte, for each address
_CHUNK = 1 << 18
_TIMEOUT_SECONDS = 30.0  # without a byte; a whole download may take as long as it takes
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
            with urllib.request.build_opener(_SameHost()).open(request, timeout=_TIMEOUT_SECONDS) as answer:
                return Head(status=answer.status, headers=answer.headers)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code not in _TRANSIENT:
                return Head(status=error.code, headers=error.headers)
            problem = f"the server answers {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            problem = _words(error)
    raise DownloadError(
        f"{url} cannot be reached: {problem}.", remedy="Check the network, the address and the proxy variables."
    )


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
            f"{url} is no address of a file to download.",
            rule="It begins with https:// or http://, and what is not ASCII is escaped: a space is %20.",
        )


class _SameHost(urllib.request.HTTPRedirectHandler):
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
            problems.append(f"{url}: {error}")
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
        opener = urllib.request.build_opener()  # a new one: the shared one would remember the proxies of its first use
        try:
            answer = opener.open(_request(url, headers, before), timeout=_TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            error.close()
            problem = f"the server answers {error.code} {error.reason}"
            if error.code == 416 and before:  # the part is as long as the file, or longer
                if error.headers.get("Content-Range") in (None, f"bytes */{before}"):
                    return
                partial.unlink()  # the part of another file, which had this address before
            elif error.code not in _TRANSIENT:
                raise _Unavailable(problem) from None
        except (OSError, http.client.HTTPException) as error:
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
    return str(getattr(reason, "strerror", None) or reason or type(error).__name__)


def _request(url: str, headers: tuple[tuple[str, str], ...], start: int) -> urllib.request.Request:
    asked = {"User-Agent": f"headrace/{__version__}"} | ({"Range": f"bytes={start}-"} if start else {})
    request = urllib.request.Request(url, headers=asked)
    for name, value in headers:
        request.add_unredirected_header(name, value)  # a token is not for whom a server redirects to
    return request


def _receive(answer: http.client.HTTPResponse, partial: Path, start: int, tell: Tell) -> bool:
    """Append what the server sends; say whether the file is complete."""
    resumed = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {start}-")
    if not resumed:
        start = 0  # the server sends the whole file
    length = answer.headers.get("Content-Length", "")
    total = start + int(length) if length.isdigit() else None
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
    while True:
        try:
            data = answer.read(_CHUNK)
        except http.client.IncompleteRead as error:
            file.write(error.partial)
            return done + len(error.partial), False
        # An answer in chunks names no length: that it was cut off shows here only. TLS raises plain OSErrors.
        except (OSError, http.client.HTTPException):
            return done, False
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
