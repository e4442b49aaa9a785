"""Checkpoints on the disk: what is written comes back exactly, and every kind of damage is found and named."""

import hashlib
import json
import os
import shutil
import struct
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from headrace.checkpoint.store import checkpoint_name, list_checkpoints, load, newest_good, save, step_of, verify
from headrace.core.errors import CheckpointError

FACTS = {"step": 781, "epoch": 1.0, "seed": 7, "config": {"num_epochs": 3}, "class_names": ["nought", "één"]}


def some_arrays(step: int = 781) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "params/conv1/conv/kernel": rng.standard_normal((3, 3, 3, 8)).astype(np.float32),
        "params/head/fc/kernel": rng.standard_normal((8, 10)).astype(ml_dtypes.bfloat16),
        "opt/trace/head": rng.standard_normal((8, 10)).astype(np.float16),
        "stats/mask": rng.integers(0, 2, 5).astype(bool),
        "empty": np.zeros((0, 4), np.float64),
        "step": np.array(step, np.int32),
        "loss_scale/good": np.array(3, np.uint32),
    }


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def rewrite_manifest(path: Path, change: dict) -> None:
    """Change a manifest and put a checksum under it that fits again (computed here, by the documented rule)."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest = {**manifest, **change}
    body = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    manifest["manifest_sha256"] = hashlib.sha256(canonical).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path, checkpoint_name(781), some_arrays(), FACTS)


def test_what_was_saved_comes_back_bit_for_bit(saved: Path) -> None:
    arrays, manifest = load(saved)
    assert_same(arrays, some_arrays())
    assert FACTS.items() <= manifest.items()
    assert verify(saved) == []


def test_not_a_number_keeps_its_bits(tmp_path: Path) -> None:
    odd = np.array([0x7FC00001, 0xFFC00000, 0x7F800000, 0x80000000, 0x00000001], np.uint32).view(np.float32)
    arrays, _ = load(save(tmp_path, "step_00000001", {"odd": odd}, {"step": 1}))
    assert arrays["odd"].view(np.uint32).tolist() == odd.view(np.uint32).tolist()


def test_strided_and_transposed_arrays_are_written_by_value(tmp_path: Path) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    given = {
        "transposed": base.T,
        "strided": base[::2, 1::2],
        "flipped": base[::-1],
        "fortran": np.asfortranarray(base),
    }
    arrays, _ = load(save(tmp_path, "step_00000001", given, {"step": 1}))
    for name, array in given.items():
        assert arrays[name].tolist() == array.tolist(), name


def test_the_tensor_file_is_plain_safetensors(saved: Path) -> None:
    """Read the file by hand: 8 bytes of header length, a JSON header, then the tensors' bytes."""
    data = (saved / "state.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    entry = header["params/head/fc/kernel"]
    assert (entry["dtype"], entry["shape"]) == ("BF16", [8, 10])
    start, end = (8 + length + offset for offset in entry["data_offsets"])
    assert data[start:end] == some_arrays()["params/head/fc/kernel"].tobytes()


def test_the_tensor_file_has_the_bytes_of_the_safetensors_library(saved: Path) -> None:
    given = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in some_arrays().items()}
    assert (saved / "state.safetensors").read_bytes() == safetensors.numpy.save(given)


