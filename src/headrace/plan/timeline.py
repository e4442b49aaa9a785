"""A schedule in time, simulated or measured: a table of cells, each an action on a device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from headrace.plan.schedule import Action, Node, Op, Work


class Cell(NamedTuple):
    """An action with its device, start and end. Simulated times are in ticks, measured ones in seconds."""

    start: float
    end: float
    device: int
    action: Action


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """Cells sorted by start, then device. Made by simulate(), or from measured times."""

    cells: tuple[Cell, ...]
    work: Work
    unit: str = "ticks"  # or "seconds"

    def in_order(self) -> Iterator[tuple[int, Action]]:
        """Yield (device, action) in the order to dispatch them: what an action needs always comes before it."""
        return ((cell.device, cell.action) for cell in self.cells)

    @cached_property
    def total_time(self) -> float:
        """From the first start to the last end."""
        return max(cell.end for cell in self.cells) - min(cell.start for cell in self.cells)

    @property
    def bubble(self) -> float:
        """The fraction of the devices' time that is idle."""
        busy = sum(cell.end - cell.start for cell in self.cells)
        return 1 - busy / (self.total_time * self.work.num_devices)

    @property
    def num_ticks(self) -> int:
        """The number of distinct start times; with all durations 1, the total time."""
        return len({cell.start for cell in self.cells})

    def peak_by_node(self) -> dict[Node, int]:
        """Return the largest number of micro batches that each node holds between their forward and backward passes."""
        return {node: int(self._peak(lambda n, node=node: n == node)) for node in self.work.device_of}

    def peak_by_stage(self) -> tuple[int, ...]:
        """Return the largest number of micro batches that each stage holds (in any of its functions)."""
        peaks = self.peak_by_node()
        return tuple(max(peaks[node] for node in nodes) for nodes in self.work.stages)

    def peak_by_device(self, size_of: Callable[[Node], float] = lambda node: 1, handed: float = 0) -> tuple[float, ...]:
        """Return the most that each device holds, where a micro batch of a node counts `size_of(node)`.

        The first half of a backward pass that is split hands on `handed` times as much to the second.
        """
        device_of = self.work.device_of
        return tuple(
            self._peak(lambda node, device=device: size_of(node) if device_of[node] == device else 0, handed)
            for device in range(self.work.num_devices)
        )

    def _peak(self, size_of: Callable[[Node], float], handed: float = 0) -> float:
        """Return the peak: a forward pass stores, a backward pass frees. Inference stores nothing."""
        stored = peak = 0
        for cell in self.cells if self.work.training else ():
            size = size_of(cell.action.node)
            stored += (size if cell.action.op is Op.F else 0) - (size if self.work.frees(cell.action) else 0)
            if self.work.is_split(cell.action.node) and cell.action.op is not Op.F:
                stored += handed * (size if cell.action.op is Op.B else -size)
            peak = max(peak, stored)
        return peak

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain values, for records and tests."""
        return {
            "num_stages": self.work.num_stages,
            "num_devices": self.work.num_devices,
            "num_micros": self.work.num_micros,
            "training": self.work.training,
            "unit": self.unit,
            "total_time": self.total_time,
            "bubble": self.bubble,
            "peak_by_stage": list(self.peak_by_stage()),
            "peak_by_device": list(self.peak_by_device()),
            "cells": [[cell.start, cell.end, cell.device, str(cell.action)] for cell in self.cells],
        }
