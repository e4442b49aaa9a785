"""Safetensors files: the bytes that we write are those of the safetensors library."""

import itertools
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy

from headrace.core.tensor_file import DTYPES, safetensors_parts, write_safetensors


def arrays_of_every_type() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    for (code, dtype), count in itertools.product(DTYPES.items(), (3, 1)):
        bits = np.frombuffer(rng.bytes(count * dtype.itemsize), np.uint8) & 1
        arrays[f'{code}/{count}é\x07\x7f"\\'] = bits.view(dtype).reshape(-1, 1)
    return arrays | {"number": np.array(3, np.int32), "empty": np.zeros((0, 4)), "none": np.zeros(0, bool)}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
@pytest.mark.parametrize("arrays", [{}, arrays_of_every_type()], ids=["empty", "every type"])
def test_the_bytes_are_those_of_the_safetensors_library(arrays: dict, metadata: dict[str, str] | None) -> None:
    expected = safetensors.numpy.save(arrays, metadata)
    assert b"".join(safetensors_parts(arrays, metadata)) == expected


def test_large_arrays_come_in_parts_and_are_not_copied() -> None:
    array = np.arange(3_000_001, dtype=np.float32)
    tracemalloc.start()
    try:
        header, *parts = safetensors_parts({"a": array})
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert len(parts) == 12  # of 1 MiB
    assert b"".join([header, *parts]) == safetensors.numpy.save({"a": array})


def test_strided_arrays_are_written_by_value() -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    given = {"transposed": base.T, "strided": base[::2, 1::2], "flipped": base[::-1]}
    found = safetensors.numpy.load(write_safetensors(given, {"classes": ["é"]}))
    for name, array in given.items():
        assert found[name].tolist() == array.tolist(), name
