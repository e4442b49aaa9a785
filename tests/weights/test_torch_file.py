"""Torch files without torch: both formats as real torch writes them, and everything that must be refused."""

import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import CheckpointError
from headrace.core.unpickle import RefusedPickle
from headrace.weights.torch_file import read_torch_file, write_torch_file
from headrace.weights.torch_pickle import DtypeName, Storage, Tensor
from headrace.weights.weight_file import read_file

FILES = Path(__file__).parent / "files"
# What make_files.py put into the files, in names that begin with `module.`, as DataParallel's do.
EXPECTED = {
    "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "first": np.arange(4, dtype=np.float32),
    "last": np.arange(4, 10, dtype=np.float32).reshape(2, 3),
    "half": np.array([0, 0.5, 1], np.float32),
    "brain": np.array([0, 4, 8], np.float32),
    "double": np.array([0, 1 / 3], np.float32),
    "count": np.array(7),
    "parameter": np.full((2, 1), -1.5, np.float32),
}


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("name", ["zip.pth", "legacy.pth"])
def test_files_of_real_torch_are_read_exactly(name, ema):
    found = read_file(FILES / name, ema).arrays
    assert found.keys() == {f"module.{key}" for key in EXPECTED}
    for key, array in EXPECTED.items():
        np.testing.assert_allclose(found[f"module.{key}"], array + ema, rtol=1e-7, err_msg=key)
        assert found[f"module.{key}"].dtype == (np.int64 if key == "count" else np.float32)


def test_what_is_written_is_read_again(tmp_path):
    arrays = {
        "a.weight": np.random.default_rng(0).normal(size=(3, 2, 1)).astype(np.float32),
        "b": np.array(5, np.int64),
        "c": np.zeros((0, 4), np.float32),
    }
    file = tmp_path / "w.pth"
    file.write_bytes(write_torch_file(arrays))
    found = read_file(file).arrays
    assert list(found) == list(arrays)
    for key, array in arrays.items():
        assert found[key].dtype == array.dtype
        np.testing.assert_array_equal(found[key], array)
    assert write_torch_file(arrays) == file.read_bytes(), "the same weights are the same bytes"


