"""The calls of a run: one compiled program for each image size, all on the same devices and the same state."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from headrace.data.dataset import DataSet
from headrace.data.feed import FeedOptions
from headrace.engine.state import State
from headrace.plan.resolution import SizeSpan
from headrace.run.design import Design
from headrace.run.executor import Executor, make_executor
from headrace.run.trainer import Compiled, compile_call, step_spec


class Calls:
    """Makes the programs of the sizes that are still to come, and says which one a call runs."""

    def __init__(self, design: Design, options: FeedOptions, dataset: DataSet, devices: list[Any], step: int) -> None:
        ends = [span.first_step for span in design.sizes[1:]] + [design.plan.steps.total_steps + 1]
        self._spans = [span for span, end in zip(design.sizes, ends, strict=True) if end > step]
        self._executors = [_executor(design, options, dataset, devices, span) for span in self._spans]
        self._programs: list[Any] = []
        self.executor = self._executors[-1]  # a state and a block lie alike for all of them

    def compile(self, state: State, resident: Any, block: Any) -> Iterator[tuple[str, Compiled]]:
        """Compile every program ahead of its first call; yield what it is for, and what that took."""
        for span, executor in zip(self._spans, self._executors, strict=True):
            compiled = compile_call(executor, state, resident, block)
            self._programs.append(compiled.program)
            size = f" at {span.image_hw[0]}x{span.image_hw[1]}" if len(self._spans) > 1 else ""
            yield f"training{size}", compiled

    def at(self, step: int) -> Any:
        """Return the program of the call that begins after `step` steps."""
        begun = [program for span, program in zip(self._spans, self._programs, strict=True) if span.first_step <= step]
        return begun[-1]


def _executor(design: Design, options: FeedOptions, dataset: DataSet, devices: list[Any], span: SizeSpan) -> Executor:
    """Return what runs calls on images of one size."""
    network = design.network
    if span.image_hw != network.input_hwc[:2]:
        design = replace(design, network=replace(network, input_hwc=(*span.image_hw, network.input_hwc[2])))
        options = replace(options, preprocess=options.preprocess.at_size(span.image_hw))
    spec = step_spec(design, options, dataset)
    return make_executor(design.plan, spec, devices, design.config.pipeline)
