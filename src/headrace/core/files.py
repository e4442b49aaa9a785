"""Files: atomic writing, durable renames, entries of directories, paths that stay inside of one."""

import os
import zipfile
from collections.abc import Iterable
from pathlib import Path


def cache_directory(program: str = "headrace") -> Path:
    """Return a program's directory among the user's caches; it need not exist."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / program  # the standard ignores relative paths


def is_directory(entry: os.DirEntry[str]) -> bool:
    """Say whether an entry of `os.scandir` is a directory. For a link to itself, `entry.is_dir()` would raise."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def entries_of(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the entries of a zip archive; raise ValueError if two of them are the same bytes."""
    infos = archive.infolist()
    # Python 3.13 warns of such an entry and reads it all the same; before, it did not even warn.
    if len({info.header_offset for info in infos}) < len(infos):
        raise ValueError("entries of the archive overlap")
    return infos


# The longest name of a file that Linux, macOS and Windows all take.
_LONGEST_NAME = 255


def path_inside(folder: Path, name: str) -> Path:
    """Return the path that a name from elsewhere has in a folder; ValueError if it could lead out of it.

    A name of several parts has slashes between them; no part is empty, `.`, `..` or too long for a file.
    """
    for part in name.split("/"):
        if part in ("", ".", "..") or "\\" in part or not part.isprintable():
            raise ValueError(f"{name[:80]!r} is no name of a file")
        if len(part.encode(errors="surrogatepass")) > _LONGEST_NAME:
            raise ValueError(f"{name[:40]!r}... is too long for the name of a file: {len(part):,} letters")
    return folder / name


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable: a rename survives a power failure only after this."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    write_parts_synced(path, [data])


def write_parts_synced(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file from its parts, each asked for when those before it are written; wait until the disk has it."""
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(
    path: Path, data: bytes, *, durable: bool = True, mode: int | None = None, replace: bool = True
) -> None:
    """Replace a file atomically: readers, and whoever comes after a crash, find the old content or the new one.

    One that is not durable may be damaged after a power failure, which its readers have to notice. Without `replace` a
    file that is there already is a FileExistsError, also if two processes write it at once.
    """
    # Beside the file, since a rename is atomic within one file system only; with the process, since two may write at
    # once.
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        if mode is not None:
            temporary.touch(mode)
        if durable:
            write_synced(temporary, data)
        else:
            temporary.write_bytes(data)
        if replace or not _link(temporary, path):
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def _link(temporary: Path, path: Path) -> bool:
    """Give a file its name unless another one has it, FileExistsError; False where files cannot have two names."""
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        raise
    except OSError:
        if path.exists():
            raise FileExistsError(path) from None
        return False
    temporary.unlink()
    return True
