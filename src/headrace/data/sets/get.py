"""Datasets by name: where they are published, their checksums, and how they are unpacked.

The checksums are the published MD5 sums. `$HEADRACE_MIRROR`, or `--mirror`, names a server that has the same files
under MIRROR/NAME/FILE.
"""

import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.core.download import Remote, download, locked
from headrace.core.errors import DataError, did_you_mean
from headrace.core.files import cache_directory
from headrace.core.units import format_bytes

MIRROR = "HEADRACE_MIRROR"


@dataclass(frozen=True, kw_only=True)
class PublishedSet:
    """A dataset that can be downloaded: its files with their MD5 sums, and the folder that they end up in."""

    name: str
    bases: tuple[str, ...]  # addresses that have the files, in the order in which they are tried
    files: tuple[tuple[str, str], ...]  # name, MD5
    folder: str  # below the datasets' directory; for an archive, the folder inside it
    is_archive: bool = False


_FAST_AI = "https://s3.amazonaws.com/fast-ai-imageclas/"
_TORONTO = "https://www.cs.toronto.edu/~kriz/"


def _archive(name: str, base: str, file: str, md5: str, folder: str) -> PublishedSet:
    return PublishedSet(name=name, bases=(base,), files=((file, md5),), folder=folder, is_archive=True)


def _idx_files(*md5s: str) -> tuple[tuple[str, str], ...]:
    parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple((f"{part}-ubyte.gz", md5) for part, md5 in zip(parts, md5s, strict=True))


PUBLISHED = {
    row.name: row
    for row in (
        _archive(
            "cifar10", _TORONTO, "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", "cifar-10-batches-py"
        ),
        _archive(
            "cifar100", _TORONTO, "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", "cifar-100-python"
        ),
        PublishedSet(
            name="mnist",
            bases=(
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
            ),
            files=_idx_files(
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
            folder="mnist",
        ),
        PublishedSet(
            name="fashion_mnist",
            bases=(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            ),
            files=_idx_files(
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
            folder="fashion-mnist",
        ),
        _archive("imagenette", _FAST_AI, "imagenette2-320.tgz", "3df6f0d01a2c9592104656642f5e78a3", "imagenette2-320"),
        _archive(
            "imagenette160", _FAST_AI, "imagenette2-160.tgz", "e793b78cc4c9e9a4ccc0c1155377a412", "imagenette2-160"
        ),
    )
}


def datasets_directory() -> Path:
    """Return where downloaded datasets are kept if no directory is named; searched by default."""
    return cache_directory() / "datasets"


def get_set(
    name: str,
    directory: Path | None = None,
    mirror: str = "",
    tell: Callable[[str, int, int | None], None] = lambda file, done, total: None,
) -> Path:
    """Download a dataset unless it is there; return its folder. `tell` receives the progress of each file."""
    row = PUBLISHED.get(name)
    if row is None:
        raise DataError(f"There is no dataset {name} to download.", remedy=did_you_mean(name, PUBLISHED))
    directory = directory or datasets_directory()
    folder = directory / row.folder
    mirror = mirror or os.environ.get(MIRROR, "")
    bases = (f"{mirror.rstrip('/')}/{name}/",) if mirror else row.bases
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / f".{row.folder}.lock"):
            # Under the lock: another process may have finished the download while this one waited.
            if row.is_archive and folder.is_dir():  # renamed into place when it was complete
                return folder
            for file, md5 in row.files:
                remote = Remote(urls=tuple(base + file for base in bases), checksum=f"md5:{md5}")
                place = (directory if row.is_archive else folder) / file
                download(remote, place, lambda done, total, file=file: tell(file, done, total))
                if row.is_archive:
                    _unpack(place, row.folder)
                    place.unlink()
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written: {error.strerror or error}.", remedy="Choose a directory with --dataset-path."
        ) from None
    return folder


def _unpack(archive: Path, folder: str) -> None:
    """Unpack an archive beside it: whole or not at all, and nothing outside `folder`."""
    temporary = archive.with_name(f".{folder}.tmp-{os.getpid()}")
    try:
        with tarfile.open(archive) as members:
            # Before unpacking: a full disk in the middle would leave most of a dataset behind, and other programs
            # without space.
            size = sum(member.size for member in members)
            free = shutil.disk_usage(archive.parent).free
            if size > free:
                raise DataError(
                    f"{archive.name} unpacks to {format_bytes(size)}, but {archive.parent} has {format_bytes(free)}.",
                    remedy="Free some space, or choose another directory with --dataset-path.",
                )
            # The filter refuses absolute paths, .. and links to the outside.
            members.extractall(temporary, filter="data")
        (temporary / folder).rename(archive.parent / folder)
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{archive} cannot be unpacked: {error}.", remedy="Delete it and try again.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
