"""Hostile `.h5` files: nothing is read from other files or beyond the file's size; all damage is one kind of error."""

import tracemalloc

import numpy as np
import pytest

from headrace.core.errors import CheckpointError
from headrace.weights import keras_file
from headrace.weights.keras_file import read_in_process
from headrace.weights.weight_file import read_file

h5py = pytest.importorskip("h5py")
SECRET = np.arange(4096, dtype=np.uint8)


def write_keras_file(path, make, name="conv1/kernel:0"):
    """Write a file in Keras 2's layout whose one tensor `make(group, name)` stores."""
    with h5py.File(path, "w") as out:
        out.attrs["layer_names"] = [b"conv1", b"relu"]
        layer = out.create_group("conv1")
        layer.attrs["weight_names"] = [name.encode()]
        make(layer, name)
        out.create_group("relu").attrs["weight_names"] = []
    return path


@pytest.fixture
def secret(tmp_path):
    """Return a file of the machine that no weights should show, as HDF5 and as plain bytes."""
    (tmp_path / "secret").write_bytes(SECRET.tobytes())
    with h5py.File(tmp_path / "secret.h5", "w") as out:
        out["it"] = SECRET
        out.create_group("conv1")["kernel:0"] = SECRET
    return tmp_path / "secret"


def external_storage(layer, name):
    layer.create_dataset(name, (16,), "u1", external=[("secret", 0, 16)])


def external_link(layer, name):
    layer[name] = h5py.ExternalLink("secret.h5", "/it")


def external_group(layer, name):
    layer[name.split("/")[0]] = h5py.ExternalLink("secret.h5", "/conv1")


def soft_link(layer, name):
    layer["other"] = np.arange(3.0)
    layer[name] = h5py.SoftLink("/conv1/other")


def soft_link_through_external(layer, name):
    layer["x"] = h5py.ExternalLink("secret.h5", "/")
    layer[name] = h5py.SoftLink("/conv1/x/it")


def virtual(layer, name):
    layout = h5py.VirtualLayout((4096,), "u1")
    layout[:] = h5py.VirtualSource("secret.h5", "it", (4096,))
    layer.create_virtual_dataset(name, layout)


def huge(layer, name):
    layer.create_dataset(name, (1 << 40,), "f4", chunks=(1 << 10,))


def huge_unwritten(layer, name):
    layer.create_dataset(name, (1 << 30,), "f4")


def bomb(layer, name):
    layer.create_dataset(name, data=np.zeros(1 << 22, "f4"), compression="gzip")


def pointers(layer, name):
    layer.create_dataset(name, data=["text"] * 3, dtype=h5py.string_dtype())


def references(layer, name):
    layer.create_dataset(name, data=[layer.ref], dtype=h5py.ref_dtype)


def compound(layer, name):
    layer.create_dataset(name, (3,), [("a", "f4"), ("b", "S4")])


def nothing(layer, name):
    del layer, name


def a_group(layer, name):
    layer.create_group(name)


def a_type(layer, name):
    layer[name] = np.dtype("f4")


def empty_space(layer, name):
    layer[name] = h5py.Empty("f4")


CASES = {
    external_storage: "stored in another file",
    external_link: r"a link that leads elsewhere \(ExternalLink\)",
    external_group: r"a link that leads elsewhere \(ExternalLink\)",
    soft_link: r"a link that leads elsewhere \(SoftLink\)",
    soft_link_through_external: r"a link that leads elsewhere \(SoftLink\)",
    virtual: "stored in another file",
    huge: "announces 4,398,046,511,104 bytes",
    huge_unwritten: "announces 4,294,967,296 bytes",
    bomb: "is compressed",
    pointers: "not numbers",
    references: "not numbers",
    compound: "not numbers",
    nothing: "has no conv1/kernel:0",
    a_group: "is not a Dataset",
    a_type: "is not a Dataset",
}


@pytest.mark.parametrize(("make", "told"), CASES.items(), ids=[make.__name__ for make in CASES])
def test_hostile_tensors_are_refused_before_they_are_read(tmp_path, secret, monkeypatch, make, told):
    monkeypatch.chdir(tmp_path)
    file = write_keras_file(tmp_path / "w.h5", make)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=told):
            read_in_process(file)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["layers", "model_weights"])
