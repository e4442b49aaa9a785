"""Sets in a store: the same samples as on the disk, fetched by ranges, kept within a budget, also from bad servers."""

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("s3fs")

from headrace.cli.main import main
from headrace.config.load import config_from
from headrace.core import store as stores
from headrace.core.errors import ConfigError, DataError
from headrace.data.dataset import DataSet, open_dataset
from headrace.data.feeding.block_reader import SlowlyFetched
from headrace.data.sets import catalog
from headrace.data.sets import mirror as mirrors
from headrace.data.sets.mirror import Mirror, listed, mirror_of
from headrace.data.sets.stored_folders import Names
from headrace.data.sets.tf_example import write_example
from headrace.data.sets.tfrecord_file import write_records
from tests.core.s3_server import S3Server, running

from .image_files import encode, smooth, write_classes
from .small_sets import make_small, write_cifar_binary


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stores, "_FIRST_WAIT_SECONDS", 0.01)
    # As in a new process, on a machine with another cache.
    monkeypatch.setattr(mirrors, "_mirrors", {})
    from headrace.data.sets.stored_place import stand_in

    stand_in.cache_clear()
    with running(monkeypatch) as server:
        yield server
    stand_in.cache_clear()


def write_tars(folder: Path) -> None:
    folder.mkdir()
    for name, first, count in (("train-0", 0, 20), ("train-1", 20, 20), ("val-0", 40, 8)):
        with tarfile.open(folder / f"{name}.tar", "w") as archive:
            for number in range(first, first + count):
                for suffix, data in (("jpg", image(number)), ("cls", str(number % 4).encode())):
                    info = tarfile.TarInfo(f"{number:04d}.{suffix}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    (folder / "classes.txt").write_text("ant\nbee\ncow\ndog\n")


def write_tfrecords(folder: Path) -> None:
    folder.mkdir()
    for split, shards in (("train", 2), ("validation", 1)):
        for shard in range(shards):
            records = [
                write_example({"image/encoded": [image(n)], "image/class/label": [n % 4 + 1]})
                for n in range(shard * 12, shard * 12 + 12)
            ]
            write_records(folder / f"{split}-{shard:05d}-of-{shards:05d}", records)


def write_packed(folder: Path) -> None:
    write_classes(folder / "images", {"ant": 12, "bee": 12})
    words = f"data pack --dataset folder --dataset-path {folder / 'images'} --output {folder / 'set.hrp'}"
    assert main(words.split()) == 0


def write_arrays(folder: Path) -> None:
    folder.mkdir()
    images = np.stack([smooth(40, 40, seed) for seed in range(24)])
    np.savez(folder / "set.npz", images=images, labels=np.arange(24) % 3)


def write_parquet(folder: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (folder / "data").mkdir(parents=True)
    for split, count in (("train", 24), ("validation", 8)):
        rows = [{"bytes": image(number), "path": f"{number}.jpg"} for number in range(count)]
        table = pa.table({"image": rows, "label": [number % 4 for number in range(count)]})
        parquet.write_table(table, folder / f"data/{split}-0.parquet", row_group_size=8)


def image(number: int) -> bytes:
    return encode(smooth(70, 60 + number % 5, number))


def serve(server: S3Server, folder: Path) -> None:
    """Put a folder's files under s3://data/set."""
    for path in folder.rglob("*"):
        if path.is_file() and "images" not in path.parts:
            server.buckets["data"][f"set/{path.relative_to(folder)}"] = path.read_bytes()


def opened(path: str, **options: object) -> DataSet:
    return open_dataset(config_from({"dataset": "auto", "dataset_path": path, "image_size": 48, **options}).data, 3)


def assert_same(found: DataSet, wanted: DataSet) -> None:
    assert found.info.class_names == wanted.info.class_names
    for split in ("train", "validation"):
        ours, theirs = getattr(found, split), getattr(wanted, split)
        np.testing.assert_array_equal(ours.labels, theirs.labels)
        everything = np.arange(len(theirs))
        np.testing.assert_array_equal(ours.read(everything, 1), theirs.read(everything, 1))


def write_folders(folder: Path) -> None:
    write_classes(folder, {"ant": 12, "bee": 12, "cow": 9})
    (folder / "ant/deep").mkdir()
    (folder / "ant/deep/x.jpg").write_bytes(image(99))
    (folder / "bee/notes.txt").write_text("no image")


def write_split_folders(folder: Path) -> None:
    write_classes(folder / "train", {"ant": 12, "bee": 12})
    write_classes(folder / "val", {"ant": 3, "bee": 4}, first_seed=50)


WRITERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "tar": (write_tars, ""),
    "tfrecord": (write_tfrecords, ""),
    "packed": (write_packed, "/set.hrp"),
    "npz": (write_arrays, "/set.npz"),
    "parquet": (write_parquet, ""),
    "folder": (write_folders, ""),
    "folder-split": (write_split_folders, ""),
}


@pytest.mark.parametrize("budget", ["200GiB", "64KiB", "0"])
@pytest.mark.parametrize("kind", WRITERS)
def test_the_same_samples_as_on_the_disk(server: S3Server, tmp_path: Path, kind: str, budget: str) -> None:
    write, name = WRITERS[kind]
    write(tmp_path / "set")
    serve(server, tmp_path / "set")
    options = {} if budget == "200GiB" else {"dataset_disk_budget": budget}
    found = opened(f"s3://data/set{name}", **options)
    assert_same(found, opened(str(tmp_path / "set") + name))
    assert found.info.name == kind.partition("-")[0]
    assert "s3://data/set" in found.info.place
    if budget == "200GiB":  # all of it is here now
        before = server.count("GET")
        found.train.read(np.arange(len(found.train)), 2)
        assert server.count("GET") == before


@pytest.mark.parametrize("fault", ["503", "cut"])
def test_every_fifth_request_fails(server: S3Server, tmp_path: Path, fault: str) -> None:
    write_tars(tmp_path / "set")
    serve(server, tmp_path / "set")
    count = iter(range(10**6))
    server.fault = lambda method, path: (
        fault if method == "GET" and path.count("/") > 1 and next(count) % 5 == 0 else ""
    )
    found = opened("s3://data/set", dataset_disk_budget="150KB")
    assert_same(found, opened(str(tmp_path / "set")))
    assert server.count("GET", fault) > 2


def test_class_folders_are_listed_once(server: S3Server, tmp_path: Path) -> None:
    from headrace.data.sets.stored_place import stand_in

    write_split_folders(tmp_path / "set")
    serve(server, tmp_path / "set")
    opened("s3://data/set")
    stand_in.cache_clear()
    before = len(server.requests)
    found = opened("s3://data/set")
    lists = [path for method, path, _ in server.requests[before:] if method == "GET" and path == "data"]
    assert len(lists) <= 3  # what is directly there, and no class
    index = next((tmp_path / "cache/headrace/indices").glob("folders-*"))
    assert str(index) in found.info.place
    index.write_bytes(index.read_bytes()[:-1] + b"x")
    stand_in.cache_clear()
    assert_same(opened("s3://data/set"), opened(str(tmp_path / "set")))


def test_names_are_texts_that_take_no_memory() -> None:
    words = [f"train/n{number:08d}/ä{number}.jpg" for number in range(200_000)]
    lengths = [len(word.encode()) for word in words]
    names = Names(np.frombuffer("".join(words).encode(), np.uint8), np.cumsum(lengths))
    assert names[0] == words[0]
    assert names[-1] == words[-1]
    assert names[70_000:70_003] == words[70_000:70_003]
    assert list(names) == words


def test_what_is_wanted_next_is_fetched_before(server: S3Server, tmp_path: Path) -> None:
    write_packed(tmp_path / "set")
    serve(server, tmp_path / "set")
    for budget in ("1GiB", "0"):
        found = opened("s3://data/set/set.hrp", dataset_disk_budget=budget)
        samples = found.train.samples
        assert isinstance(samples, SlowlyFetched)
        everything = np.arange(len(found.train))
        samples.ahead(everything)
        assert mirror_of(samples.name(0)) is not None
        mirror_of(samples.name(0))._pool.shutdown(wait=True)  # pyright: ignore
        before = server.count("GET")
        found.train.read(everything, 0)
        assert server.count("GET") == before


def test_a_place_that_has_changed_is_read_anew(server: S3Server, tmp_path: Path) -> None:
    from headrace.data.sets.stored_place import stand_in

    write_tars(tmp_path / "set")
    serve(server, tmp_path / "set")
    opened("s3://data/set")
    write_again = tmp_path / "again"
    write_tars(write_again)
    (write_again / "train-1.tar").unlink()
    server.buckets["data"].clear()
    serve(server, write_again)
    stand_in.cache_clear()
    assert len(opened("s3://data/set").train) == 20


def test_a_killed_process_leaves_what_it_has_fetched(server: S3Server, tmp_path: Path) -> None:
    """Another process finds the pieces by their flags, and no piece without its bytes."""
    write_packed(tmp_path / "set")
    serve(server, tmp_path / "set")
    entry = stores.open_store("s3://data/set").entry("set.hrp")
    assert entry is not None
    content = server.buckets["data"]["set/set.hrp"]
    first = Mirror(stores.open_store("s3://data/set"), listed([entry]), 1 << 30)
    number = np.array([0])
    assert first.fetch(number, number, number + 1000)[0]
    second = Mirror(stores.open_store("s3://data/set"), listed([entry]), 1 << 30)
    before = server.count("GET")
    assert second.read(0, 10, 900) == content[10:910]
    assert server.count("GET") == before
    first.sync()
    assert [path.name for path in first.folder.parent.glob("pieces-*-synced")]


def test_sets_that_nobody_uses_make_room(server: S3Server, tmp_path: Path) -> None:
    for name in ("a", "b"):
        server.buckets["data"][f"{name}/x.tar"] = bytes(3 << 20)
    homes = []
    for name in ("a", "b"):
        store = stores.open_store(f"s3://data/{name}")
        mirror = Mirror(store, listed(store.listing()[1]), 4 << 20)
        assert mirror.fetch(np.array([0]), np.array([0]), np.array([3 << 20]))[0]
        homes.append(mirror.folder.parent)
        assert homes[0].is_dir() == (name == "a")
        mirror._using.close()  # the process has ended
    assert homes[1].is_dir()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("s3://nothing/set", "s3://nothing/set does not exist"),
        ("s3://data/none", "s3://data/none does not exist"),
        ("s3://data/only", "has no class folders with images"),
    ],
)
def test_a_wrong_place_is_refused_before_anything_starts(
    server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], address: str, words: str
) -> None:
    server.buckets["data"]["only/deep/x.txt"] = b"x"
    assert main(f"train {address} --model cifar_resnet8 --log-dir {tmp_path / 'runs'}".split()) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_no_permission_is_said(server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.fault = lambda method, path: "403"
    assert main(f"train s3://data/set --log-dir {tmp_path / 'runs'}".split()) == 2
    error = capsys.readouterr().err
    assert "s3://data/set" in error
    assert "AWS_ACCESS_KEY_ID" in error


def test_the_budget_of_the_disk_is_for_stores() -> None:
    with pytest.raises(ConfigError, match="dataset_disk_budget"):
        config_from({"dataset": "folder", "dataset_path": "/x", "dataset_disk_budget": "1GB"})


def test_a_known_set_is_brought_as_a_whole(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = make_small("cifar10", 50, 20)
    monkeypatch.setitem(catalog.KNOWN_SETS, "cifar10", small.row)
    write_cifar_binary(small, tmp_path / "set")
    serve(server, tmp_path / "set")
    for name in ("auto", "cifar10"):
        data = config_from({"dataset": name, "dataset_path": "s3://data/set"}).data
        np.testing.assert_array_equal(open_dataset(data, 0).train.labels, small.labels["train"])
    with pytest.raises(ConfigError, match="downloaded to this machine"):
        config_from({"dataset": "cifar10", "dataset_path": "s3://data/set", "download": True})


def test_one_file_of_the_web(server: S3Server, tmp_path: Path) -> None:
    write_packed(tmp_path / "set")
    serve(server, tmp_path / "set")
    found = opened(f"{server.address}/data/set/set.hrp")
    assert_same(found, opened(str(tmp_path / "set/set.hrp")))
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1.*none\.hrp does not exist"):
        opened(f"{server.address}/data/set/none.hrp")


def test_a_set_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mirrors, "_mirrors", {})
    write_tars(tmp_path / "set")
    store = stores.open_store("memory://sets/tar", writes=True)
    for path in (tmp_path / "set").iterdir():
        store.put(path.name, path)
    assert_same(opened("memory://sets/tar"), opened(str(tmp_path / "set")))
