"""Cuts against brute force over all of them; names and mappings that cannot be; the comparison in words."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.load import config_from
from headrace.core.errors import ConfigError
from headrace.model.network import Network
from headrace.model.zoo import build_network
from headrace.plan.device_mapping import check_device_mapping
from headrace.plan.partition import (
    BlockCost,
    Limits,
    SplitFilter,
    best_splits,
    block_costs,
    compare,
    measured,
    slowest_device,
    splits_by_name,
    stage_ranges,
)


@pytest.fixture(scope="module")
def network() -> Network:
    return build_network(config_from({"model_name": "cifar_resnet8"}).model, 10, (32, 32, 3))


@st.composite
def blocks(draw: st.DrawFn) -> list[BlockCost]:
    numbers = st.integers(0, 9)
    return [
        BlockCost(
            name=f"b{i}",
            time=draw(numbers),
            num_parameters=draw(numbers),
            stored_bytes=draw(numbers),
            input_bytes=draw(numbers),
        )
        for i in range(draw(st.integers(1, 8)))
    ]


def all_cuts(num_blocks: int, num_stages: int):
    return combinations(range(1, num_blocks), num_stages - 1)


def bytes_crossing(costs: list[BlockCost], cut: tuple[int, ...]) -> int:
    return sum(costs[first].input_bytes for first in cut)


def slowest(costs: list[BlockCost], cut: tuple[int, ...], shares: list[int]) -> float:
    edges = [0, *cut, len(costs)]
    return max(shares[s] * sum(c.time for c in costs[edges[s] : edges[s + 1]]) for s in range(len(cut) + 1))


def most_memory(costs: list[BlockCost], cut: tuple[int, ...], limits: Limits, shares: list[int]) -> float:
    edges, needs = [0, *cut, len(costs)], []
    for s in range(len(cut) + 1):
        mine = costs[edges[s] : edges[s + 1]]
        kept = sum(c.stored_bytes for c in mine) + mine[0].input_bytes
        weights = limits.bytes_per_parameter * sum(c.num_parameters for c in mine)
        needs.append(shares[s] * (weights + limits.stored_micros[s] * kept))
    return max(needs)


@given(blocks(), st.data())
@settings(max_examples=200)
def test_the_best_cut_is_the_best_of_all_cuts(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    mapping = data.draw(st.none() | st.lists(st.integers(0, 2), min_size=num_stages, max_size=num_stages))
    shares = [1] * num_stages if mapping is None else [mapping.count(device) for device in mapping]
    cut = best_splits(costs, num_stages, device_mapping=mapping)
    assert len(cut) == num_stages - 1
    best = min((slowest(costs, c, shares), bytes_crossing(costs, c)) for c in all_cuts(len(costs), num_stages))
    assert (slowest(costs, cut, shares), bytes_crossing(costs, cut)) == best


@given(blocks(), st.data())
@settings(max_examples=200)
def test_the_best_cut_that_fits_the_memory(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    limits = Limits(
        device_bytes=data.draw(st.integers(0, 150)),
        bytes_per_parameter=data.draw(st.integers(0, 3)),
        stored_micros=tuple(data.draw(st.integers(1, 4)) for _ in range(num_stages)),
    )
    shares = [1] * num_stages
    cuts = list(all_cuts(len(costs), num_stages))
    fitting = [c for c in cuts if most_memory(costs, c, limits, shares) <= limits.device_bytes]
    if not fitting:
        least = min(most_memory(costs, c, limits, shares) for c in cuts)
        with pytest.raises(ConfigError, match=f"(?s)fits devices of .* needs {least:.0f} B"):
            best_splits(costs, num_stages, limits)
        return
    cut = best_splits(costs, num_stages, limits)
    assert cut in fitting
    best = min((slowest(costs, c, shares), bytes_crossing(costs, c)) for c in fitting)
    assert (slowest(costs, cut, shares), bytes_crossing(costs, cut)) == best


@given(blocks(), st.data())
@settings(max_examples=100, deadline=None)
def test_the_best_cut_at_allowed_blocks(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    allowed = frozenset(data.draw(st.sets(st.integers(1, len(costs)), min_size=num_stages - 1)))
    cuts = [cut for cut in all_cuts(len(costs), num_stages) if set(cut) <= allowed]
    if not cuts:
        return
    cut = best_splits(costs, num_stages, allowed=allowed)
    assert set(cut) <= allowed
    shares = [1] * num_stages
    assert slowest(costs, cut, shares) == min(slowest(costs, each, shares) for each in cuts)


@pytest.mark.parametrize(
    ("include", "exclude", "names"),
    [
        (("conv4",), (), {"conv4_block1", "conv4_block1_post_addition_relu"}),
        (("conv3", "conv4"), ("relu",), {"conv3_block1", "conv4_block1"}),
        (("b2/",), (), {"conv3_block1_post_addition_relu"}),  # under the first application's name, b2/0/relu
        ((), ("conv", "b"), {"avg_pool", "fc_layer"}),
    ],
)
def test_a_filter_allows_blocks_by_any_of_their_names(network, include, exclude, names):
    allowed = SplitFilter(include=include, exclude=exclude).allowed(network)
    assert allowed is not None
    assert {network.block_names[number] for number in allowed} >= names
    assert all(not any(part in network.block_names[number] for part in exclude) for number in allowed)


def test_a_filter_that_leaves_too_few_blocks_is_refused(network):
    assert SplitFilter().allowed(network) is None
    with pytest.raises(ConfigError) as caught:
        SplitFilter(include=("conv9",)).check(network, 2)
    for part in ("--split-include-filter conv9: 0 of", "2 stages need 1", "conv3_block1"):
        assert part in str(caught.value)


@pytest.mark.parametrize("num_stages", [0, -1, 4])
def test_too_many_or_too_few_stages(num_stages):
    costs = [BlockCost(name=name, time=1) for name in "abc"]
    with pytest.raises(ConfigError, match="Use 1 to 3 stages"):
        best_splits(costs, num_stages)


def test_costs_are_flops_and_bytes_of_the_shapes(network):
    first, second, *_ = block_costs(network, micro_batch_size=4, bytes_per_number=2)
    # the stem: 3x3 convolution 3 -> 16 on 32x32, two FLOPs per multiply-add; its output is stored, the relu's is
    # written too
    flops, stored = 4 * 2 * 9 * 3 * 16 * 32 * 32, 4 * 2 * 16 * 32 * 32
    assert (first.name, first.stored_bytes, first.input_bytes) == ("conv1", stored, 4 * 2 * 3 * 32 * 32)
    assert first.time == flops + 250 * 2 * stored
    assert second.input_bytes == 4 * 2 * 16 * 32 * 32


def test_measured_times_replace_the_model(network):
    costs = measured(block_costs(network, 1, 4), dict.fromkeys(network.block_names, 1.0))
    assert best_splits(costs, 3) == (3, 6)
    assert costs[1].stored_bytes > 0


def test_splits_by_name(network):
    names = [f"conv{i}_block1_post_addition_relu" for i in (2, 3, 4)]
    assert splits_by_name(network, names) == (2, 4, 6)
    assert splits_by_name(network, []) == ()
    assert stage_ranges((2, 4, 6), 9) == ((0, 2), (2, 4), (4, 6), (6, 9))


REFUSED = {
    "unknown": (["conv3_blok1"], "no block 'conv3_blok1'.*Did you mean conv3_block1"),
    "nothing near": (["zzz"], "no block 'zzz'"),
    "first block": (["conv1", "conv3_block1"], "conv1 is the first block"),
    "repeated": (["conv3_block1", "conv3_block1"], "conv3_block1 is named 2 times"),
    "wrong order": (
        ["conv2_block1", "conv4_block1", "conv3_block1"],
        "conv3_block1 comes before conv4_block1.*In order: conv2_block1 conv3_block1 conv4_block1",
    ),
}


@pytest.mark.parametrize(("names", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_splits_that_cannot_be(network, names, words):
    with pytest.raises(ConfigError, match=words) as caught:
        splits_by_name(network, names)
    assert all(name in str(caught.value) for name in network.block_names[1:])
    assert "starts a new stage" in str(caught.value)


def test_a_much_worse_cut_is_said_with_its_price():
    costs = [BlockCost(name=name, time=time) for name, time in zip("abcd", (4, 4, 4, 4), strict=True)]
    sentence = compare(costs, (3,), (2,))
    assert sentence == (
        "Device 0 (a to c) has the most work: a step takes about 50% longer than with --pipeline-splits c"
    )
    assert compare(costs, (2,), (2,)) is None
    # 10 % is not much
    costs = [BlockCost(name=name, time=time) for name, time in zip("abc", (10, 1, 10), strict=True)]
    assert compare(costs, (2,), (1,)) is None


def test_stages_that_share_a_device_count_together():
    costs = [BlockCost(name=name, time=time) for name, time in zip("abc", (1, 1, 98), strict=True)]
    assert slowest_device(costs, (2,), [0, 0]) == (0, 100)
    assert compare(costs, (1,), (2,), [0, 0]) is None
    shared = [BlockCost(name=name, time=time) for name, time in zip("abcd", (2, 2, 2, 2), strict=True)]
    assert "Device 1 (b to b, c to d)" in (compare(shared, (1, 2), (2, 3), [0, 1, 1]) or "")


def test_a_device_with_two_stages_gets_stages_of_half_the_size():
    costs = [BlockCost(name=f"b{i}", time=1) for i in range(8)]
    assert best_splits(costs, 3, device_mapping=[0, 1, 1]) == (4, 6)
    assert best_splits(costs, 4, device_mapping=[0, 1, 1, 0]) == (2, 4, 6)


def test_device_mappings():
    assert check_device_mapping(None, 3) == (0, 1, 2)
    assert check_device_mapping(None, 3, [None, 2, None]) == (0, (1, 2), 3)
    assert check_device_mapping([0, 1, 1, 0], 4) == (0, 1, 1, 0)
    assert check_device_mapping([0, 0], 2) == (0, 0)
    assert check_device_mapping([0, [1, 2], 2], 3, [None, 2, None]) == (0, (1, 2), 2)


WRONG_MAPPINGS = {
    "too short": ([0, 1], 3, None, "2 entries, but there are 3 stages"),
    "a gap": ([0, 2, 2], 3, None, "device 1 has nothing to do.*without gaps is 0 1 1"),
    "not from 0": ([1, 2], 2, None, "device 0 has nothing to do"),
    "below 0": ([-1, 0], 2, None, "device -1 cannot be"),
    "a list for one function": ([0, [1, 2]], 2, None, "stage 1 2 devices, but the stage is a single function"),
    "one device for a list": ([0, 1], 2, [None, 2], "device 1, but the stage has 2 functions"),
    "a list too long": ([0, [1, 2, 3]], 2, [None, 2], "3 devices, but the stage has 2 functions"),
    "two levels": ([0, [1, [2]]], 2, [None, 2], "one level deep"),
    "a gap in a list": ([0, [1, 3]], 2, [None, 2], r"device 2 has nothing to do.*0 \[1, 2\]"),
}


@pytest.mark.parametrize(("mapping", "stages", "branches", "words"), WRONG_MAPPINGS.values(), ids=WRONG_MAPPINGS.keys())
def test_mappings_that_cannot_be(mapping, stages, branches, words):
    with pytest.raises(ConfigError, match=words):
        check_device_mapping(mapping, stages, branches)
