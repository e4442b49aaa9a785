"""`pipeline()`: any functions as stages on several devices, trained or only run, in the order of a schedule.

It makes nodes for the executor in `engine/pipeline`, which launches their programs in the order of the schedule.
Weights, the optimizer's state and other state are in a PipelineState that a run takes and returns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from headrace.core.errors import ConfigError
from headrace.core.tree import PyTree
from headrace.engine.accumulation import AccumulatorType
from headrace.engine.devices import replicated
from headrace.engine.multiprocess_arrays import local_devices, local_part, place, place_share, transfer
from headrace.engine.pipeline.runner import PipelineRun
from headrace.engine.pipeline.step_plan import EACH, Values
from headrace.engine.placement import placed_shardings
from headrace.job import current_group
from headrace.plan.draw.text import draw_timeline
from headrace.plan.schedule import Node, find_schedule
from headrace.plan.timeline import Timetable
from headrace.program.infeed import Infeed
from headrace.program.outfeed import Outfeed
from headrace.program.pipeline_request import PipelineRequest, run_constants
from headrace.program.pipeline_spec import PipelineSpec, make_spec
from headrace.program.pipeline_steps import LATEST, init_optimizer, make_steps
from headrace.program.stage import OptimizerOutput
from headrace.program.structure import difference, read_replicas, structure_of


@dataclass(frozen=True, kw_only=True)
class PipelineState:
    """What a pipeline carries from run to run. A run returns a new one and leaves the old one as it is."""

    spec: PipelineSpec
    weights: dict[int, Any]  # by the number of the weights
    optimizer: tuple[Any, ...]  # the optimizer's state, one for each group of weights that are updated together
    others: dict[Node, Any]  # what is not trained, [replicas, ...]

    @property
    def params(self) -> list[PyTree]:
        """The weights of the stages, nested as the stages were given."""
        return self._nested(lambda node: self.weights[self.spec.functions[node].weights])

    @property
    def state(self) -> list[PyTree]:
        """What the stages carry untrained, nested as the stages were given."""
        return self._nested(
            lambda node: (
                jax.tree.map(lambda a: np.asarray(a)[0], local_part(self.others[node])) if node in self.others else None
            )
        )

    def _nested(self, of: Callable[[Node], Any]) -> list[PyTree]:
        return [of(entry) if isinstance(entry, Node) else [of(node) for node in entry] for entry in self.spec.nested]


class Pipeline:
    """A pipeline that can run. `init()` returns its state at the start, a call runs it once."""

    def __init__(self, spec: PipelineSpec) -> None:
        self.spec = spec
        self._steps = make_steps(spec)
        infeed = spec.request.infeed
        self._element = None if infeed is None else jax.tree.leaves(infeed.structure.shapes(spec.request.replicas))

    @property
    def table(self) -> Timetable:
        """The schedule: every action with its device, start and end."""
        return self.spec.table

    @property
    def peaks(self) -> dict[Node, int]:
        """The most micro batches of which each node holds something for the backward pass at once."""
        return self._steps.plan.peaks("saved") if self.spec.work.training else {}

    def draw(self) -> str:
        """Return the schedule as a diagram in text."""
        return draw_timeline(self.table, find_schedule(self.spec.request.pipeline_schedule).name)

    def init(self) -> PipelineState:
        """Return the state at the start: the weights as they were given, on their devices."""
        spec, updates = self.spec, self._steps.updates
        current_group().connect_devices([traced.mesh for traced in spec.nodes.values()])
        weights = {key: place(params, replicated(self._mesh_of(key))) for key, params in spec.params.items()}
        optimizer = []
        for group, shapes in zip(updates.groups, updates.states, strict=True):
            mesh = self._mesh_of(group[0])
            given = {key: transfer(weights[key], replicated(mesh)) for key in group}
            where = placed_shardings(shapes, mesh, spec.placement)
            optimizer.append(jax.jit(partial(init_optimizer, spec), out_shardings=where)(given))
        others = {
            node: self._replicate(function.state, node)
            for node, function in spec.functions.items()
            if function.has_state
        }
        return PipelineState(spec=spec, weights=weights, optimizer=tuple(optimizer), others=others)

    def __call__(self, state: PipelineState, inputs: Sequence[PyTree] | None = None) -> PipelineState:
        """Run `repeat_count` steps; `inputs` take the place of those that the pipeline was made with.

        The results may still be under way; reading them waits.
        """
        spec, request = self.spec, self.spec.request
        if not isinstance(state, PipelineState) or state.spec is not spec:
            raise ConfigError("The state is not one of this pipeline.", remedy="Start with pipeline.init().")
        constants = spec.inputs if inputs is None else self._same_inputs(inputs)
        start = self._start(state, constants)
        steps = self._steps.plan.compile(start)
        if request.outfeed is not None:
            request.outfeed.begin(spec.leaving, self._local_replicas)
        try:
            end = steps(start, request.repeat_count, before=self._feed)
        finally:
            if request.outfeed is not None:
                request.outfeed.finish()
        return PipelineState(
            spec=spec,
            weights={key: end["params", key] for key in state.weights},
            optimizer=tuple(end["optimizer", number] for number in range(len(state.optimizer))),
            others={node: end["others", node] for node in state.others},
        )

    def _start(self, state: PipelineState, constants: tuple[object, ...]) -> Values:
        """Return the values that a run starts from, and the shapes of those that are fed."""
        spec = self.spec
        start: Values = {("params", key): params for key, params in state.weights.items()}
        start |= {("optimizer", number): slots for number, slots in enumerate(state.optimizer)}
        start |= {("others", node): other for node, other in state.others.items()}
        leaves = jax.tree.leaves(constants)
        for node in spec.work.stages[0]:
            start["constants", node] = self._replicate(leaves, node)
            start["go", node] = ()
            if self._element is not None:
                where = NamedSharding(spec.nodes[node].mesh, EACH)
                element = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where) for leaf in self._element]
                start |= {("element", node, micro): element for micro in range(spec.work.num_micros)}
        return start | self._numbers

    @cached_property
    def _numbers(self) -> Values:
        """The numbers of the micro batches on the devices, where the accumulation reads them."""
        # Once, not in every run: sending one takes about 40 us.
        numbers = [key for key in self._steps.plan.kept if isinstance(key, tuple) and key[0] == "number"]
        return {key: place(np.int32(key[2]), replicated(self.spec.nodes[key[1]].mesh)) for key in numbers}

    def _feed(self, run: PipelineRun, step: int) -> None:
        """Give a step its elements; at most two steps are under way: more would only hold more elements."""
        spec, infeed = self.spec, self.spec.request.infeed
        # Not the step before: the devices would have nothing to do while the host prepares this one.
        if step >= 2:
            jax.block_until_ready(run.result(step - 2, LATEST))
        count = self._local_replicas
        elements = []
        if infeed is not None:
            elements = infeed.take_all(spec.work.num_micros * count, "a step of the pipeline")
        for node in spec.work.stages[0]:
            run.post(step, ("go", node), ())
        for micro in range(spec.work.num_micros) if elements else ():
            mine = elements[micro * count : (micro + 1) * count]
            stacked = jax.tree.leaves(jax.tree.map(lambda *arrays: np.stack(arrays), *mine))
            for node in spec.work.stages[0]:
                where = NamedSharding(spec.nodes[node].mesh, EACH)
                run.post(step, ("element", node, micro), place_share(stacked, where))

    @property
    def _local_replicas(self) -> int:
        return len(local_devices(next(iter(self.spec.nodes.values())).mesh))

    def _mesh_of(self, weights: int) -> Mesh:
        return self.spec.nodes[self.spec.nodes_of(weights)[0]].mesh

    def _replicate(self, tree: PyTree, node: Node) -> PyTree:
        """Put a copy of host arrays on every replica of a node, as [replicas, ...]."""
        # With a replica dim, because each replica's copy may change on its own while the pipeline runs.
        count, where = self._local_replicas, NamedSharding(self.spec.nodes[node].mesh, EACH)
        return place_share(jax.tree.map(lambda a: np.broadcast_to(a, (count, *a.shape)).copy(), tree), where)

    def _same_inputs(self, inputs: PyTree) -> tuple[PyTree, ...]:
        constants = run_constants(inputs)
        if change := difference(structure_of(self.spec.inputs), structure_of(constants)):
            raise ConfigError(
                f"What is given to this run {change}.", rule="The inputs of a run are as those it was made with."
            )
        return constants


def pipeline(
    stages: Sequence[object],
    gradient_accumulation_count: int,
    *,
    optimizer_function: Callable[..., OptimizerOutput] | None = None,
    device_mapping: Sequence[int | Sequence[int]] | None = None,
    pipeline_schedule: str = "Grouped",
    inputs: Sequence[PyTree] | None = None,
    infeed: Infeed | None = None,
    outfeed: Outfeed | None = None,
    repeat_count: int = 1,
    gradient_accumulation_dtype: AccumulatorType = None,
    reduction_method: str = "SUM",
    recomputation: bool = False,
    offload_weight_update_variables: bool | None = None,
    replicated_optimizer_state_sharding: bool = False,
    outfeed_loss: bool = False,
    outfeed_mask: Sequence[bool] | None = None,
    accumulate_outfeed: bool = False,
    accumulate_outfeed_dtype: AccumulatorType = None,
    replicas: int | Literal["auto"] = 1,
    strict: bool = False,
) -> Pipeline:
    """Make a pipeline of stages; nothing runs yet, but all that can be wrong is refused.

    Args:
        stages: two or more of: a function of its inputs, `Stage(function, params)`, or a list of these that run side by
            side on the same inputs. The first takes `inputs` and the infeed's element, others the outputs before.
        gradient_accumulation_count: micro batches per step; the weights change once, at its end.
        optimizer_function: takes the last stage's outputs, returns OptimizerOutput(optimizer, loss). None: inference.
        device_mapping: the device of each stage, a list for concurrent ones. None: one device for each function.
        pipeline_schedule: Grouped, Interleaved, Sequential or GPipe, which give the same bits, or ZeroBubble.
        inputs: values that are the same for all micro batches of a run.
        infeed: gives every replica an element for each micro batch.
        outfeed: takes the last stage's outputs, one row for each micro batch.
        repeat_count: steps of one run.
        gradient_accumulation_dtype: None for the weight's type, a type, or a function of the weight.
        reduction_method: SUM, MEAN or RUNNING_MEAN of the micro batches' gradients. Over replicas it is the mean.
        recomputation: keep only a stage's inputs (and what recomputation_checkpoint marks) for its backward pass.
        offload_weight_update_variables: keep the optimizer's state in host memory between updates. None: where several
            micro batches are accumulated and the devices can reach host memory.
        replicated_optimizer_state_sharding: cut the optimizer's state over the replicas; each updates its part.
        outfeed_loss: let the loss leave in place of the outputs.
        outfeed_mask: for each output whether it is left out.
        accumulate_outfeed: let one sum over the micro batches leave per step, in accumulate_outfeed_dtype.
        replicas: copies of the whole pipeline, each on devices of its own; over several processes, those of all. "auto"
            makes as many as there are devices for: 4 where two stages find eight.
        strict: also refuse what the original hardware could not do.
    """
    request = PipelineRequest(
        stages=stages,
        gradient_accumulation_count=gradient_accumulation_count,
        optimizer_function=optimizer_function,
        device_mapping=device_mapping,
        pipeline_schedule=pipeline_schedule,
        inputs=inputs,
        infeed=infeed,
        outfeed=outfeed,
        repeat_count=repeat_count,
        gradient_accumulation_dtype=gradient_accumulation_dtype,
        reduction_method=reduction_method,
        recomputation=recomputation,
        offload_weight_update_variables=offload_weight_update_variables,
        replicated_optimizer_state_sharding=replicated_optimizer_state_sharding,
        outfeed_loss=outfeed_loss,
        outfeed_mask=outfeed_mask,
        accumulate_outfeed=accumulate_outfeed,
        accumulate_outfeed_dtype=accumulate_outfeed_dtype,
        replicas=read_replicas(replicas),
        strict=strict,
    )
    return Pipeline(make_spec(request))
