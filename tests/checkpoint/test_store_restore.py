"""Putting loaded tensors into a tree by name, and saying what does not fit."""

from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

from headrace.checkpoint.store import restore_tree
from headrace.core.errors import CheckpointError


class Momentum(NamedTuple):
    number: Any
    trace: dict


ARRAYS = {
    "params/conv1/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "params/fc/bias": np.array([1, 2], ml_dtypes.bfloat16),
    "opt/0/number": np.array(5, np.int32),
    "opt/0/trace/conv1/kernel": np.ones((2, 3), np.float32),
    "step": np.array(7, np.int32),
}


def like() -> dict:
    struct = jax.ShapeDtypeStruct
    return {
        "params": {"fc": {"bias": struct((2,), ml_dtypes.bfloat16)}, "conv1": {"kernel": np.zeros((2, 3), np.float32)}},
        "opt": (Momentum(struct((), np.int32), {"conv1": {"kernel": struct((2, 3), np.float32)}}), {}),
        "step": struct((), np.int32),
    }


def test_tensors_find_their_places_in_dicts_tuples_and_named_tuples() -> None:
    tree = restore_tree(ARRAYS, like())
    assert tree["params"]["conv1"]["kernel"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tree["params"]["fc"]["bias"].dtype == ml_dtypes.bfloat16
    assert isinstance(tree["opt"][0], Momentum)
    assert int(tree["opt"][0].number) == 5
    assert tree["opt"][1] == {}
    assert int(tree["step"]) == 7


def test_a_prefix_takes_a_part_and_leaves_the_rest_alone() -> None:
    tree = restore_tree(ARRAYS, like()["params"], prefix="params")
    assert tree["fc"]["bias"].tolist() == [1, 2]
    with pytest.raises(CheckpointError, match="1 tensor unexpected: params/fc/bias"):
        restore_tree(ARRAYS, {"conv1": like()["params"]["conv1"]}, prefix="params")


def test_every_kind_of_trouble_is_listed_at_once() -> None:
    wrong = dict(ARRAYS)
    del wrong["step"]
    wrong["ema/old"] = np.zeros(1)
    wrong["params/conv1/kernel"] = np.zeros((2, 4), np.float32)
    wrong["params/fc/bias"] = np.zeros(2, np.float32)
    with pytest.raises(CheckpointError) as caught:
        restore_tree(wrong, like())
    text = str(caught.value)
    assert "1 tensor missing: step." in text
    assert "1 tensor unexpected: ema/old." in text
    assert "2 tensors of another shape or type:" in text
    assert "params/conv1/kernel (float32[2, 4], needed float32[2, 3])" in text
    assert "params/fc/bias (float32[2], needed bfloat16[2])" in text


def test_long_lists_are_cut_and_counted() -> None:
    wanted = {f"layer{k}": np.zeros(1) for k in range(9)}
    with pytest.raises(CheckpointError, match=r"9 tensors missing: layer0, layer1, layer2, layer3 and 5 more\."):
        restore_tree({}, wanted)


def test_plain_numbers_have_a_shape_and_a_type_too() -> None:
    assert restore_tree({"n": np.array(3.0)}, {"n": 1.0})["n"] == 3.0
    with pytest.raises(CheckpointError, match=r"n \(float64\[1\], needed float64\[\]\)"):
        restore_tree({"n": np.zeros(1)}, {"n": 1.0})
