"""Simulate an order of actions: each starts as soon as its device is free and its inputs have arrived.

This models an asynchronous engine: a device runs its actions in order and waits only for their inputs, not for ticks
common to all devices. An order that cannot be executed raises ConfigError with a diagram of how far it got.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from headrace.core.errors import ConfigError
from headrace.core.units import format_list
from headrace.plan.draw.text import MAX_WIDTH, rows
from headrace.plan.schedule import Action, Op, Order, Work, make_order, needs
from headrace.plan.timeline import Cell, Timetable

Durations = Callable[[Action], float]

BACKWARD_PER_FORWARD = 2  # a backward pass computes two gradients, each with about the FLOPs of the forward pass

RULE = "An order runs every action of the work exactly once, on its own device, after what it needs."


def equal_stages(forward: float = 1, backward: float = 1) -> Durations:
    """Return durations that are equal for all stages."""
    return lambda action: forward if action.op is Op.F else backward


def per_stage(forward: Sequence[float], backward: Sequence[float]) -> Durations:
    """Return durations from one list per direction, with one number per stage."""
    return lambda action: (forward if action.op is Op.F else backward)[action.stage]


def by_shares(shares: Sequence[float]) -> Durations:
    """Return durations from each stage's share of the network's time, whose forward pass takes 1."""
    # A stage without work worth counting (a flatten, say) still has its place in the schedule.
    forward = [max(share, 1e-9) for share in shares]
    return per_stage(forward, [BACKWARD_PER_FORWARD * time for time in forward])


def make_table(schedule: str, work: Work, durations: Durations | None = None, transfer: float = 0) -> Timetable:
    """Simulate the schedule with that name."""
    return simulate(make_order(schedule, work), durations, transfer)


def simulate(order: Order, durations: Durations | None = None, transfer: float = 0) -> Timetable:
    """Return when each action runs (durations are 1 if None); `transfer` is the time between two devices.

    A backward pass that is split takes half of its duration in each of its actions.

    Repeated, missing or misplaced actions and deadlocks raise ConfigError.
    """
    # Halves of a backward pass are what has length 1, where it is split.
    durations = durations or equal_stages(backward=2 if order.work.splits and order.work.training else 1)
    _check_complete(order)
    work, device_of = order.work, order.work.device_of
    cells: dict[Action, Cell] = {}
    # Whole numbers where there are no transfers: ticks are then exact, and draw as one column each.
    head, free = [0] * len(order.rows), [0.0 if transfer else 0] * len(order.rows)
    moved = True
    # Devices in turn, each as far as it can get; a round without progress is a deadlock.
    while moved:
        moved = False
        for device, row in enumerate(order.rows):
            while head[device] < len(row) and all(need in cells for need in needs(row[head[device]], work)):
                action = row[head[device]]
                arrivals = [
                    cells[need].end + (transfer if device_of[need.node] != device else 0)
                    for need in needs(action, work)
                ]
                start, duration = max([free[device], *arrivals]), durations(action)
                if action.op is not Op.F and work.is_split(action.node):
                    duration = duration // 2 if isinstance(duration, int) and duration % 2 == 0 else duration / 2
                if duration <= 0:
                    raise ValueError(f"{action} takes {duration}: durations are above 0")
                cells[action] = Cell(start, start + duration, device, action)
                free[device], head[device], moved = start + duration, head[device] + 1, True
    if any(head[device] < len(row) for device, row in enumerate(order.rows)):
        raise _deadlock(order, head, cells)
    return Timetable(cells=_by_start(cells), work=work)


def _by_start(cells: dict[Action, Cell]) -> tuple[Cell, ...]:
    return tuple(sorted(cells.values(), key=lambda cell: (cell.start, cell.device)))


def _check_complete(order: Order) -> None:
    """Raise ConfigError unless the order consists of exactly the actions of its work."""
    work = order.work
    wanted = set(work.actions())
    seen: dict[Action, str] = {}
    for device, row in enumerate(order.rows):
        for position, action in enumerate(row):
            where = f"device {device}, position {position}"
            if action not in wanted:
                raise _refusal(f"{action} ({where}) is not part of the work", order)
            if action in seen:
                raise _refusal(f"{action} runs twice: {seen[action]}, and again on {where}", order)
            if work.device_of[action.node] != device:
                raise _refusal(f"{action} ({where}) belongs to device {work.device_of[action.node]}", order)
            seen[action] = where
    missing = [action for action in work.actions() if action not in seen]
    if missing:
        names = format_list(missing, 8)
        devices = Counter(work.device_of[action.node] for action in missing)
        where = ", ".join(f"{count} on device {device}" for device, count in sorted(devices.items()))
        raise _refusal(f"The order omits {len(missing)} of {len(wanted)} actions ({where}): {names}", order)


def _refusal(problem: str, order: Order) -> ConfigError:
    """Return the error with the order as it was given."""
    lines = [f"dev {device} |" + "|".join(map(str, row[:24])) for device, row in enumerate(order.rows)]
    return ConfigError(f"{problem}.", rule=RULE, remedy="The order:\n" + "\n".join(lines))


def _deadlock(order: Order, head: list[int], cells: dict[Action, Cell]) -> ConfigError:
    """Return an error that explains which device waits for which, and shows how far the order got."""
    waits = []
    for device, row in enumerate(order.rows):
        if head[device] == len(row):
            continue
        action = row[head[device]]
        missing = next(need for need in needs(action, order.work) if need not in cells)
        owner = order.work.device_of[missing.node]
        ahead = order.rows[owner].index(missing) - head[owner]
        behind = f"device {owner} must first run {ahead} other action{'s' * (ahead != 1)}"
        waits.append(f"device {device} waits with {action} for {missing}, and {behind}")
    diagram = "\n".join(rows(_by_start(cells), order.work, MAX_WIDTH)) if cells else "(nothing could run)"
    return ConfigError(
        f"The order deadlocks after {len(cells)} of {sum(map(len, order.rows))} actions: {'; '.join(waits)}.",
        rule=RULE,
        remedy=f"Move the actions that others wait for to the front. It got this far:\n{diagram}",
    )
