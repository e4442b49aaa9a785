"""A state that process 0 sends to all: in pieces, bit by bit, with real processes."""

import ipaddress
from pathlib import Path

import ml_dtypes
import numpy as np

from headrace.job import control

from .test_control_join import finish
from .test_launcher import start

PROGRAM = """
import numpy as np
from headrace.job import control
from headrace.job import join_job
from tests.job.test_control import listened_at, make_tree

control.PIECE_BYTES = 100
with join_job() as info:
    mine = make_tree(info.process)
    kept = make_tree(info.process)
    found, wanted = control.current_group().broadcast_arrays(mine), make_tree(0)
    for name, leaf in wanted.items():
        assert found[name].dtype == leaf.dtype and found[name].shape == leaf.shape, name
        assert found[name].tobytes() == leaf.tobytes(), name
        assert found[name].flags.writeable
        assert np.asarray(mine[name]).tobytes() == kept[name].tobytes(), "what was given stays"
    group = control.current_group()
    for turn in range(2):
        assert group.all_gather({"turn": turn, "process": info.process}) == [
            {"turn": turn, "process": process} for process in range(info.num_processes)
        ]
    assert set(listened_at()) <= {"127.0.0.1", "::1"}, listened_at()
    if info.is_first:
        assert listened_at(), "JAX's service listens here"
        assert not group._store.key_value_dir_get("headrace/run/gather/"), "the store would grow"
print("equal")
"""


def listened_at() -> list[str]:
    """Return the addresses at which this process accepts connections, as the kernel lists them."""
    own = {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    found = []
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                number = bytes.fromhex(fields[1].partition(":")[0])
                # words of four bytes, each in the machine's order
                words = b"".join(number[at : at + 4][::-1] for at in range(0, len(number), 4))
                address = ipaddress.ip_address(words)
                found.append(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def make_tree(seed: int) -> dict[str, np.ndarray]:
    """Return arrays of several kinds and sizes, an empty one among them; 100 bytes cut inside and between them."""
    rng = np.random.default_rng(seed)
    return {
        "a": rng.normal(size=(3, 7)).astype(np.float32),
        "b": np.asarray(rng.integers(0, 2**31), np.int64),
        "c": rng.normal(size=(51,)).astype(ml_dtypes.bfloat16),
        "d": np.zeros((0, 4), np.float32),
        "e": rng.normal(size=(41, 5)).astype(np.float32).T,
        "f": rng.integers(0, 2, 33).astype(bool),
    }


def test_every_process_has_the_arrays_of_the_first(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    root = Path(__file__).parents[2]
    program.write_text(f"import sys; sys.path.insert(0, {str(root)!r})\n{PROGRAM}")
    code, printed = finish(start(["--num-instances", "2"], ["python", str(program)]))
    assert code == 0, printed
    assert printed.count("equal") == 2


def test_pieces_are_all_bytes_once_and_of_one_size(monkeypatch) -> None:
    monkeypatch.setattr(control, "PIECE_BYTES", 7)
    rows = [np.arange(size, dtype=np.uint8) for size in (3, 0, 20, 1, 7)]
    pieces = list(control._pieces(rows))
    assert [sum(part.size for part in piece) for piece in pieces] == [7, 7, 7, 7, 3]
    assert np.concatenate([part for piece in pieces for part in piece]).tolist() == np.concatenate(rows).tolist()
    assert all(any(np.shares_memory(part, row) for row in rows) for piece in pieces for part in piece)
