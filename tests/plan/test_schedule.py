"""Schedules against closed formulas: complete, unique, in order of their needs; times, idle shares and peaks."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.plan.schedule import Action, Node, Op, Order, Work, find_schedule, make_order, schedule_names, strict_rule
from headrace.plan.simulation import equal_stages, make_table, per_stage, simulate
from headrace.plan.timeline import Timetable

NAMES = ("Grouped", "Interleaved", "Sequential", "GPipe")  # and ZeroBubble, which splits backward passes


@st.composite
def works(draw: st.DrawFn, training: bool | None = None) -> Work:
    """Any work: stages in any place, several on a device, concurrent ones, devices numbered without gaps."""
    shapes = draw(st.lists(st.sampled_from([None, None, 1, 2, 3]), min_size=1, max_size=5))
    wanted = [draw(st.integers(0, 4)) for shape in shapes for _ in range(shape or 1)]
    number = {device: rank for rank, device in enumerate(sorted(set(wanted)))}
    devices = iter([number[device] for device in wanted])
    mapping = tuple(next(devices) if s is None else tuple(next(devices) for _ in range(s)) for s in shapes)
    return Work(mapping, draw(st.integers(1, 9)), draw(st.booleans()) if training is None else training)


def earlier(a: Action, work: Work) -> list[Action]:
    """Return what must be done before an action, from the drawing of a pipeline: down the stages, then up again."""
    path = [(stage, "F") for stage in range(work.num_stages)] + [(s, "B") for s in reversed(range(work.num_stages))]
    before = path[: path.index((a.stage, str(a.op)))]
    return [Action(node, Op(op), a.micro) for stage, op in before for node in work.device_of if node.stage == stage]


def check(table: Timetable) -> None:
    """Assert that the table is a possible way to do its work, without a look at how it was made."""
    work = table.work
    cells = {cell.action: cell for cell in table.cells}
    nodes = sum(len(entry) if isinstance(entry, tuple) else 1 for entry in work.device_mapping)
    assert len(cells) == len(table.cells) == nodes * work.num_micros * (2 if work.training else 1)
    for cell in table.cells:
        entry = work.device_mapping[cell.action.stage]
        branch = "abc".find(cell.action.node.branch or "a")
        assert cell.device == (entry[branch] if isinstance(entry, tuple) else entry)
        assert all(cells[action].end <= cell.start for action in earlier(cell.action, work))
    for device in range(work.num_devices):
        mine = [cell for cell in table.cells if cell.device == device]
        assert all(a.end <= b.start for a, b in pairwise(mine))


@given(st.sampled_from(NAMES), works(), st.data())
@settings(max_examples=150)
def test_every_schedule_does_all_work_once_in_order_whatever_the_mapping(name, work, data):
    stage_times = st.lists(st.integers(1, 9), min_size=work.num_stages, max_size=work.num_stages)
    table = make_table(name, work, per_stage(data.draw(stage_times), data.draw(stage_times)))
    check(table)
    done: set[Action] = set()
    for device, action in table.in_order():
        assert device == work.device_of[action.node]
        assert done.issuperset(earlier(action, work))
        done.add(action)


@given(works(training=True), st.data())
@settings(max_examples=100)
def test_zero_bubble_does_gradients_of_weights_once_and_after_those_of_the_input(work, data):
    times = st.lists(st.integers(1, 9), min_size=work.num_stages, max_size=work.num_stages)
    table = make_table("ZeroBubble", work, per_stage(data.draw(times), data.draw(times)))
    whole = {(a.node, a.op, a.micro) for a in work.actions()}
    found = [(c.action.node, c.action.op, c.action.micro) for c in table.cells]
    assert len(found) == len(set(found))
    assert {each for each in found if each[1] is not Op.W} == whole
    ended = {cell.action: cell.end for cell in table.cells}
    late = [cell for cell in table.cells if cell.action.op is Op.W]
    assert {(c.action.node, c.action.micro) for c in late} == {(n, m) for n, op, m in whole if op is Op.B and n.stage}
    assert all(ended[Action(c.action.node, Op.B, c.action.micro)] <= c.start for c in late)
    for cell in table.cells:
        if cell.action.op is not Op.W:
            assert all(ended[each] <= cell.start for each in earlier(cell.action, work))
    for device in range(work.num_devices):
        mine = [cell for cell in table.cells if cell.device == device]
        assert all(a.end <= b.start for a, b in pairwise(mine))


@pytest.mark.parametrize(("S", "G"), [(2, 4), (4, 4), (4, 8), (4, 16), (8, 16), (8, 9)])
def test_zero_bubble_waits_a_third_as_long_as_interleaved(S, G):
    """With halves as long as a forward pass: 3 G + S - 1, the closed form of ZB-H1; Interleaved takes 3 (G + S - 1)."""
    table = make_table("ZeroBubble", Work(tuple(range(S)), G), equal_stages(1, 2))
    assert table.total_time == 3 * G + S - 1
    assert make_table("Interleaved", Work(tuple(range(S)), G), equal_stages(1, 2)).total_time == 3 * (G + S - 1)
    assert table.peak_by_stage() == (S,) * S
    assert table.peak_by_device() == (S,) * S
    handed = table.peak_by_device(handed=1)
    assert handed[0] == S, "the first stage keeps its backward pass whole"
    assert all(S < each <= 2 * S for each in handed[1:])


def test_two_stages_on_each_device_start_and_end_sooner():
    """The numbers of docs/explanation/schedules.md."""
    halves, quarters = equal_stages(0.5, 1), equal_stages(1, 2)
    for name, whole, looped, stored in (("Interleaved", 33, 30, 12), ("ZeroBubble", 27, 26, 14)):
        assert make_table(name, Work((0, 1, 2, 3), 8), quarters).total_time == whole
        table = make_table(name, Work((0, 1, 2, 3, 0, 1, 2, 3), 8), halves)
        assert (table.total_time, max(table.peak_by_device())) == (looped, stored)


PEAKS = {
    "Grouped": lambda S, G, s: min(G, 2 * (S - s) - 1),
    "Interleaved": lambda S, G, s: min(G, S - s),
    "Sequential": lambda S, G, s: 1,
    "GPipe": lambda S, G, s: G,
}


@given(st.sampled_from(NAMES), st.integers(1, 7), st.integers(1, 20))
def test_idle_share_and_peaks_of_equal_ticks(name, S, G):
    table = make_table(name, Work(tuple(range(S)), G))
    assert table.peak_by_stage() == tuple(PEAKS[name](S, G, s) for s in range(S))
    assert table.peak_by_device() == table.peak_by_stage()
    assert table.num_ticks == table.total_time == (2 * G * S if name == "Sequential" else 2 * (G + S - 1))
    bubble = Fraction(S - 1, S) if name == "Sequential" else Fraction(S - 1, G + S - 1)
    assert table.bubble == pytest.approx(float(bubble), abs=1e-12)


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 12), st.integers(1, 9), st.integers(1, 9))
def test_time_of_equal_stages_whatever_forward_and_backward_take(name, S, G, forward, backward):
    table = make_table(name, Work(tuple(range(S)), G), equal_stages(forward, backward))
    assert table.total_time == (forward + backward) * (G * S if name == "Sequential" else G + S - 1)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 9))
def test_time_with_transfers(S, G, transfer):
    work = Work(tuple(range(S)), G)
    round_trip = 3 * S + 2 * (S - 1) * transfer
    assert make_table("Sequential", work, equal_stages(1, 2), transfer).total_time == G * round_trip
    # GPipe goes down once and back once, and never waits in between
    assert make_table("GPipe", work, equal_stages(1, 2), transfer).total_time == 3 * (G - 1) + round_trip
    # Interleaved has S micro batches under way, which come back after one round trip
    rounds, rest = divmod(G - 1, S)
    assert make_table("Interleaved", work, equal_stages(1, 2), transfer).total_time >= (rounds + 1) * round_trip + rest


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 12))
def test_inference_stores_nothing_and_takes_one_tick_per_stage_and_micro(name, S, G):
    table = make_table(name, Work(tuple(range(S)), G, training=False))
    assert table.total_time == G + S - 1
    assert table.peak_by_stage() == (0,) * S


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 8))
def test_on_one_device_nothing_is_idle_and_sequential_stores_one(name, S, G):
    table = make_table(name, Work((0,) * S, G), equal_stages(1, 2))
    assert table.bubble == 0
    assert table.total_time == 3 * S * G
    if name == "Sequential":
        assert table.peak_by_device() == (S,)


@given(works(training=True))
@settings(max_examples=60)
def test_the_peak_of_a_device_is_the_most_between_forward_starts_and_backward_ends(work):
    table = make_table("Interleaved", work)
    cells = {cell.action: cell for cell in table.cells}
    for device, peak in enumerate(table.peak_by_device(lambda node: 1 + node.stage)):
        spans = [
            (cell.start, cells[Action(a.node, Op.B, a.micro)].end, 1 + a.stage)
            for a, cell in cells.items()
            if a.op is Op.F and cell.device == device
        ]
        assert peak == max(sum(size for start, end, size in spans if start <= t < end) for t, _, _ in spans)


def test_repeated_devices_as_measured_before():
    assert make_table("Grouped", Work((0, 1, 1, 0), 4)).peak_by_device() == (5, 7)
    # backward before forward in the same tick: one micro batch less than the prototype's (5, 5)
    assert make_table("Interleaved", Work((0, 1, 1, 0), 4)).peak_by_device() == (4, 4)


def test_orders_of_two_stages_by_hand():
    work = Work((0, 1), 3)
    assert str(make_order("Interleaved", work)) == "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"
    assert str(make_order("Grouped", work)) == "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"
    assert str(make_order("Sequential", work)) == "0F0 0B0 0F1 0B1 0F2 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"
    assert str(make_order("GPipe", work)) == "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2"


def test_concurrent_stages_by_hand():
    table = make_table("Sequential", Work((0, (1, 2), 2), 1), equal_stages(1, 2))
    starts = {str(cell.action): (cell.start, cell.device) for cell in table.cells}
    assert starts == {
        "0F0": (0, 0),
        "1aF0": (1, 1),
        "1bF0": (1, 2),
        "2F0": (2, 2),
        "2B0": (3, 2),
        "1aB0": (5, 1),
        "1bB0": (5, 2),
        "0B0": (7, 0),
    }


def test_the_loss_joins_concurrent_last_stages():
    durations = {"0F0": 1, "1aF0": 1, "1bF0": 5, "1aB0": 1, "1bB0": 1, "0B0": 1}
    table = make_table("Grouped", Work((0, (1, 2)), 1), lambda action: durations[str(action)])
    assert {c.start for c in table.cells if c.action.op is Op.B and c.action.stage == 1} == {6}


@given(st.integers(0, 99), st.sampled_from(["", "a", "z"]), st.sampled_from(list(Op)), st.integers(0, 9999))
def test_actions_print_and_parse(stage, branch, op, micro):
    action = Action(Node(stage, branch), op, micro)
    assert str(action) == f"{stage}{branch}{op.value}{micro}"
    assert Action.parse(str(action)) == action


@given(st.sampled_from(NAMES), works())
@settings(max_examples=20)
def test_orders_print_and_parse(name, work):
    order = make_order(name, work)
    assert Order.parse(str(order), work) == order


@pytest.mark.parametrize("text", ["2", "2f0", "F0", "2X0", "2F", "-1F0", "2FF0", "1abF0"])
def test_what_is_not_an_action(text):
    with pytest.raises(ValueError, match="2F0"):
        Action.parse(text)


REFUSED = {
    "deadlock, crossed": ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", "deadlocks after 2 of 8.*0B0 for 1B0.*1F1 for 0F1"),
    "deadlock, from the start": ("0B0 0F0 0F1 0B1\n1F0 1B0 1F1 1B1", "deadlocks after 0 of 8.*nothing could run"),
    "omission": ("0F0 0F1 0B0\n1F0 1B0 1F1 1B1", r"omits 1 of 8 actions \(1 on device 0\): 0B1"),
    "a row missing": ("0F0 0F1 0B0 0B1", r"omits 4 of 8 actions \(4 on device 1\): 1F0, 1B0, 1F1, 1B1"),
    "repetition": ("0F0 0F1 0B0 0B1 0F0\n1F0 1B0 1F1 1B1", "0F0 runs twice: device 0, position 0, .* position 4"),
    "wrong device": ("0F0 0F1 0B0 0B1 1F0\n1B0 1F1 1B1", r"1F0 \(device 0, position 4\) belongs to device 1"),
    "no such micro": ("0F0 0F1 0B0 0B1 0F2\n1F0 1B0 1F1 1B1", "0F2 .* not part of the work"),
}


@pytest.mark.parametrize(("text", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_orders_that_cannot_be(text, words):
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        simulate(Order.parse(text, Work((0, 1), 2)))


def test_a_deadlock_is_shown_as_far_as_it_came():
    with pytest.raises(ConfigError) as caught:
        simulate(Order.parse(REFUSED["deadlock, crossed"][0], Work((0, 1), 2)))
    assert str(caught.value).endswith("\ndev 0 |F0|. |\ndev 1 |. |F0|")


def test_durations_are_above_zero():
    with pytest.raises(ValueError, match="0F0 takes 0"):
        make_table("Grouped", Work((0,), 1), equal_stages(0, 1))


@pytest.mark.parametrize(("mapping", "micros"), [((), 1), ((0, 1), 0), ((0, 1), -3), ((0, 2), 1), ((1, 1), 1)])
def test_work_that_cannot_be(mapping, micros):
    with pytest.raises(ConfigError):
        Work(mapping, micros)


def test_names_in_any_case_and_the_nearest():
    assert schedule_names() == (*NAMES, "ZeroBubble")
    assert find_schedule("gRoUpEd").name == find_schedule("Grouped").name == "Grouped"
    with pytest.raises(ConfigError, match="Did you mean Interleaved") as caught:
        find_schedule("interleave")
    assert "Sequential" in str(caught.value)


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 40), st.booleans())
def test_the_strict_rule(name, S, G, training):
    multiple = {"Grouped": 2 * S if training else S, "Interleaved": S}.get(name, 1)
    sentence = strict_rule(name, S, G, training=training)
    assert (sentence is None) == (G % multiple == 0)
    if sentence:
        assert f"multiple of {multiple}" in sentence
        assert "--strict-pipeline" in sentence


def test_the_strict_rule_refuses_interleaved_training_on_shared_devices():
    refusal = strict_rule("Interleaved", 4, 8, device_mapping=[0, 1, 1, 0])
    assert refusal is not None
    assert "cannot train two stages on one device" in refusal
    assert strict_rule("Interleaved", 4, 8, device_mapping=[0, 1, 1, 0], training=False) is None
    assert strict_rule("Grouped", 4, 8, device_mapping=[0, 1, 1, 0]) is None
    assert strict_rule("Interleaved", 4, 8, device_mapping=[0, 1, 2, 3]) is None
