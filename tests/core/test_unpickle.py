"""The restricted unpickler: it reads what CIFAR needs, and runs nothing."""

import collections
import io
import pickle
import time
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core import unpickle
from headrace.core.unpickle import PickleKind, RefusedPickle, read_pickle
from headrace.data.sets.cifar import read_batch_pickle
from headrace.weights.torch_file import write_torch_file
from headrace.weights.torch_pickle import read_torch_pickle
from tests.data.small_sets import python2_dumps, python3_dumps

PIXELS = np.arange(12, dtype=np.uint8).reshape(2, 6)


class Malicious:
    """A pickle of this would write a file when read by the standard unpickler."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.target, "owned"))


@pytest.mark.parametrize("dumps", [python2_dumps, python3_dumps, pickle.dumps])
def test_reads_what_batches_hold(dumps: Any) -> None:
    read = read_batch_pickle(dumps({b"data": PIXELS, b"labels": [3, 0, 255], b"name": b"\xff\x00batch"}))
    assert read["labels"] == [3, 0, 255]
    assert read["name"] == b"\xff\x00batch"
    assert read["data"].tolist() == PIXELS.tolist()


@pytest.mark.parametrize("protocol", range(6))
def test_reads_every_protocol(protocol: int) -> None:
    value = {"data": PIXELS, "labels": [1, 2], "more": ("text", None, 2.5)}
    assert read_batch_pickle(pickle.dumps(value, protocol))["data"].tolist() == PIXELS.tolist()


def test_python_2_pickles_are_what_python_itself_reads_so() -> None:
    """Check the test's own writer against the standard unpickler."""
    value = {b"data": PIXELS, b"labels": [1, 70000, -1]}
    read = pickle.loads(python2_dumps(value), encoding="bytes")
    assert read[b"labels"] == value[b"labels"]
    assert read[b"data"].tolist() == PIXELS.tolist()


def test_fortran_order_is_kept() -> None:
    array = np.asfortranarray(PIXELS)
    assert read_batch_pickle(pickle.dumps({"data": array}, 2))["data"].tolist() == PIXELS.tolist()


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "owned"
    data = pickle.dumps({"data": Malicious(target)}, protocol)
    with pytest.raises(RefusedPickle, match="datasets never need"):
        read_batch_pickle(data)
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
    with pytest.raises(ValueError, match=r"never need|outside object|not a whole pickle"):
        read_batch_pickle(data)


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
        read_batch_pickle(pickle.dumps({"data": value}, 2))


def test_names_as_values_are_refused() -> None:
    with pytest.raises(RefusedPickle):
        read_batch_pickle(b"}U\x01xcnumpy\ndtype\ns.")


def test_encodings_other_than_latin1_are_refused() -> None:
    with pytest.raises(RefusedPickle, match="latin1"):
        read_batch_pickle(b"c_codecs\nencode\n(V\x61\nVzlib\ntR.")


def test_a_damaged_pickle_is_a_value_error_at_every_length() -> None:
    whole = python2_dumps({b"data": PIXELS, b"labels": [1, 2]})
    for length in range(len(whole)):
        with pytest.raises(ValueError, match=r"pickle|array"):
            read_batch_pickle(whole[:length])


def test_an_array_whose_bytes_do_not_fill_its_shape_is_refused() -> None:
    data = python2_dumps({b"data": PIXELS}).replace(b"J\x06\x00\x00\x00t", b"J\x07\x00\x00\x00t")
    with pytest.raises(ValueError, match="not a whole pickle"):
        read_batch_pickle(data)