def test_links_to_the_whole_of_another_file_are_refused(tmp_path, secret, kind):
    with h5py.File(tmp_path / "w.h5", "w") as out:
        out[kind] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "/")
    with pytest.raises(CheckpointError, match="leads elsewhere") as caught:
        read_file(tmp_path / "w.h5")
    assert "nothing is read from other files" in caught.value.rule
    assert "save_weights" in caught.value.remedy


def test_one_tensor_under_many_names_is_bounded_by_the_files_size(tmp_path):
    with h5py.File(tmp_path / "w.h5", "w") as out:
        layers = [f"conv{number}" for number in range(50)]
        out.attrs["layer_names"] = [layer.encode() for layer in layers]
        out["it"] = np.zeros(1 << 16, "f4")
        for layer in layers:
            group = out.create_group(layer)
            group.attrs["weight_names"] = [b"kernel:0"]
            group["kernel:0"] = out["it"]
    with pytest.raises(ValueError, match="more than are stored"):
        read_in_process(tmp_path / "w.h5")


@pytest.mark.parametrize(
    "value",
    [3, "a text", np.zeros((2, 2), "S3"), np.zeros(3), h5py.Empty("S3"), [b"\xff\xfe"], [b"nowhere"]],
    ids=lambda value: str(value)[:12],
)
def test_attributes_that_are_not_names_are_refused(tmp_path, value):
    file = write_keras_file(tmp_path / "w.h5", lambda layer, name: layer.__setitem__(name, np.zeros(3, "f4")))
    with h5py.File(file, "a") as out:
        out.attrs["layer_names"] = value
    with pytest.raises((ValueError, TypeError, AttributeError)):
        read_in_process(file)


def test_many_names_that_point_to_one_long_text_are_refused(tmp_path):
    file = write_keras_file(tmp_path / "w.h5", nothing)
    with h5py.File(file, "a", libver="latest") as out:
        out.attrs["model_config"] = "x" * (1 << 20)
        out.attrs["layer_names"] = ["conv1"] * 2000
    with pytest.raises(ValueError, match="too long for names"):
        read_in_process(file)


def test_good_files_are_read_in_all_number_types(tmp_path):
    for dtype in ("f4", ">f4"):
        array = np.arange(6).reshape(2, 3).astype(dtype)
        file = write_keras_file(tmp_path / "w.h5", lambda layer, name, a=array: layer.__setitem__(name, a))
        np.testing.assert_array_equal(read_file(file).arrays["conv1/kernel"], array.astype("f8"))
    chunked = write_keras_file(
        tmp_path / "w.h5", lambda layer, name: layer.create_dataset(name, data=np.arange(100.0), chunks=(32,))
    )
    np.testing.assert_array_equal(read_file(chunked).arrays["conv1/kernel"], np.arange(100.0))


@pytest.mark.parametrize(
    ("ending", "told"),
    [("while True: pass", "HDF5 took over 1 s"), ("os.kill(os.getpid(), 11)", "crashed with signal 11")],
)
def test_a_library_that_hangs_or_crashes_ends_its_own_process_alone(tmp_path, monkeypatch, ending, told):
    """HDF5 2.0 does both on damaged files; a package of the same name stands in for it."""
    monkeypatch.setattr(keras_file, "_MIN_SECONDS", 1)
    (tmp_path / "h5py.py").write_text(f"import os\n{ending}\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "w.h5"
    file.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(CheckpointError, match=told):
        read_file(file)


def test_nothing_is_imported_from_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "h5py.py").write_text("open('imported', 'w')\n")
    monkeypatch.chdir(tmp_path)
    file = write_keras_file(tmp_path / "w.h5", lambda layer, name: layer.__setitem__(name, np.arange(3, dtype="f4")))
    np.testing.assert_array_equal(read_file(file).arrays["conv1/kernel"], [0, 1, 2])
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("cut", [9, 100, 900, 2000])
def test_truncated_files_are_one_kind_of_error(tmp_path, cut):
    file = write_keras_file(tmp_path / "w.h5", lambda layer, name: layer.__setitem__(name, np.arange(3, dtype="f4")))
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"w\.h5"):
        read_file(file)
