"""Stand-ins for files of a store: a folder of the cache whose files have the right names and sizes, and no content yet.

Each stand-in is a sparse file. Whoever wants bytes of it asks for them first; they are fetched by ranges, in pieces
that then stay in the file, until the set's share of the disk is used up. What comes later is fetched for each use and
not kept: in an epoch every sample is read once, so that replacing what is there would help nothing.
"""

import atexit
import fcntl
import hashlib
import io
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from headrace.core.errors import DataError
from headrace.core.files import cache_directory, path_inside, write_atomic
from headrace.core.store import Entry, Store, StoreError

# Where all of a set fits, a request brings what later samples will want as well. Where it does not, little more than
# what is wanted: the rest would be fetched again.
_LARGE_PIECE, _SMALL_PIECE = 1 << 20, 1 << 15
_WHOLE_PIECE = 1 << 26  # of files that are images
_MOST_REQUEST = 8 << 20  # of neighbouring pieces in one request
_MOST_HELD = 256 << 20  # bytes that were fetched ahead and are not kept
_AHEAD_THREADS, _AHEAD_SAMPLES = 4, 32
_FREE_SHARE = 0.9  # of the disk's free space that may be used


@dataclass(frozen=True, kw_only=True, eq=False)
class Listed:
    """The files of a place in a store."""

    names: Sequence[str]
    sizes: np.ndarray  # int64
    digest: str  # of all that is known of them
    # What changes with a file's content. Empty for files that are images themselves: they are brought whole, and there
    # are too many to make stand-ins of.
    marks: Sequence[str] = ()

    @property
    def are_images(self) -> bool:
        return not self.marks


def listed(entries: Sequence[Entry]) -> Listed:
    """Return a few files as they were listed."""
    return Listed(
        names=[entry.name for entry in entries],
        sizes=np.array([entry.size for entry in entries], np.int64),
        digest=hashlib.sha256(json.dumps(list(entries)).encode()).hexdigest(),
        marks=[entry.mark for entry in entries],
    )


def home_of(store: Store, digest: str) -> Path:
    """Return the folder of the cache for files of a place."""
    name = "-".join(filter(None, store.address.partition("://")[2].split("/")[:4]))[:80]
    key = hashlib.sha256(f"{store.address} {digest}".encode()).hexdigest()[:12]
    return cache_directory() / "stores" / f"{name}-{key}"


