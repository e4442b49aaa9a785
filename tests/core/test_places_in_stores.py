"""Stores: reading by ranges, writing, listing, and what happens when the server does not do its part."""

from collections.abc import Iterator

import pytest

pytest.importorskip("s3fs")

from headrace.core import store as stores
from headrace.core.errors import ConfigError
from headrace.core.store import Store, StoreError, StoreMissing, open_store
from headrace.core.stored_copy import copy_of, walk
from tests.core.s3_server import S3Server, running


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[S3Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stores, "_FIRST_WAIT_SECONDS", 0.01)
    with running(monkeypatch) as server:
        yield server


def open_data(server: S3Server, **files: bytes) -> Store:
    server.buckets["data"] |= {f"set/{name}": data for name, data in files.items()}
    return open_store("s3://data/set", writes=True)


def test_reads_writes_lists_and_deletes(server: S3Server) -> None:
    store = open_data(server)
    store.put("a/one.bin", bytes(range(256)))
    store.put("two.txt", b"hello")
    assert store.listing()[0] == ["a"]
    assert [entry[:2] for entry in store.listing()[1]] == [("two.txt", 5)]
    assert store.read_ranges([("a/one.bin", 10, 12), ("two.txt", 0, 5)]) == [b"\n\x0b", b"hello"]
    assert store.entry("two.txt") is not None
    assert store.entry("a") is None
    assert store.entry("none") is None
    assert set(walk(store)) == {"a/one.bin", "two.txt"}
    store.delete("two.txt")
    store.delete("two.txt")
    assert set(walk(store)) == {"a/one.bin"}


@pytest.mark.parametrize("fault", ["503", "cut"])
def test_what_may_pass_is_tried_again(server: S3Server, fault: str) -> None:
    store = open_data(server, **{f"{n}.bin": bytes([n]) * 5000 for n in range(20)})
    seen: dict[str, int] = {}

    def first_two_fail(method: str, path: str) -> str:
        seen[path] = seen.get(path, 0) + 1
        return fault if method == "GET" and path.endswith(".bin") and seen[path] <= 2 else ""

    server.fault = first_two_fail
    found = store.read_ranges([(f"{n}.bin", 100, 4100) for n in range(20)])
    assert found == [bytes([n]) * 4000 for n in range(20)]
    assert server.count("GET", fault) >= 20


def test_what_does_not_pass_ends_with_the_address(server: S3Server) -> None:
    store = open_data(server, x=b"x")
    server.fault = lambda method, path: "403" if method == "GET" else ""
    with pytest.raises(StoreError, match=r"Cannot read s3://data/set/x.*may read there") as caught:
        store.read("x")
    assert not caught.value.may_pass
    server.fault = lambda method, path: ""
    with pytest.raises(StoreMissing, match="s3://nothing/here does not exist"):
        open_store("s3://nothing/here").listing()


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(stores.importlib, "import_module", refuse)
    for address, extra in (("s3://b/x", "s3"), ("gs://b/x", "gs"), ("az://c/x", "az"), ("hf://datasets/a/b", "hub")):
        with pytest.raises(ConfigError, match=rf"not installed\. pip install 'headrace\[{extra}\]'"):
            open_store(address)


def test_nothing_is_written_to_the_web(server: S3Server) -> None:
    with pytest.raises(ConfigError, match="Nothing can be written to https://host/x"):
        open_store("https://host/x", writes=True)


def test_a_copy_follows_its_place(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.core.stored_copy._FRESH_SECONDS", -1.0)
    open_data(server, **{"a/x": b"1", "b": b"2"})
    folder = copy_of("s3://data/set")
    assert (folder / "a/x").read_bytes() == b"1"
    server.buckets["data"] = {"set/a/x": b"3", "set/c": b"4"}
    before = server.count("GET")
    assert copy_of("s3://data/set/") == folder
    assert sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name[0] != ".") == ["c", "x"]
    assert (folder / "a/x").read_bytes() == b"3"
    assert copy_of("s3://data/set/c").read_bytes() == b"4"
    assert server.count("GET") > before


def test_memory_is_a_store() -> None:
    store = open_store("memory://somewhere", writes=True)
    store.put("x", b"abc")
    assert store.read_ranges([("x", 1, 3)]) == [b"bc"]
    assert [entry.name for entry in store.listing()[1]] == ["x"]
