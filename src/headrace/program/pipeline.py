"""`pipeline()`: any functions as stages on several devices, trained or only run, in the order of a schedule.

The host dispatches the programs of the stages in the order of the schedule's table; the devices overlap because JAX
does not wait for them. Weights, the optimizer's state and other state live in a PipelineState that a run takes and
returns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from headrace.core.errors import ConfigError
from headrace.engine.devices import replicated
from headrace.engine.pipeline.schedule_runner import Walk
from headrace.engine.pipeline.state_placement import HOST_MEMORY
from headrace.plan.schedule import Node, find_schedule
from headrace.plan.table import Table
from headrace.plan.timeline_text import draw_timeline
from headrace.program.gradients import AccumulatorType, empty_sums
from headrace.program.infeed import Infeed
from headrace.program.node_programs import make_node, make_update
from headrace.program.outfeed import Outfeed
from headrace.program.pipeline_request import Request, run_constants
from headrace.program.pipeline_spec import PipelineSpec, make_spec, mixes
from headrace.program.pipeline_step import Programs, Step, make_programs, put
from headrace.program.stage import OptimizerOutput
from headrace.program.structure import difference, structure_of


@dataclass(frozen=True, kw_only=True)
class PipelineState:
    """What a pipeline carries from run to run. A run returns a new one and leaves the old one as it is."""

    spec: PipelineSpec
    weights: dict[int, Any]  # by the number of the weights
    optimizer: tuple[Any, ...]  # the optimizer's state, one for each group of weights that are updated together
    others: dict[Node, Any]  # what is not trained, [replicas, ...]

    @property
    def params(self) -> list[Any]:
        """The weights of the stages, nested as the stages were given."""
        return self._nested(lambda node: self.weights[self.spec.functions[node].weights])

    @property
    def state(self) -> list[Any]:
        """What the stages carry untrained, nested as the stages were given."""
        return self._nested(lambda node: jax.tree.map(lambda a: np.asarray(a)[0], self.others[node]))

    def _nested(self, of: Callable[[Node], Any]) -> list[Any]:
        return [of(entry) if isinstance(entry, Node) else [of(node) for node in entry] for entry in self.spec.nested]


class Pipeline:
    """A pipeline that can run. `init()` returns its state at the start, a call runs it once."""

    def __init__(self, spec: PipelineSpec) -> None:
        self.spec = spec
        self._programs: Programs = make_programs(spec, {node: make_node(mine) for node, mine in spec.nodes.items()})
        self._actions = [action for _, action in spec.table.in_order()]
        self._groups = _update_groups(spec)
        self._updates = [
            make_update(
                self._mesh_of(group[0]),
                spec.ending.optimizer,
                in_host_memory=bool(spec.request.offload_weight_update_variables),
            )
            for group in self._groups
            if spec.ending is not None
        ]
        self.peaks: dict[Node, int] = {}  # micro batches that each node really held at once, in the latest step

    @property
    def table(self) -> Table:
        """The schedule: every action with its device, start and end."""
        return self.spec.table

    def draw(self) -> str:
        """Return the schedule as a picture of text."""
        return draw_timeline(self.table, find_schedule(self.spec.request.pipeline_schedule).name)

    def init(self) -> PipelineState:
        """Return the state at the start: the weights as they were given, on their devices."""
        functions = self.spec.functions
        weights = {
            function.weights: jax.device_put(function.params, replicated(self.spec.nodes[node].mesh))
            for node, function in functions.items()
        }
        others = {node: self._replicate(function.state, node) for node, function in functions.items()}
        return PipelineState(spec=self.spec, weights=weights, optimizer=self._init_optimizer(weights), others=others)

    def __call__(self, state: PipelineState, inputs: Sequence[Any] | None = None) -> PipelineState:
        """Run `repeat_count` steps; `inputs` take the place of those that the pipeline was made with.

        The results may still be under way; reading them waits.
        """
        spec, request = self.spec, self.spec.request
        if not isinstance(state, PipelineState) or state.spec is not spec:
            raise ConfigError("The state is not one of this pipeline.", remedy="Start with pipeline.init().")
        constants = spec.inputs if inputs is None else self._same_inputs(inputs)
        first = {node: self._replicate(jax.tree.leaves(constants), node) for node in spec.work.stages[0]}
        if request.outfeed is not None:
            request.outfeed.begin(spec.leaving, request.replicas)
        try:
            before = None
            for number in range(request.repeat_count):
                state, latest = self._step(state, first, number)
                jax.block_until_ready(before)  # at most two steps under way: more would only hold more elements
                before = latest
        finally:
            if request.outfeed is not None:
                request.outfeed.finish()
        return state

    def _step(self, state: PipelineState, first: dict[Node, Any], number: int) -> tuple[PipelineState, Any]:
        spec, request = self.spec, self.spec.request
        count = spec.work.num_micros * request.replicas
        elements = [] if request.infeed is None else request.infeed.take_all(count, "a step of the pipeline")
        step = Step(
            programs=self._programs,
            params=state.weights,
            states=dict(state.others),
            first_leaves=first,
            elements=elements,
            first_row=number * (1 if request.accumulate_outfeed else spec.work.num_micros),
        ).start()
        self.peaks = Walk(work=spec.work, programs=step).run(self._actions).peaks
        weights, optimizer = self._update(state, step)
        others = {
            node: self._programs.nodes[node].settle(other) if jax.tree.leaves(other) else other
            for node, other in step.states.items()
        }
        state = PipelineState(spec=spec, weights=weights, optimizer=optimizer, others=others)
        return state, step.latest

    def _update(self, state: PipelineState, step: Step) -> tuple[dict[int, Any], tuple[Any, ...]]:
        """Update the weights, group by group, each where the first of the group lives."""
        weights, optimizer = dict(state.weights), list(state.optimizer)
        for number, (group, update) in enumerate(zip(self._groups, self._updates, strict=False)):
            mesh = self._mesh_of(group[0])
            sums = {key: [put(step.sums[node], mesh) for node in self._nodes_of(key)] for key in group}
            params = {key: jax.device_put(state.weights[key], replicated(mesh)) for key in group}
            updated, optimizer[number] = update(params, optimizer[number], sums, put(step.arguments, mesh))
            for key in group:
                weights[key] = jax.device_put(updated[key], replicated(self._mesh_of(key)))
        return weights, tuple(optimizer)

    def _init_optimizer(self, weights: dict[int, Any]) -> tuple[Any, ...]:
        ending = self.spec.ending
        if ending is None:
            return ()
        arguments = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), ending.arguments.shapes())
        states = []
        for group in self._groups:
            mesh = self._mesh_of(group[0])
            where = replicated(mesh)
            if self.spec.request.offload_weight_update_variables:
                where = where.with_memory_kind(HOST_MEMORY)
            make = jax.jit(lambda params: ending.optimizer(*arguments).init(params), out_shardings=where)
            states.append(make({key: jax.device_put(weights[key], replicated(mesh)) for key in group}))
        return tuple(states)

    def _nodes_of(self, key: int) -> list[Node]:
        return [node for node, function in self.spec.functions.items() if function.weights == key]

    def _mesh_of(self, key: int) -> Any:
        return self.spec.nodes[self._nodes_of(key)[0]].mesh

    def _replicate(self, tree: Any, node: Node) -> Any:
        """Put a copy of host arrays on every replica of a node, as [replicas, ...]."""
        replicas = self.spec.request.replicas
        return put(
            jax.tree.map(lambda a: np.broadcast_to(a, (replicas, *a.shape)).copy(), tree), self.spec.nodes[node].mesh
        )

    def _same_inputs(self, inputs: Any) -> tuple[Any, ...]:
        constants = run_constants(inputs)
        if words := difference(structure_of(self.spec.inputs), structure_of(constants)):
            raise ConfigError(
                f"What is given to this run {words}.", rule="The inputs of a run are as those it was made with."
            )
        return constants


def _update_groups(spec: PipelineSpec) -> list[tuple[int, ...]]:
    """Return which weights are updated together: each by itself, or all if the optimizer looks at all of them."""
    if spec.ending is None:
        return []
    params = {function.weights: function.params for function in spec.functions.values()}
    params = {key: tree for key, tree in sorted(params.items()) if jax.tree.leaves(tree)}
    arguments = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), spec.ending.arguments.shapes())
    dtype = spec.request.gradient_accumulation_dtype
    sums = jax.eval_shape(lambda: empty_sums(params, dtype, "gradient_accumulation_dtype"))
    if len(params) > 1 and mixes(spec.ending.optimizer(*arguments), params, sums):
        return [tuple(params)]
    return [(key,) for key in params]


def pipeline(
    stages: Sequence[Any],
    gradient_accumulation_count: int,
    *,
    optimizer_function: Callable[..., OptimizerOutput] | None = None,
    device_mapping: Sequence[int | Sequence[int]] | None = None,
    pipeline_schedule: str = "Grouped",
    inputs: Sequence[Any] | None = None,
    infeed: Infeed | None = None,
    outfeed: Outfeed | None = None,
    repeat_count: int = 1,
    gradient_accumulation_dtype: AccumulatorType = None,
    reduction_method: str = "SUM",
    recomputation: bool = False,
    offload_weight_update_variables: bool | None = None,
    outfeed_loss: bool = False,
    outfeed_mask: Sequence[bool] | None = None,
    accumulate_outfeed: bool = False,
    accumulate_outfeed_dtype: AccumulatorType = None,
    replicas: int = 1,
    strict: bool = False,
) -> Pipeline:
    """Make a pipeline of stages; nothing runs yet, but all that can be wrong is refused.

    Args:
        stages: two or more of: a function of its inputs, `Stage(function, params)`, or a list of these that run side by
            side on the same inputs. The first takes `inputs` and the infeed's element, others the outputs before.
        gradient_accumulation_count: micro batches per step; the weights change once, at its end.
        optimizer_function: takes the last stage's outputs, returns OptimizerOutput(optimizer, loss). None: inference.
        device_mapping: the device of each stage, a list for concurrent ones. None: each function its own.
        pipeline_schedule: Grouped, Interleaved, Sequential or GPipe. All give the same bits.
        inputs: values that are the same for all micro batches of a run.
        infeed: gives every replica an element for each micro batch.
        outfeed: takes the last stage's outputs, one row for each micro batch.
        repeat_count: steps of one run.
        gradient_accumulation_dtype: None for the weight's own, a type, or a function of the weight.
        reduction_method: SUM, MEAN or RUNNING_MEAN of the micro batches' gradients. Over replicas it is the mean.
        recomputation: keep only a stage's inputs (and what recomputation_checkpoint marks) for its backward pass.
        offload_weight_update_variables: keep the optimizer's state in host memory between updates.
        outfeed_loss: let the loss leave in place of the outputs.
        outfeed_mask: for each output whether it is left out.
        accumulate_outfeed: let one sum over the micro batches leave per step, in accumulate_outfeed_dtype.
        replicas: copies of the whole pipeline, each on devices of its own.
        strict: also refuse what the original hardware could not do.
    """
    asked = dict(locals())
    return Pipeline(make_spec(Request(**asked)))
