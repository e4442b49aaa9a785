"""Pipeline schedules as data: which action each device runs, and in which order.

An action is written `2F0` (stage 2, forward, micro batch 0); `1bB3` is the backward pass of the second function of
the concurrent stage 1, on micro batch 3; where backward passes are split, `2W0` is the half that nobody waits for.
`Work` defines what has to run, `needs()` what an action depends on, and a row of SCHEDULES the order. `simulate()`
(simulation.py) then assigns a time to every action.
"""

import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from headrace.core.errors import ConfigError, nearest
from headrace.plan.device_mapping import DeviceMapping, branches_of, check_device_mapping, devices_of


class Op(StrEnum):
    """What is done with a micro batch."""

    F = "F"  # the forward pass of one stage
    B = "B"  # its backward pass: the gradients of its weights and of its input, or, split, of its input alone
    W = "W"  # the other half of a split one: the gradients of its weights


class Node(NamedTuple):
    """A stage, or one function of a concurrent stage."""

    stage: int
    branch: str = ""  # a, b, c ... in a concurrent stage

    def __str__(self) -> str:
        return f"{self.stage}{self.branch}"


class Action(NamedTuple):
    """One pass of one node over one micro batch."""

    node: Node
    op: Op
    micro: int

    def __str__(self) -> str:
        return f"{self.node}{self.op}{self.micro}"

    @property
    def stage(self) -> int:
        """The stage of the node."""
        return self.node.stage

    @staticmethod
    def parse(text: str) -> "Action":
        """Return the action that prints as `text`."""
        found = re.fullmatch(r"(\d+)([a-z]?)([FBW])(\d+)", text.strip())
        if found is None:
            raise ValueError(f"{text!r} is not an action such as 2F0 (stage 2, forward, micro batch 0) or 1bB3")
        return Action(Node(int(found[1]), found[2]), Op(found[3]), int(found[4]))


@dataclass(frozen=True)
class Work:
    """What has to run: every stage on every micro batch, forward and, in training, backward."""

    device_mapping: DeviceMapping
    num_micros: int
    training: bool = True
    splits: bool = False  # backward passes are two actions; but at stage 0, for whose input nobody waits

    def __post_init__(self) -> None:
        mapping = self.device_mapping
        # The class is frozen; this is its own constructor, which stores the checked form.
        object.__setattr__(self, "device_mapping", check_device_mapping(mapping, len(mapping), branches_of(mapping)))
        if not self.num_stages or self.num_micros < 1:
            raise ConfigError(
                f"A schedule of {self.num_stages} stages and {self.num_micros} micro batches has nothing to do.",
                rule="There is at least one of each.",
            )

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.device_mapping)

    @cached_property
    def num_devices(self) -> int:
        return 1 + max(self.device_of.values())

    @cached_property
    def stages(self) -> tuple[tuple[Node, ...], ...]:
        """The nodes of each stage: one, or the functions of a concurrent stage."""
        return tuple(
            tuple(Node(stage, string.ascii_lowercase[i]) for i in range(len(entry)))
            if isinstance(entry, tuple)
            else (Node(stage),)
            for stage, entry in enumerate(self.device_mapping)
        )

    @cached_property
    def device_of(self) -> dict[Node, int]:
        pairs = zip(self.stages, self.device_mapping, strict=True)
        return {node: device for nodes, entry in pairs for node, device in zip(nodes, devices_of(entry), strict=True)}

    def actions(self) -> Iterator[Action]:
        """Yield every action that has to run, once."""
        ops = (Op.F, Op.B) if self.training else (Op.F,)
        for micro in range(self.num_micros):
            yield from (Action(node, op, micro) for op in ops for node in self.device_of)
            yield from (Action(node, Op.W, micro) for node in self.device_of if self.is_split(node))

    def is_split(self, node: Node) -> bool:
        """Say whether the backward passes of a node are two actions."""
        return self.training and self.splits and node.stage > 0

    def frees(self, action: Action) -> bool:
        """Say whether what the forward pass stored is needed no more after this action."""
        return action.op is (Op.W if self.is_split(action.node) else Op.B)