class Mirror:
    """The files of a place in a store, as stand-ins in a folder of this machine. Safe to use from several threads."""

    def __init__(self, store: Store, files: Listed, most_bytes: int) -> None:
        self.store, self.files = store, files
        self._home = home_of(store, files.digest)
        self.folder = self._home / "files"
        self._sizes = sizes = files.sizes
        self._lock, self._arrived = threading.Lock(), threading.Condition()
        self._coming: set[int] = set()
        self._written: set[int] = set()
        self._held: dict[tuple[int, int], bytes] = {}
        self._held_bytes = 0
        # So far: what came, while anything was on its way, and how long threads waited that wanted it.
        self.fetched_bytes, self.link_seconds, self.waited_seconds = 0, 0.0, 0.0
        self._on_the_way, self._changed = 0, 0.0
        self._pool: ThreadPoolExecutor | None = None
        try:
            self._prepare(int(sizes.sum()), most_bytes)
        except OSError as error:
            raise DataError(
                f"{store.address} cannot be kept in {self._home}: {error.strerror or error}.",
                remedy="Free some space, or name another cache directory: XDG_CACHE_HOME.",
            ) from None
        small = _LARGE_PIECE if sizes.sum() <= self.most_bytes else _SMALL_PIECE
        self._piece = _WHOLE_PIECE if files.are_images else small
        self._first = np.concatenate([[0], np.cumsum(-(-sizes // self._piece))])  # numbers of the first pieces
        names = () if files.are_images else files.names
        self._numbers = {str(self.folder / name): number for number, name in enumerate(names)}
        self._there = self._open_flags()
        self._left = self.most_bytes - int(self._costs(np.flatnonzero(self._there)).sum())

    def _prepare(self, total: int, most_bytes: int) -> None:
        """Make the stand-ins that are not there, after others have made room."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._using = (self._home / ".using").open("a")
        with suppress(OSError):
            fcntl.flock(self._using, fcntl.LOCK_SH)
        remove_unused(most_bytes - total, self._home)
        free = int(shutil.disk_usage(self._home).free * _FREE_SHARE) + _claimed(self._home)
        self.most_bytes = max(0, min(most_bytes, free))
        (self._home / ".using").write_text(str(min(total, self.most_bytes)))
        for name, size, mark in zip(self.files.names, self._sizes.tolist(), self.files.marks, strict=False):
            path = path_inside(self.folder, name)
            if path.is_file() and path.stat().st_size == size:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.truncate(size)
            # Indices are kept by names, sizes and times: what has changed in the store has another time here.
            changed = int(hashlib.sha256(mark.encode()).hexdigest()[:8], 16) >> 1
            os.utime(path, (changed, changed))

    def _open_flags(self) -> np.ndarray:
        """Return which pieces are there, in a file that says so to later processes."""
        count = max(1, int(self._first[-1]))
        # After a power failure a flag may be on the disk without its piece: only what was synced counts then.
        self._synced = self._home / f"pieces-{self._piece}-synced"
        path = self._home / f"pieces-{self._piece}-{_boot()}"
        if not path.is_file() and self._synced.is_file():
            shutil.copyfile(self._synced, path)
        if not path.is_file() or path.stat().st_size != count:
            with path.open("ab") as file:
                file.truncate(count)
        flags = np.memmap(path, np.uint8, "r+")
        atexit.register(self.sync)
        return flags

    def sync(self) -> None:
        """Wait until the disk has what was brought, and write down that it has."""
        with suppress(OSError):
            there = self._there.tobytes()
            for number in sorted(self._written):
                with (self.folder / self.files.names[number]).open("rb") as file:
                    os.fsync(file.fileno())
            if self._written:
                write_atomic(self._synced, there)

    def number(self, path: Path | str) -> int | None:
        """Return the number of a stand-in."""
        return self._numbers.get(str(path))

    def fetch(
        self, numbers: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, *, needed: bool = False
    ) -> np.ndarray:
        """Bring parts of files into the stand-ins; return which of them are there then, all others being too much.

        What is `needed` is brought though it be too much.
        """
        began = time.perf_counter()
        there = self._fetch(numbers, offsets, lengths, needed=needed)
        self._count(waited=time.perf_counter() - began)
        return there

    def _count(self, *, waited: float = 0.0, num_bytes: int = 0, begins: int = 0) -> None:
        """Count what came, for how long somebody waited for it, and for how long anything was on its way."""
        with self._lock:
            now = time.perf_counter()
            if self._on_the_way:
                self.link_seconds += now - self._changed
            self._changed, self._on_the_way = now, self._on_the_way + begins
            self.waited_seconds, self.fetched_bytes = self.waited_seconds + waited, self.fetched_bytes + num_bytes

    def _fetch(
        self, numbers: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, *, needed: bool = False
    ) -> np.ndarray:
        end = np.maximum(self._first[numbers + 1] - 1, self._first[numbers])  # nothing is behind a file's last byte
        first = np.minimum(self._first[numbers] + offsets // self._piece, end)
        last = np.minimum(self._first[numbers] + np.maximum(offsets, offsets + lengths - 1) // self._piece, end)
        while True:
            absent = self._absent(first, last)
            if not len(absent):
                return np.ones(len(first), bool)
            with self._arrived:
                free = [piece for piece in absent.tolist() if piece not in self._coming]
                mine = free if needed else self._affordable(free)
                if not mine and (free or not self._coming.intersection(absent.tolist())):
                    return self._whole(first, last)
                self._coming.update(mine)
                self._left -= int(self._costs(np.array(mine, np.int64)).sum())
                if not mine:
                    self._arrived.wait(1.0)
                    continue
            try:
                self._bring(mine)
            finally:
                with self._arrived:
                    self._coming.difference_update(mine)
                    failed = [piece for piece in mine if not self._there[piece]]
                    self._left += int(self._costs(np.array(failed, np.int64)).sum())
                    self._arrived.notify_all()

    def _costs(self, pieces: np.ndarray) -> np.ndarray:
        """Return the bytes that pieces take."""
        number = np.searchsorted(self._first, pieces, "right") - 1
        return np.minimum(self._piece, self._sizes[number] - (pieces - self._first[number]) * self._piece)

    def _affordable(self, pieces: list[int]) -> list[int]:
        costs = self._costs(np.array(pieces, np.int64))
        return pieces[: int(np.searchsorted(np.cumsum(costs), self._left, "right"))]

    def _absent(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        counts = last - first + 1
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        pieces = np.unique(np.repeat(first, counts) + within)
        return pieces[self._there[pieces] == 0]

    def _whole(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        return np.array([self._there[a : b + 1].all() for a, b in zip(first.tolist(), last.tolist(), strict=True)])

    def _bring(self, pieces: list[int]) -> None:
        """Fetch these pieces, neighbours by one request, and write them to their places."""
        runs: list[list[int]] = []
        for piece in pieces:
            same_file = runs and np.searchsorted(self._first, piece, "right") == np.searchsorted(
                self._first, runs[-1][0], "right"
            )
            if same_file and piece == runs[-1][-1] + 1 and len(runs[-1]) * self._piece < _MOST_REQUEST:
                runs[-1].append(piece)
            else:
                runs.append([piece])
        places = [self._place(run) for run in runs]
        for start in range(0, len(runs), 64):
            some = slice(start, start + 64)
            for run, (number, begin, _), data in zip(runs[some], places[some], self._read(places[some]), strict=True):
                self._write(number, begin, data)
                self._there[run[0] : run[-1] + 1] = 1

    def _place(self, run: list[int]) -> tuple[int, int, int]:
        number = int(np.searchsorted(self._first, run[0], "right")) - 1
        begin = (run[0] - int(self._first[number])) * self._piece
        return number, begin, min(begin + len(run) * self._piece, int(self._sizes[number]))

    def _write(self, number: int, begin: int, data: bytes) -> None:
        path = path_inside(self.folder, self.files.names[number])
        try:
            if self.files.are_images:
                path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(handle, data, begin)
                self._written.add(number)
            finally:
                os.close(handle)
        except OSError as error:
            raise DataError(
                f"{self.folder} cannot be written: {error.strerror}.",
                remedy="Free some space, lower --dataset-disk-budget, or name another cache: XDG_CACHE_HOME.",
            ) from None

    def _read(self, places: Sequence[tuple[int, int, int]]) -> list[bytes]:
        self._count(begins=1)
        try:
            return self.store.read_ranges([(self.files.names[number], begin, end) for number, begin, end in places])
        except StoreError as error:
            raise DataError(error.problem, rule=error.rule, remedy=error.remedy) from None
        finally:
            self._count(begins=-1, num_bytes=sum(end - begin for _, begin, end in places))

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Return a part of a file, kept or not."""
        one = np.array([number]), np.array([offset]), np.array([length])
        if self._fetch(*one)[0]:
            with self.path(number).open("rb") as file:
                return os.pread(file.fileno(), length, offset)
        with self._lock:
            data = self._held.pop((number, offset), None)
            self._held_bytes -= len(data or b"")
        if data is not None and len(data) == length:
            return data
        began = time.perf_counter()
        data = self._read([(number, offset, offset + length)])[0]
        self._count(waited=time.perf_counter() - began)
        return data

    def ahead(self, numbers: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> None:
        """Begin to fetch parts of files that will be wanted soon, in this order."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_AHEAD_THREADS, thread_name_prefix="store-ahead")
        for start in range(0, len(numbers), _AHEAD_SAMPLES):
            some = slice(start, start + _AHEAD_SAMPLES)
            self._pool.submit(self._fetch_ahead, numbers[some], offsets[some], lengths[some])

    def _fetch_ahead(self, numbers: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> None:
        with suppress(DataError):  # whoever wants them meets the same error, and says it
            there = self._fetch(numbers, offsets, lengths)
            rows = [(int(numbers[i]), int(offsets[i]), int(lengths[i])) for i in np.flatnonzero(~there)]
            with self._lock:
                rows = [row for row in rows if row[:2] not in self._held]
                if not rows or self._held_bytes > _MOST_HELD:
                    return
            for row, data in zip(rows, self._read([(n, o, o + size) for n, o, size in rows]), strict=True):
                with self._lock:
                    self._held_bytes += len(data) - len(self._held.get(row[:2], b""))
                    self._held[row[:2]] = data

    @contextmanager
    def whole(self, number: int) -> Iterator[Path]:
        """Yield a path at which all of a file is; one that is not kept is deleted afterwards."""
        size = self._sizes[number : number + 1]
        if not size[0] or self.fetch(np.array([number]), size * 0, size)[0]:
            yield self.path(number)
            return
        with tempfile.TemporaryDirectory(prefix="whole-", dir=self._home) as folder:
            target = Path(folder) / self.path(number).name
            self.store.fetch(self.files.names[number], target, int(size[0]))
            yield target

    def path(self, number: int) -> Path:
        """Return where a file stands, or will."""
        return self.folder / self.files.names[number]

    def size(self, number: int) -> int:
        return int(self._sizes[number])

    @property
    def kept_share(self) -> float:
        """Return how much of the set the disk may keep."""
        return min(1.0, self.most_bytes / max(1, int(self._sizes.sum())))


@dataclass(frozen=True, kw_only=True)
class Link:
    """What came from stores, in how many seconds in which anything was on its way, and how long threads waited."""

    bytes_of: Mapping[str, int]  # by the store's address
    seconds: float
    waited_seconds: float

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_of.values())

    def places_since(self, before: "Link") -> tuple[str, ...]:
        """Return the addresses that something came from since then."""
        return tuple(place for place, count in self.bytes_of.items() if count > before.bytes_of.get(place, 0))


def link_so_far() -> Link:
    """Return what this process has fetched."""
    used = [mirror for mirror in _mirrors.values() if mirror.fetched_bytes]
    bytes_of: dict[str, int] = {}
    for mirror in used:
        bytes_of[mirror.store.address] = bytes_of.get(mirror.store.address, 0) + mirror.fetched_bytes
    return Link(
        bytes_of=bytes_of,
        seconds=sum(mirror.link_seconds for mirror in used),
        waited_seconds=sum(mirror.waited_seconds for mirror in used),
    )


_mirrors: dict[str, Mirror] = {}


def add_mirror(mirror: Mirror) -> None:
    """Make a mirror known: from now on its stand-ins are read through the functions below."""
    _mirrors[str(mirror.folder)] = mirror


def mirror_of(path: Path | str) -> Mirror | None:
    """Return the mirror that a path is a stand-in of; None for ordinary files."""
    if not _mirrors:
        return None
    return next((mirror for folder, mirror in _mirrors.items() if f"{path}/".startswith(f"{folder}/")), None)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path with all of a file's content: itself, unless it stands for a file of a store."""
    mirror = mirror_of(path)
    number = mirror.number(path) if mirror else None
    if mirror is None or number is None:
        yield path
        return
    with mirror.whole(number) as there:
        yield there


def open_file(path: Path) -> IO[bytes]:
    """Open a file for reading, wherever its bytes are: of a stand-in they are fetched as they are read."""
    mirror = mirror_of(path)
    number = mirror.number(path) if mirror else None
    if mirror is None or number is None:
        return path.open("rb")
    return io.BufferedReader(_Ranges(mirror, number), 1 << 16)


class _Ranges(io.RawIOBase):
    """A file of a store that is read by ranges."""

    def __init__(self, mirror: Mirror, number: int) -> None:
        self._mirror, self._number, self._at = mirror, number, 0
        self._size = mirror.size(number)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        length = max(0, min(len(buffer), self._size - self._at))
        if length:
            buffer[:length] = self._mirror.read(self._number, self._at, length)
        self._at += length
        return length


def remove_unused(most_bytes: int, but: Path) -> None:
    """Delete sets that no process uses, those first that were used longest ago, until what stays is not too much."""
    homes = []
    for home in but.parent.iterdir():
        with suppress(OSError):
            if home != but:
                homes.append(((home / ".using").stat().st_mtime, _claimed(home), home))
    total = sum(size for _, size, _ in homes)
    for _, size, home in sorted(homes):
        if total <= max(0, most_bytes):
            return
        with suppress(OSError), (home / ".using").open("r") as using:
            fcntl.flock(using, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(home, ignore_errors=True)
            total -= size


def _claimed(home: Path) -> int:
    """Return how much of the disk a set may take. Counting a million files would take seconds."""
    try:
        return int((home / ".using").read_text() or 0)
    except (OSError, ValueError):
        return 0


def _boot() -> str:
    """Return what changes whenever the machine starts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return "any"
