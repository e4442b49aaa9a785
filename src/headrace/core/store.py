"""Stores: places that are not on this machine's disks (s3://, gs://, az://, hf://, https://, memory://), by fsspec.

A `Store` lists, reads by ranges, writes and deletes. What may pass (a server that is busy, a connection that breaks) is
tried again; what will not (no such bucket, no permission) is a StoreError that names the address and the remedy.
"""

import errno
import importlib
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from headrace.core.addresses import hide_addresses
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.local_path import is_address

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A kind of store: the module that fsspec needs, how it is installed, and where credentials are looked for."""

    module: str
    extra: str
    credentials: str
    options: tuple[tuple[str, Any], ...] = ()


_S3 = Scheme(
    module="s3fs",
    extra="s3",
    credentials="AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; another server than Amazon's: "
    "AWS_ENDPOINT_URL",
    options=(("config_kwargs", {"connect_timeout": 10, "read_timeout": 30, "max_pool_connections": 64}),),
)
_GS = Scheme(
    module="gcsfs", extra="gs", credentials="GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login"
)
_AZ = Scheme(
    module="adlfs", extra="az", credentials="AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and a key"
)
_WEB = Scheme(module="aiohttp", extra="s3", credentials="an address that opens it, or ~/.netrc")
SCHEMES = {
    "s3": _S3,
    "s3a": _S3,
    "gs": _GS,
    "gcs": _GS,
    "az": _AZ,
    "abfs": _AZ,
    "abfss": _AZ,
    "hf": Scheme(module="huggingface_hub", extra="hub", credentials="HF_TOKEN, or hf auth login"),
    "https": _WEB,
    "http": _WEB,
    "memory": Scheme(module="fsspec", extra="s3", credentials="none"),
}
PATIENCE_SECONDS = 60.0  # for which what may pass is tried again
_FIRST_PATIENCE_SECONDS, _DOUBTFUL_SECONDS = 15.0, 5.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.2, 10.0


class StoreError(HeadraceError):
    """A place in a store that cannot be read or written; `may_pass` where later the same might work."""

    def __init__(self, problem: str, *, rule: str = "", remedy: str = "", may_pass: bool = False) -> None:
        super().__init__(problem, rule=rule, remedy=remedy)
        self.may_pass = may_pass


class Entry(NamedTuple):
    """A file in a store: its name below the place that was listed, its size, and what changes with its content."""

    name: str
    size: int
    mark: str


@dataclass(frozen=True, eq=False)
class Store:
    """A place in a store, and what is below it. Safe to use from several threads."""

    address: str  # without the secrets that it may hold
    scheme: Scheme
    system: Any  # of fsspec
    root: str  # what fsspec calls it
    single: str = ""  # the name of the file that `root` is, where the place is one file

    def path(self, name: str = "") -> str:
        """Return what fsspec calls a file below this place."""
        return f"{self.root}/{name}" if name and not self.single else self.root

    @property
    def _anew(self) -> dict[str, bool]:
        return {} if self.scheme is _WEB else {"refresh": True}  # which would be taken for a part of the request

    def of_one_file(self, entry: Entry) -> "Store":
        """Return the place that the file at this address is in, as if nothing else were there."""
        above = self.address.partition("?")[0].rpartition("/")[0]
        return Store(above, self.scheme, self.system, self.root, entry.name)

    def below(self, name: str) -> "Store":
        """Return a place below this one."""
        return Store(f"{self.address}/{name}", self.scheme, self.system, self.path(name))

    def listing(self, name: str = "") -> tuple[list[str], list[Entry]]:
        """Return the folders, and the files, directly in a folder, sorted; names are those in it."""
        place = self.path(name)
        rows = self._try("list", name, lambda: self.system.ls(place, detail=True, **self._anew))
        folders, files = [], []
        for row in rows:
            inner = str(row["name"]).rstrip("/").rpartition("/")[2]
            if str(row["name"]).strip("/") == place.strip("/"):
                if row["type"] == "file" and int(row.get("size") or 0):  # a file was listed, not a folder
                    return [], [_entry(inner, row)]
                continue  # some tools make an empty file to stand for a folder
            if row["type"] == "directory":
                folders.append(inner)
            else:
                files.append(_entry(inner, row))
        return sorted(folders), sorted(files)

    def entry(self, name: str = "") -> Entry | None:
        """Return the file of a name, None where it is a folder or nothing."""
        try:
            # The first that is asked of most places: what cannot be reached at all should be said soon.
            row = self._try("look at", name, lambda: self.system.info(self.path(name)), _FIRST_PATIENCE_SECONDS)
        except StoreMissing:
            return None
        return _entry(name or self.root.partition("?")[0].rpartition("/")[2], row) if row["type"] == "file" else None

    def read(self, name: str = "") -> bytes:
        """Return a whole file."""
        return self._try("read", name, lambda: self.system.cat_file(self.path(name)))

    def read_ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return parts of files, each (name, first byte, byte behind the last), read at the same time."""
        found: list[Any] = [None] * len(wanted)

        def attempt() -> None:
            missing = [place for place, data in enumerate(found) if data is None]
            rows = [wanted[place] for place in missing]
            paths = [self.path(name) for name, _, _ in rows]
            answers = self.system.cat_ranges(
                paths, [start for _, start, _ in rows], [end for _, _, end in rows], on_error="return"
            )
            problem: BaseException | None = None
            for place, (_, start, end), answer in zip(missing, rows, answers, strict=True):
                if isinstance(answer, BaseException):
                    problem = answer
                elif len(answer) != end - start:
                    problem = ConnectionError(f"{len(answer):,} bytes came instead of {end - start:,}")
                else:
                    found[place] = answer
            if problem is not None:
                raise problem

        self._try("read", wanted[0][0] if len(wanted) == 1 else "", attempt)
        return found

    def fetch(self, name: str, target: Path, size: int) -> None:
        """Write a whole file to a path of this machine, which it is given when it is complete."""
        partial = target.with_name(f".{target.name}.part-{id(target)}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                for first in range(0, size, _PART * _PARTS):
                    ends = range(first, min(size, first + _PART * _PARTS), _PART)
                    for data in self.read_ranges([(name, start, min(size, start + _PART)) for start in ends]):
                        file.write(data)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def put(self, name: str, content: bytes | Path, patience: float = PATIENCE_SECONDS) -> None:
        """Write a file; readers find the old one or the new one, whole."""
        path = self.path(name)
        if isinstance(content, Path):
            self._try("write", name, lambda: self.system.put_file(str(content), path), patience)
        else:
            self._try("write", name, lambda: self.system.pipe_file(path, content), patience)

    def delete(self, name: str) -> None:
        """Delete a file; one that is not there is no error."""
        with suppress(StoreMissing):
            self._try("delete", name, lambda: self.system.rm_file(self.path(name)))

    def _try(self, verb: str, name: str, act: Callable[[], Answer], patience: float = PATIENCE_SECONDS) -> Answer:
        began, wait = time.monotonic(), _FIRST_WAIT_SECONDS
        while True:
            try:
                return act()
            except Exception as error:  # each store has errors of its own
                failure = self._failure(verb, name, error)
                if not failure.may_pass or time.monotonic() - began + wait > patience:
                    raise failure from None
                if getattr(error, "errno", None) == errno.EINVAL:  # a wrong request, or one whose body was cut off
                    patience = min(patience, _DOUBTFUL_SECONDS)
            time.sleep(wait * random.uniform(0.5, 1))  # many who wait for one server must not come back together
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    def _failure(self, verb: str, name: str, error: Exception) -> StoreError:
        place = f"{self.address}/{name}" if name else self.address
        kind, words = type(error).__name__, hide_addresses(str(error)).strip()[:200]
        if isinstance(error, FileNotFoundError) or kind in ("NoSuchBucket", "RepositoryNotFoundError"):
            return StoreMissing(
                f"{place} does not exist.",
                remedy="Check the names of the bucket and of the folder"
                + (", and AWS_ENDPOINT_URL, which names the server." if self.scheme is _S3 else "."),
            )
        if isinstance(error, PermissionError) or "Credential" in kind or "Auth" in kind:
            return StoreError(
                f"Cannot {verb} {place}: {words or 'permission denied'}.",
                rule=f"Credentials are looked for where {self.scheme.module} looks: {self.scheme.credentials}.",
                remedy=f"Give ones that may {verb} there.",
            )
        return StoreError(
            f"Cannot {verb} {place}: {words or kind}.",
            rule="It was tried again and again.",
            remedy="Check the network and the store, then give the same command again.",
            may_pass=not isinstance(error, NotImplementedError | TypeError | ValueError),
        )


class StoreMissing(StoreError):
    """A place in a store that does not exist."""


_PART, _PARTS = 8 << 20, 8  # of a file that is read whole: bytes of a request, and requests at a time


def open_store(address: str, *, writes: bool = False) -> Store:
    """Return the store of an address; a package that it needs and that is not installed is a ConfigError."""
    shown = hide_addresses(address).rstrip("/")
    name = address.partition("://")[0].lower()
    scheme = SCHEMES.get(name)
    if scheme is None or not is_address(address):
        raise ConfigError(
            f"{shown} is no address of a store.",
            rule=f"Known are {', '.join(f'{known}://' for known in SCHEMES)}, each followed by a name.",
        )
    try:
        fsspec = importlib.import_module("fsspec")
        importlib.import_module(scheme.module)
    except ImportError:
        raise ConfigError(
            f"{shown} needs the package {scheme.module}, which is not installed.",
            remedy=f"pip install 'headrace[{scheme.extra}]'",
        ) from None
    if writes and name in ("http", "https"):
        raise ConfigError(f"Nothing can be written to {shown}.", remedy="Give a folder of this machine, or a bucket.")
    try:
        options = dict(scheme.options) | {"use_listings_cache": False}
        system, root = fsspec.core.url_to_fs(address.rstrip("/"), **({} if name == "memory" else options))
        if scheme is _S3 and not writes and not _has_credentials():
            system = type(system)(anon=True, **options)  # public data needs none
    except Exception as error:
        raise ConfigError(f"{shown} cannot be opened: {hide_addresses(str(error))[:200]}.") from None
    return Store(shown, scheme, system, root.rstrip("/"))


def _has_credentials() -> bool:
    session = importlib.import_module("botocore.session").Session()  # which s3fs brings
    return session.get_credentials() is not None


def _entry(name: str, row: dict[str, Any]) -> Entry:
    mark = next((row[key] for key in ("ETag", "etag", "oid", "content_settings", "LastModified") if row.get(key)), "")
    return Entry(name, int(row.get("size") or 0), str(mark or row.get("mtime") or row.get("created") or ""))