def needs(action: Action, work: Work) -> Iterator[Action]:
    """Yield the actions that must finish before this one can start. No other place defines a pipeline's dependencies.

    A forward pass needs the outputs of the previous stage. A backward pass needs what the forward passes of its stage
    stored (all of them: the loss joins the functions of a concurrent last stage) and the gradients of the next stage;
    its second half needs the first.
    """
    if action.op is Op.W:
        yield Action(action.node, Op.B, action.micro)
        return
    neighbour, same_stage = {Op.F: (-1, ()), Op.B: (1, work.stages[action.stage])}[action.op]
    for node in same_stage:
        yield Action(node, Op.F, action.micro)
    if 0 <= action.stage + neighbour < work.num_stages:
        for node in work.stages[action.stage + neighbour]:
            yield Action(node, action.op, action.micro)


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order in which each device runs its actions: `rows[device]`."""

    rows: tuple[tuple[Action, ...], ...]
    work: Work

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    @staticmethod
    def parse(text: str, work: Work) -> "Order":
        """Return the order written as `text`: one line per device, actions separated by spaces."""
        return Order(rows=tuple(tuple(map(Action.parse, line.split())) for line in text.splitlines()), work=work)


class Size(NamedTuple):
    """The numbers of stages and micro batches."""

    stages: int
    micros: int


Ticks = tuple[int, ...]  # of the forward and the backward pass; split, also of the second half


def _grouped(size: Size, stage: int, micro: int) -> Ticks:
    """All stages run forward at even ticks and backward at odd ticks."""
    # Made for hardware whose ticks end for all devices together: no short forward pass waits there for a long backward
    # pass. Without common ticks it takes as long as Interleaved, and stores up to 2S - 1 micro batches instead of S.
    return 2 * (stage + micro), 2 * (2 * size.stages - 2 - stage + micro) + 1


def _interleaved(size: Size, stage: int, micro: int) -> Ticks:
    """The last stage runs backward at once; the others keep just enough micro batches in flight to feed it."""
    return stage + 2 * micro, 2 * size.stages - 1 - stage + 2 * micro


def _sequential(size: Size, stage: int, micro: int) -> Ticks:
    """One micro batch at a time passes through all stages and back."""
    first = 2 * size.stages * micro
    return first + stage, first + 2 * size.stages - 1 - stage


def _gpipe(size: Size, stage: int, micro: int) -> Ticks:
    """All micro batches run forward, then all run backward."""
    return stage + micro, size.micros + 2 * (size.stages - 1) - stage + micro


def _zero_bubble(size: Size, stage: int, micro: int) -> Ticks:
    """As Interleaved; gradients of weights follow `stage` backward passes later, so that the last stages have work left
    when the first gradients are still on their way down (ZB-H1 of Qi et al. 2024).
    """
    forward, backward = _interleaved(size, stage, micro)
    return forward, backward, backward + 2 * stage


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A way to order the work: the ticks at which a stage would run a micro batch forward and backward.

    Only the order of the ticks counts; simulate() gives the times. In every row the ticks rise along needs(), so no
    schedule can deadlock, whatever the mapping.
    """

    name: str
    ticks: Callable[[Size, int, int], Ticks]
    splits: bool = False  # whether backward passes are two actions
    # (stages, training) -> what --strict-pipeline requires the number of micro batches to be a multiple of: the
    # reference system compiles whole turns of a ring with this many places.
    strict_multiple: Callable[[int, bool], int]
    summary: str


SCHEDULES: dict[str, Schedule] = {
    row.name.lower(): row
    for row in (
        Schedule(
            name="Grouped",
            ticks=_grouped,
            strict_multiple=lambda stages, training: 2 * stages if training else stages,
            summary="forward passes together, backward passes together; stores most",
        ),
        Schedule(
            name="Interleaved",
            ticks=_interleaved,
            strict_multiple=lambda stages, training: stages,
            summary="forward and backward passes in turn; stores about half as much",
        ),
        Schedule(
            name="Sequential",
            ticks=_sequential,
            strict_multiple=lambda stages, training: 1,
            summary="one micro batch at a time; stores one, and devices wait for each other",
        ),
        Schedule(
            name="GPipe",
            ticks=_gpipe,
            strict_multiple=lambda stages, training: 1,
            summary="all forward, then all backward; stores every micro batch",
        ),
        Schedule(
            name="ZeroBubble",
            ticks=_zero_bubble,
            splits=True,
            strict_multiple=lambda stages, training: stages,
            summary="gradients of inputs at once, those of weights later, where a device would wait; stores more",
        ),
    )
}


def schedule_names() -> tuple[str, ...]:
    """Return the names of all schedules."""
    return tuple(row.name for row in SCHEDULES.values())


def find_schedule(name: str) -> Schedule:
    """Return the schedule with that name, ignoring case."""
    if name.lower() not in SCHEDULES:
        guess = nearest(name.lower(), SCHEDULES)
        raise ConfigError(
            f"There is no pipeline schedule {name!r}.",
            rule=f"Known: {', '.join(schedule_names())}.",
            remedy=f"Did you mean {SCHEDULES[guess].name}?" if guess else "",
        )
    return SCHEDULES[name.lower()]


def make_order(schedule: str, work: Work) -> Order:
    """Return the order in which a schedule runs the work."""
    row, size = find_schedule(schedule), Size(work.num_stages, work.num_micros)
    work = replace(work, splits=row.splits)

    def when(action: Action) -> tuple[int, str, int, str]:
        # Within one tick of a device, backward comes first because it frees memory; then follow the data.
        forward, *backward = row.ticks(size, action.stage, action.micro)
        if action.op is Op.F:
            return forward, action.op, action.stage, action.node.branch
        return backward[action.op is Op.W], action.op, -action.stage, action.node.branch

    rows: list[list[Action]] = [[] for _ in range(work.num_devices)]
    for action in sorted(work.actions(), key=when):
        rows[work.device_of[action.node]].append(action)
    return Order(rows=tuple(map(tuple, rows)), work=work)


def strict_rule(
    schedule: str,
    num_stages: int,
    num_micros: int,
    *,
    training: bool = True,
    device_mapping: Sequence[int | tuple[int, ...]] = (),
) -> str | None:
    """Return which rule of the reference system's hardware is broken, or None. Headrace itself needs none of them."""
    row = find_schedule(schedule)
    multiple = row.strict_multiple(num_stages, training)
    if num_micros % multiple:
        below = num_micros - num_micros % multiple
        near = f"{below} or {below + multiple}" if below else str(multiple)
        return (
            f"{num_micros} micro batches per step are not a multiple of {multiple}, which {row.name} with {num_stages} "
            f"stages requires under --strict-pipeline; use {near}."
        )
    devices = [device for entry in device_mapping for device in devices_of(entry)]
    if training and row.name == "Interleaved" and len(set(devices)) < len(devices):
        return "Interleaved cannot train two stages on one device under --strict-pipeline; use Grouped or Sequential."
    return None
