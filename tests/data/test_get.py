"""`headrace data get` and --download, against a server on the loopback address with small sets in the real layouts."""

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from headrace.cli.data import main
from headrace.config.load import config_from
from headrace.core.errors import ConfigError, DataError, DownloadError
from headrace.data.dataset import open_dataset
from headrace.data.sets import get
from headrace.data.sets.known_sets import locate_set
from tests.core.file_server import FileServer
from tests.core.test_download import server

from .small_sets import SmallSet, write_cifar_python, write_idx

__all__ = ["server"]


@pytest.fixture
def mirror(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    monkeypatch.setenv(get.MIRROR, f"{server.url}/sets/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("DATASETS_DIR", "DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    monkeypatch.setattr("headrace.data.sets.known_sets.SYSTEM_DIRECTORY", tmp_path / "none")
    return server


def publish(server: FileServer, monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, bytes]) -> None:
    row = get.PUBLISHED[name]
    sums = tuple((file, hashlib.md5(data).hexdigest()) for file, data in files.items())
    monkeypatch.setitem(get.PUBLISHED, name, replace(row, files=sums))
    server.files.update({f"/sets/{name}/{file}": data for file, data in files.items()})


def archive_of(folder: Path, name: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as members:
        members.add(folder, name)
    return buffer.getvalue()


def test_an_archive(mirror: FileServer, small_cifar10: SmallSet, tmp_path: Path, monkeypatch, capsys) -> None:
    write_cifar_python(small_cifar10, tmp_path / "files")
    publish(mirror, monkeypatch, "cifar10", {"c.tar.gz": archive_of(tmp_path / "files", "cifar-10-batches-py")})
    with pytest.raises(DataError, match=r"`headrace data get cifar10`, or add --download"):
        locate_set(small_cifar10.row, ".")
    assert main(["get", "cifar10"]) == 0
    folder = tmp_path / "cache/headrace/datasets/cifar-10-batches-py"
    assert capsys.readouterr().out == f"cifar10 is in {folder}\ntrain on it: headrace train --dataset cifar10\n"
    assert locate_set(small_cifar10.row, ".").directory == folder
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == [folder.name]
    asked = len(mirror.asked)
    assert main(["get", "cifar10"]) == 0
    assert len(mirror.asked) == asked


def test_files_by_the_option(mirror: FileServer, small_mnist: SmallSet, tmp_path: Path, monkeypatch, capsys) -> None:
    write_idx(small_mnist, tmp_path / "files")
    publish(mirror, monkeypatch, "mnist", {file.name: file.read_bytes() for file in (tmp_path / "files").iterdir()})
    options = {"dataset": "mnist", "dataset_path": str(tmp_path / "mine")}
    with pytest.raises(DataError, match="was not found"):
        open_dataset(config_from(options).data, 0)
    dataset = open_dataset(config_from(options | {"download": True}).data, 0)
    assert len(dataset.train) == small_mnist.row.num_train
    assert capsys.readouterr().err == f"downloading mnist, which was not found, to {tmp_path / 'mine'}\n"
    assert sorted(path.name for path in (tmp_path / "mine").glob("mnist/train-*")) == sorted(
        path.name for path in (tmp_path / "files").glob("train-*")
    )
    with pytest.raises(ConfigError, match=r"download .* for the dataset folder"):
        config_from({"dataset": "folder", "download": True})


def test_class_folders(mirror: FileServer, tmp_path: Path, monkeypatch, capsys) -> None:
    for split, name in (("train", "n1"), ("train", "n2"), ("val", "n1"), ("val", "n2")):
        (tmp_path / "files" / split / name).mkdir(parents=True)
        Image.new("RGB", (9, 8)).save(tmp_path / "files" / split / name / "a.png")
    publish(mirror, monkeypatch, "imagenette160", {"i.tgz": archive_of(tmp_path / "files", "imagenette2-160")})
    options = {"dataset": "imagenette160", "image_size": 8}
    with pytest.raises(DataError, match=r"`headrace data get imagenette160`, or add --download"):
        open_dataset(config_from(options).data, 0)
    dataset = open_dataset(config_from(options | {"download": True}).data, 0)
    assert (len(dataset.train), dataset.info.class_names) == (2, ("n1", "n2"))
    folder = tmp_path / "cache/headrace/datasets/imagenette2-160"
    assert capsys.readouterr().err == f"downloading imagenette160, which was not found, to {folder.parent}\n"
    assert main(["get", "imagenette160"]) == 0
    assert capsys.readouterr().out.endswith("train on it: headrace train --dataset imagenette160\n")
    assert len(open_dataset(config_from(options | {"dataset_path": str(folder)}).data, 0).validation) == 2


def test_what_is_not_the_published_set(mirror: FileServer, tmp_path: Path, monkeypatch) -> None:
    publish(mirror, monkeypatch, "imagenette", {"i.tgz": b"not an archive"})
    with pytest.raises(DataError, match="cannot be unpacked"):
        main(["get", "imagenette", "--dataset-path", str(tmp_path / "out")])
    mirror.files["/sets/imagenette/i.tgz"] = b"another file"
    (tmp_path / "out/i.tgz").unlink()
    with pytest.raises(DownloadError, match="has the checksum"):
        main(["get", "imagenette", "--dataset-path", str(tmp_path / "out")])
    assert [path.name for path in (tmp_path / "out").iterdir() if not path.name.endswith(".lock")] == []
    with pytest.raises(DataError, match="Did you mean imagenette"):
        main(["get", "imagenete"])


def test_an_archive_cannot_write_elsewhere(mirror: FileServer, tmp_path: Path, monkeypatch) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as members:
        member = tarfile.TarInfo("../../evil")
        members.addfile(member)
    publish(mirror, monkeypatch, "imagenette", {"i.tgz": buffer.getvalue()})
    with pytest.raises(DataError, match="cannot be unpacked"):
        main(["get", "imagenette", "--dataset-path", str(tmp_path / "a/b")])
    assert not list(tmp_path.rglob("evil"))


def test_a_full_disk(mirror: FileServer, tmp_path: Path, monkeypatch) -> None:
    publish(mirror, monkeypatch, "imagenette", {"i.tgz": archive_of(Path(__file__).parent, "imagenette2-320")})
    sizes = iter([10**12, 10])
    usage = get.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(get.shutil, "disk_usage", lambda path: usage._replace(free=next(sizes)))
    with pytest.raises(DataError, match=r"unpacks to .* has 10 B"):
        main(["get", "imagenette", "--dataset-path", str(tmp_path / "out")])
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name[0] != ".") == ["i.tgz"]