def test_saving_takes_no_memory_for_the_whole(tmp_path: Path) -> None:
    """64 MB in 8 tensors, of which NumPy, and Python's allocator, see no copy."""
    arrays = {f"params/{number}": np.zeros(2_000_000, np.float32) for number in range(8)}
    tracemalloc.start()
    try:
        save(tmp_path, checkpoint_name(1), arrays, {"step": 1})
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_the_manifest_says_what_is_there(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    data = (saved / "state.safetensors").read_bytes()
    assert manifest["tensor_file"] == {
        "name": "state.safetensors", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()
    }  # fmt: skip
    assert manifest["format_version"] == 1
    assert manifest["tensors"]["params/conv1/conv/kernel"] == {"dtype": "float32", "shape": [3, 3, 3, 8]}
    assert manifest["tensors"]["step"] == {"dtype": "int32", "shape": []}
    assert manifest["versions"]["numpy"] == np.__version__
    assert manifest["written_at"].endswith("+00:00")
    assert manifest["class_names"] == ["nought", "één"]


def test_names_sort_by_step_and_other_names_are_left_alone(tmp_path: Path) -> None:
    for step in (5, 123456789, 40):
        save(tmp_path, checkpoint_name(step), {"step": np.int32(step)}, {"step": step})
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_7").write_text("a file, not a directory")
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [5, 40, 123456789]
    assert checkpoint_name(781) == "step_00000781"
    assert step_of(tmp_path / "notes") is None
    assert list_checkpoints(tmp_path / "absent") == []


def truncate(path: Path) -> None:
    os.truncate(path / "state.safetensors", 100)


def lengthen(path: Path) -> None:
    with (path / "state.safetensors").open("ab") as file:
        file.write(b"x")


def flip_bit(path: Path) -> None:
    data = bytearray((path / "state.safetensors").read_bytes())
    data[-5] ^= 0x10
    (path / "state.safetensors").write_bytes(data)


def flip_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"seed": 7', '"seed": 5'))


DAMAGE = {
    "no tensors": (lambda p: (p / "state.safetensors").unlink(), "state.safetensors is missing"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "truncated": (truncate, "truncated: 100 bytes, the manifest says"),
    "too long": (lengthen, "too long"),
    "flipped bit": (flip_bit, "its sha256 is not the one in the manifest"),
    "manifest cut": (lambda p: os.truncate(p / "manifest.json", 50), "manifest.json is damaged: it is not JSON"),
    "manifest empty": (lambda p: os.truncate(p / "manifest.json", 0), "it is not JSON"),
    "manifest a list": (lambda p: (p / "manifest.json").write_text("[1]"), "not a Headrace manifest"),
    "manifest changed": (flip_manifest, "does not match its own checksum"),
    "another version": (lambda p: rewrite_manifest(p, {"format_version": 2}), "format version 2; this Headrace reads"),
    "tensor missing": (
        lambda p: rewrite_manifest(p, {"tensors": json.loads((p / "manifest.json").read_text())["tensors"] | {
            "params/lost": {"dtype": "float32", "shape": [2]}}}),
        "tensor params/lost is missing",
    ),
    "other shape": (
        lambda p: rewrite_manifest(p, {"tensors": json.loads((p / "manifest.json").read_text())["tensors"] | {
            "step": {"dtype": "int32", "shape": [1]}}}),
        "tensor step is int32[], not int32[1]",
    ),
    "not in manifest": (
        lambda p: rewrite_manifest(p, {"tensors": {}}), "tensor empty is not in the manifest",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_named_and_passed_over(tmp_path: Path, kind: str) -> None:
    older = save(tmp_path, checkpoint_name(500), some_arrays(500), FACTS | {"step": 500})
    newer = save(tmp_path, checkpoint_name(781), some_arrays(), FACTS)
    damage, words = DAMAGE[kind]
    damage(newer)
    problems = verify(newer)
    assert words in "; ".join(problems)
    with pytest.raises(CheckpointError, match="step_00000781 cannot be used"):
        load(newer)
    path, passed_over = newest_good(tmp_path)
    assert path == older
    assert passed_over == [(newer, "; ".join(problems))]
    assert_same(load(older)[0], some_arrays(500))


def test_every_single_bit_of_the_manifest_is_guarded(tmp_path: Path) -> None:
    """Flip each bit of a small manifest in turn; whatever JSON makes of it, it must not pass for the original."""
    path = save(tmp_path, checkpoint_name(1), {"step": np.int32(1)}, {"step": 1})
    good = (path / "manifest.json").read_bytes()
    _, original = load(path)
    for place in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[place] ^= 1 << bit
            (path / "manifest.json").write_bytes(bad)
            if not verify(path):  # only white space may change without harm
                assert load(path)[1] == original


def test_a_tensor_file_that_is_no_safetensors_is_named(saved: Path) -> None:
    junk = b"\xff" * 64
    (saved / "state.safetensors").write_bytes(junk)
    rewrite_manifest(
        saved, {"tensor_file": {"name": "state.safetensors", "bytes": 64, "sha256": hashlib.sha256(junk).hexdigest()}}
    )
    assert "cannot be decoded" in verify(saved)[0]


def test_nothing_there_is_said_plainly(tmp_path: Path) -> None:
    assert verify(tmp_path / "step_00000001") == ["it does not exist"]
    (tmp_path / "step_00000002").write_text("")
    assert verify(tmp_path / "step_00000002") == ["it is not a directory"]
    assert newest_good(tmp_path) == (None, [])


def test_leftovers_of_a_killed_process_are_ignored_then_swept(tmp_path: Path) -> None:
    save(tmp_path, checkpoint_name(1), some_arrays(1), {"step": 1})
    left = tmp_path / ".tmp-step_00000002-999"
    left.mkdir()
    (left / "state.safetensors").write_bytes(b"half")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000001"]
    save(tmp_path, checkpoint_name(3), some_arrays(3), {"step": 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000003"]


def test_saving_a_step_again_replaces_it(saved: Path) -> None:
    flip_bit(saved)
    save(saved.parent, saved.name, some_arrays(2), FACTS)
    assert_same(load(saved)[0], some_arrays(2))
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_directory_that_another_thread_makes_at_that_moment_is_no_error(tmp_path: Path, monkeypatch) -> None:
    def makes_it(path: Path) -> bool:
        monkeypatch.undo()
        path.mkdir()  # as the list of the best does, between the question and the answer
        return False

    monkeypatch.setattr(Path, "is_dir", makes_it)
    saved = save(tmp_path / "checkpoints", checkpoint_name(781), some_arrays(), FACTS)
    assert verify(saved) == []


def test_a_replacement_cut_between_its_two_renames_keeps_the_old_one(saved: Path) -> None:
    old = saved.rename(saved.with_name(f".old-{saved.name}"))
    path, damaged = newest_good(saved.parent)
    assert (path, damaged) == (old, [])
    save(saved.parent, checkpoint_name(900), some_arrays(9), {"step": 900})
    assert old.exists()  # still the only copy of its step
    save(saved.parent, saved.name, some_arrays(3), FACTS)
    assert not old.exists()
    assert_same(load(saved)[0], some_arrays(3))


def test_what_a_replacement_left_is_no_second_checkpoint(saved: Path) -> None:
    """A crash after the second rename leaves the old one beside the new one."""
    newer = save(saved.parent, checkpoint_name(900), some_arrays(9), {"step": 900})
    for path in (saved, newer):
        shutil.copytree(path, path.with_name(f".old-{path.name}"))
    assert list_checkpoints(saved.parent) == [saved, newer]
    assert newest_good(saved.parent) == (newer, [])


def test_a_type_that_no_checkpoint_holds_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Tensor odd has type complex128"):
        save(tmp_path, checkpoint_name(1), {"odd": np.zeros(2, complex)}, {"step": 1})
    with pytest.raises(CheckpointError, match="Tensor names has type"):
        save(tmp_path, checkpoint_name(1), {"names": np.array(["a", None], object)}, {"step": 1})
    with pytest.raises(ValueError, match="needs 'step'"):
        save(tmp_path, checkpoint_name(1), {}, {})
    assert list(tmp_path.iterdir()) == []


def test_numpy_numbers_in_the_manifest_become_plain(tmp_path: Path) -> None:
    path = save(tmp_path, checkpoint_name(3), {}, {"step": np.int64(3), "epoch": np.float32(0.5), "mean": np.arange(3)})
    _, manifest = load(path)
    assert (manifest["step"], manifest["epoch"], manifest["mean"]) == (3, 0.5, [0, 1, 2])


@pytest.mark.parametrize(
    "change",
    [
        {"tensor_file": None},
        {"tensor_file": []},
        {"tensor_file": {}},
        {"tensor_file": {"bytes": "many", "sha256": 3}},
        {"tensors": None},
        {"tensors": [1]},
        {"tensors": {"x": 3}},
        {"tensors": {}},
        {"tensors": {"params/x": {}}},
        {"format_version": []},
    ],
    ids=str,
)
def test_a_hostile_manifest_with_the_right_checksum_is_one_problem(saved: Path, change: dict) -> None:
    rewrite_manifest(saved, change)
    assert verify(saved)
    with pytest.raises(CheckpointError, match=saved.name):
        load(saved)


def test_a_manifest_that_nests_deeply_is_damaged(saved: Path) -> None:
    (saved / "manifest.json").write_text("[" * 200_000)
    assert "not JSON" in verify(saved)[0]