class Malicious:
    """What an attacker's pickle does: call a function of the system when it is loaded."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def zip_file(path: Path, data: bytes, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", data)
        for name, content in entries.items():
            archive.writestr(f"x/{name.replace('__', '/')}", content)
    return path


def legacy_file(path: Path, data: bytes) -> Path:
    head = b"".join(pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
    path.write_bytes(head + data + pickle.dumps([], 2))
    return path


@pytest.mark.parametrize("make", [zip_file, legacy_file])
@pytest.mark.parametrize(
    ("attack", "told"),
    [
        (Malicious(os.system, "touch hacked"), "posix.system|nt.system"),
        (Malicious(eval, "open('hacked', 'w')"), "eval"),
        (Malicious(getattr, "", "join"), "getattr"),
        (np.float32(1.0), "numpy"),
    ],
    ids=["system", "eval", "getattr", "numpy scalar"],
)
def test_programs_in_a_pickle_are_refused_and_never_run(tmp_path, monkeypatch, make, attack, told):
    monkeypatch.chdir(tmp_path)
    file = make(tmp_path / "bad.pth", pickle.dumps({"state_dict": {"w": attack}}, 2))
    with pytest.raises(CheckpointError, match=told) as caught:
        read_file(file)
    assert "nothing else in it is run" in caught.value.rule
    assert not Path("hacked").exists()


def rebuilt(shape, stride, offset=0, count=4, module="torch._utils", name="_rebuild_tensor_v2") -> bytes:
    """Return the pickle of {"w": a tensor on storage 0 of `count` float32}, opcode by opcode."""

    def numbers(values):
        return b"(" + b"".join(b"J" + int(value).to_bytes(4, "little", signed=True) for value in values) + b"t"

    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    storage += b"J" + count.to_bytes(4, "little", signed=True) + b"tQ"
    arguments = b"(" + storage + b"J" + offset.to_bytes(4, "little", signed=True) + numbers(shape) + numbers(stride)
    return b"\x80\x02}X\x01\x00\x00\x00wc" + f"{module}\n{name}\n".encode() + arguments + b"\x89}tRs."


def test_a_good_tensor_of_the_hand_made_pickle_is_read(tmp_path):
    file = zip_file(tmp_path / "w.pth", rebuilt((2, 2), (1, 2)), data__0=np.arange(4, dtype="<f4").tobytes())
    np.testing.assert_array_equal(read_file(file).arrays["w"], [[0, 2], [1, 3]])


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (rebuilt((5,), (1,)), "beyond its 4 stored numbers"),
        (rebuilt((2,), (3,), offset=1), "beyond its 4 stored numbers"),
        (rebuilt((1000, 1000), (0, 0)), "beyond its 4 stored numbers"),
        (rebuilt((2,), (-1,), offset=3), "stride"),
        (rebuilt((2, 2), (1,)), "2 sizes and 1 strides"),
        (rebuilt((2,), (1,), count=-1), "view"),
        (rebuilt((2,), (1,), count=8), "storage 0 has 16 bytes, not 32"),
        (b"\x80\x02}X\x01\x00\x00\x00wX\x01\x00\x00\x000Qs.", "outside object"),
        (b"\x80\x02(l.", "holds a list"),
        (b"\x80\x02}.", "no tensors"),
        (b"\x80\x02}X\x01", "not a whole pickle"),
        (b"", "not a whole pickle"),
    ],
)
def test_tensors_that_lie_are_refused(tmp_path, data, told):
    file = zip_file(tmp_path / "w.pth", data, data__0=np.arange(4, dtype="<f4").tobytes())
    with pytest.raises(CheckpointError, match=told):
        read_file(file)


def with_state(data: bytes, state: bytes) -> bytes:
    """Return the pickle with the instruction BUILD after its tensor: set attributes on it."""
    assert data.endswith(b"s.")
    return data[:-2] + state + b"bs."


def attribute(name: str, value: bytes) -> bytes:
    return b"}X" + len(name).to_bytes(4, "little") + name.encode() + value + b"s"


@pytest.mark.parametrize(
    "state",
    [
        attribute("strides", b"(J\xff\xff\xff\xfft"),
        attribute("offset", b"J\x00\x00\x00\x80"),
        attribute("shape", b"(J\x00\x04\x00\x00t"),
        b"N" + attribute("strides", b"(J\xff\xff\xff\xfft") + b"\x86",  # the form for objects with slots
        b"}",
    ],
    ids=["strides", "offset", "shape", "slots", "nothing"],
)
def test_no_pickle_sets_the_state_of_a_tensor(tmp_path, state):
    """With a state set after the checks, `as_strided` would read memory outside the storage."""
    data = with_state(rebuilt((2,), (1,)), state)
    for file in (
        zip_file(tmp_path / "zip.pth", data, data__0=bytes(16)),
        legacy_file(tmp_path / "legacy.pth", data),
    ):
        with pytest.raises(CheckpointError, match="sets the state of a Tensor"):
            read_file(file)


def test_no_pickle_sets_the_state_of_a_storage_or_a_shared_type(tmp_path):
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
    wide = attribute("num_elements", b"J\x00\x04\x00\x00")
    for data, told in (
        (b"\x80\x02}X\x01\x00\x00\x00w" + storage + wide + b"bs.", "state of a Storage"),
        (b"\x80\x02}X\x01\x00\x00\x00wctorch\nFloatStorage\n" + attribute("name", b"V\x61\n") + b"bs.", "a DtypeName"),
    ):
        with pytest.raises(CheckpointError, match=told):
            read_file(zip_file(tmp_path / "w.pth", data, data__0=bytes(16)))
    good = zip_file(tmp_path / "w.pth", rebuilt((4,), (1,)), data__0=np.arange(4, dtype="<f4").tobytes())
    np.testing.assert_array_equal(read_file(good).arrays["w"], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(-1, (1,), (1,)), (0, (2,), (-1,)), (0, (-2,), (1,)), (0, (2, 2), (1,)), (0, (5,), (1,)), (2**62, (2,), (2**62,))],
)
def test_a_tensor_checks_its_numbers_again_when_it_is_read(offset, shape, strides):
    kind = DtypeName("float32")
    with pytest.raises(RefusedPickle):
        Tensor(Storage("0", 4, kind), kind.dtype, offset, shape, strides).read(bytes(16))


def shared_storage(count: int, size: int) -> bytes:
    """Return the pickle of {"0": tensor, "1": tensor, ...}, all on the whole of storage 0."""
    one = rebuilt((size,), (1,), count=size)
    start, end = one.index(b"wc") + 1, one.rindex(b"s.")
    names = [str(number).encode() for number in range(count)]
    items = b"".join(b"X" + len(name).to_bytes(4, "little") + name + one[start:end] + b"s" for name in names)
    return b"\x80\x02}" + items + b"."


def test_a_storage_that_many_tensors_share_is_read_once(tmp_path):
    numbers = np.arange(1 << 16, dtype="<f4")
    file = zip_file(tmp_path / "w.pth", shared_storage(4, len(numbers)), data__0=numbers.tobytes())
    found = read_torch_file(file)
    assert all(np.shares_memory(found["0"], found[str(number)]) for number in range(4))
    np.testing.assert_array_equal(found["3"], numbers)
    many = zip_file(tmp_path / "many.pth", shared_storage(61, len(numbers)), data__0=numbers.tobytes())
    with pytest.raises(CheckpointError, match="15,990,784 bytes, made of 262,144 stored ones"):
        read_file(many)


def test_archives_whose_entries_overlap_are_encrypted_or_lie_about_sizes_are_refused(tmp_path):
    good = zip_file(tmp_path / "w.pth", rebuilt((4,), (1,)), data__0=bytes(16)).read_bytes()
    central = good.index(b"PK\x01\x02")
    sizes = good.replace(good[central + 20 : central + 28], (1 << 30).to_bytes(4, "little") * 2)
    encrypted = good[:6] + b"\x01" + good[7 : central + 8] + b"\x01" + good[central + 9 :]
    for data, told in ((sizes, "larger than the file"), (encrypted, "encrypted")):
        (tmp_path / "bad.pth").write_bytes(data)
        with pytest.raises(CheckpointError, match=told):
            read_file(tmp_path / "bad.pth")


@pytest.mark.parametrize("name", ["zip.pth", "legacy.pth"])
def test_files_cut_off_anywhere_are_refused(tmp_path, name):
    whole = (FILES / name).read_bytes()
    for length in range(0, len(whole) - 1, 97):
        file = tmp_path / f"{length}.pth"
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=str(file)):
            read_file(file)


def test_other_archives_and_files_are_refused_with_words(tmp_path):
    script = zip_file(tmp_path / "script.pt", rebuilt((2,), (1,)), data__0=bytes(16), constants__pkl=b"")
    with zipfile.ZipFile(script, "a") as archive:
        archive.writestr("x/constants.pkl", b"")
    with pytest.raises(CheckpointError, match="TorchScript"):
        read_file(script)
    compressed = tmp_path / "compressed.pth"
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", rebuilt((2,), (1,)))
    with pytest.raises(CheckpointError, match="compressed"):
        read_file(compressed)
    with zipfile.ZipFile(tmp_path / "overlapping.pth", "w") as archive:
        for name in ("x/data.pkl", "x/same"):
            archive.writestr(name, rebuilt((2,), (1,)))
        archive.filelist[1].header_offset = archive.filelist[0].header_offset
    with pytest.raises(CheckpointError, match="overlap"):
        read_file(tmp_path / "overlapping.pth")
    big = zip_file(tmp_path / "big.pth", rebuilt((2,), (1,)), data__0=bytes(16), byteorder=b"big")
    with pytest.raises(CheckpointError, match="big-endian"):
        read_file(big)
    plain = io.BytesIO()
    with zipfile.ZipFile(plain, "w") as archive:
        archive.writestr("readme.txt", "no weights")
    (tmp_path / "plain.zip").write_bytes(plain.getvalue())
    with pytest.raises(CheckpointError, match=r"no data\.pkl"):
        read_file(tmp_path / "plain.zip")
    for name, content in (("text.pth", b"hello world, this is text"), ("empty.pth", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            read_file(tmp_path / name)
    with pytest.raises(CheckpointError, match="No such file"):
        read_file(tmp_path / "nowhere.pth")
