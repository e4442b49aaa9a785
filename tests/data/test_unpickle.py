"""The restricted unpickler: it reads what CIFAR needs, and runs nothing."""

import collections
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.unpickle import RefusedPickle, read_pickle

from .small_sets import python2_dumps, python3_dumps

PIXELS = np.arange(12, dtype=np.uint8).reshape(2, 6)


class Malicious:
    """A pickle of this would write a file when read by the standard unpickler."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.target, "owned"))


@pytest.mark.parametrize("dumps", [python2_dumps, python3_dumps, pickle.dumps])
def test_reads_what_batches_hold(dumps: Any) -> None:
    read = read_pickle(dumps({b"data": PIXELS, b"labels": [3, 0, 255], b"name": b"\xff\x00batch"}))
    assert read["labels"] == [3, 0, 255]
    assert read["name"] == b"\xff\x00batch"
    assert read["data"].tolist() == PIXELS.tolist()


@pytest.mark.parametrize("protocol", range(6))
def test_reads_every_protocol(protocol: int) -> None:
    value = {"data": PIXELS, "labels": [1, 2], "more": ("text", None, 2.5)}
    assert read_pickle(pickle.dumps(value, protocol))["data"].tolist() == PIXELS.tolist()


def test_python_2_pickles_are_what_python_itself_reads_so() -> None:
    """Check the test's own writer against the standard unpickler."""
    value = {b"data": PIXELS, b"labels": [1, 70000, -1]}
    read = pickle.loads(python2_dumps(value), encoding="bytes")
    assert read[b"labels"] == value[b"labels"]
    assert read[b"data"].tolist() == PIXELS.tolist()


def test_fortran_order_is_kept() -> None:
    array = np.asfortranarray(PIXELS)
    assert read_pickle(pickle.dumps(array, 2)).tolist() == PIXELS.tolist()


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "owned"
    data = pickle.dumps({"data": Malicious(target)}, protocol)
    with pytest.raises(RefusedPickle, match="no data set needs"):
        read_pickle(data)
    assert not target.exists()
    pickle.loads(data)
    assert target.exists(), "the pickle must be one that would have worked"


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
        b"(S'true'\nios\nsystem\n.",
        b"cnumpy.core.multiarray\nscalar\n.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"c_codecs\nlookup\n(S'x'\ntR.",
        b"Pid\n.",
        b"\x80\x02\x82\x01.",
    ],
)
def test_any_other_name_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"no data set needs|outside object|not a whole pickle"):
        read_pickle(data)


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(3, np.float32),
        np.array([{}], object),
        np.zeros(2, [("a", "u1")]),
        collections.OrderedDict(),
        {1, 2},
        np.uint8(3),
        np.dtype("u1"),
    ],
)
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(RefusedPickle):
        read_pickle(pickle.dumps(value, 2))


def test_names_as_values_are_refused() -> None:
    with pytest.raises(RefusedPickle):
        read_pickle(b"cnumpy\nndarray\n.")


def test_encodings_other_than_latin1_are_refused() -> None:
    with pytest.raises(RefusedPickle, match="latin1"):
        read_pickle(b"c_codecs\nencode\n(V\x61\nVzlib\ntR.")


def test_a_damaged_pickle_is_a_value_error_at_every_length() -> None:
    whole = python2_dumps({b"data": PIXELS, b"labels": [1, 2]})
    for length in range(len(whole)):
        with pytest.raises(ValueError, match=r"pickle|array"):
            read_pickle(whole[:length])


def test_an_array_whose_bytes_do_not_fill_its_shape_is_refused() -> None:
    data = python2_dumps({b"data": PIXELS}).replace(b"J\x06\x00\x00\x00t", b"J\x07\x00\x00\x00t")
    with pytest.raises(ValueError, match="not a whole pickle"):
        read_pickle(data)