PLAIN = PickleKind(content="tests", names={}, objects=(), build={})


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_are_those_of_the_standard_unpickler(protocol: int) -> None:
    shared = ["ä", b"\x00\xff"]
    value = {"a": shared, 2: (shared, 1.5, -1e300), "n": [None, True, False, 0, -1, 255, 70000, -(2**40), 2**63]}
    value["text"] = ["x" * 300, "\n\\", (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {}, []]
    data = pickle.dumps(value, protocol)
    if protocol < 3:  # bytes are then a call of _codecs.encode
        assert read_batch_pickle(data) == value
    else:
        assert read_pickle(data, PLAIN) == (value, len(data))


def doubled(times: int, instruction: bytes) -> bytes:
    """Return instructions that leave a tuple or list of two equal parts, nested so often, on the stack."""
    return b"]" + b"".join(b"q\x00h\x00" + instruction for _ in range(times))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"}" + doubled(60, b"\x86") + b"Ns.", "a dict key that is a tuple"),  # its hash would take 2**60 steps
        (b"}]Ns.", "a dict key that is a list"),
        (b"]r\xff\xff\xff\x7fNb.", "sets the state of a"),  # the standard one allocates 32 GiB for the memo
        (b"N" * (unpickle.MAX_INSTRUCTIONS + 1), "more than"),
        (b"\x8b\x00\x00\x10\x00" + bytes(1 << 20) + b".", "a whole number of"),
        (b"L" + b"9" * 4000 + b"L\n.", "a whole number of"),
        (b"X\xff\xff\xff\x7fabc.", "bytes announced, 4 left"),
        (b"\x8d" + b"\xff" * 8 + b".", "bytes announced"),
        (b"T\xff\xff\xff\xff.", "bytes announced"),
        (b"NN.", "2 values at its end"),
        (b"(.", "_Mark"),
        (b".", "0 values"),
        (b"h\x00.", "not a whole pickle"),
        (b"N)R.", "not a function of the table"),
        (b"c__main__\nx\n.", "never need"),
        (b"(i__main__\nx\n.", "instruction b'i'"),
        (b"N)\x81.", r"instruction b'\\x81'"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_hostile_instructions_are_refused_in_bounded_time(data: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        read_pickle(data, PLAIN)
    assert "byte " in str(caught.value)


def test_a_value_with_shared_parts_is_visited_once() -> None:
    """Lists that contain each other 2**60 times, or themselves, are small; only a walk of them would not be."""
    data = doubled(60, b"\x86") + b"."
    assert read_pickle(data, PLAIN)[1] == len(data)
    assert read_pickle(b"]q\x00h\x00a.", PLAIN)[1] == 7


def test_calls_make_no_more_bytes_than_the_file_has() -> None:
    again = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86Ra"
    data = b"]X\x00\x10\x00\x00" + b"a" * 4096 + b"q\x000" + again * 500 + b"."
    with pytest.raises(RefusedPickle, match="times its length"):
        read_batch_pickle(data)


NUMBER = 60_000
EXPENSIVE = {
    "dicts": b"(" + b"}" * NUMBER + b"t.",
    "lists": b"(" + b"]\x94" * NUMBER + b"l.",
    "dicts of one": b"(" + b"}NNs" * NUMBER + b"t.",
    "lists of one": b"(" + b"]Na" * NUMBER + b"t.",
    "nested tuples": b")" + b"\x85" * NUMBER + b".",
    "keys": b"}(" + b"".join(b"J" + n.to_bytes(4, "little") + b"N" for n in range(NUMBER)) + b"u.",
    "one value memorised often": b"N" + b"\x94" * NUMBER + b".",
    "numbers": b"(" + b"M\x05\x99" * NUMBER + b"t.",
    "texts": b"(" + b"\x8c\x02\xc3\xbf" * NUMBER + b"t.",
    "wide text": b"X" + (4 * NUMBER + 4).to_bytes(4, "little") + b"a" * (4 * NUMBER) + "\U0001f600".encode() + b".",
}


def peak_of(read: Any, data: bytes) -> int:
    tracemalloc.start()
    try:
        with suppress(ValueError):
            read(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", EXPENSIVE)
def test_memory_is_within_the_bound_whatever_the_instructions(kind: str) -> None:
    data = EXPENSIVE[kind]
    assert peak_of(lambda data: read_pickle(data, PLAIN), data) < unpickle.MAX_EXPANSION * len(data) + (1 << 20)


PAIRS = b"(" + b"".join(b"K" + bytes([n]) + b"N\x86" for n in range(200)) + b"e"


@pytest.mark.parametrize("calls", [1_000, 100_000])
def test_a_call_on_one_list_again_and_again_is_refused(calls: int) -> None:
    """Each makes a dict of 200 keys from six bytes."""
    data = b"ccollections\nOrderedDict\n\x940]\x94" + PAIRS + b"0(" + b"h\x00h\x01\x85R" * calls + b"t."
    start = time.process_time()
    with pytest.raises(RefusedPickle, match="more than 100 times its length"):
        read_torch_pickle(data)
    assert time.process_time() - start < 5
    assert peak_of(read_torch_pickle, data) < unpickle.MAX_EXPANSION * len(data) + (1 << 20)


@pytest.mark.parametrize("protocol", range(6))
def test_many_small_values_are_within_the_bound(protocol: int) -> None:
    value = {n: [[float(n)], (n, -n), {str(n): n}, f"layer{n}", []] for n in range(20_000)}
    data = pickle.dumps(value, protocol)
    assert read_pickle(data, PLAIN) == (value, len(data))


def test_a_state_dict_of_many_small_tensors_is_within_the_bound() -> None:
    tensors = {str(n): np.full(1, n, np.float32) for n in range(5_000)}
    with zipfile.ZipFile(io.BytesIO(write_torch_file(tensors))) as archive:
        data = archive.read("archive/data.pkl")
    value, storages, _ = read_torch_pickle(data)
    assert len(data) > 500_000
    assert len(value) == len(storages) == 5_000
