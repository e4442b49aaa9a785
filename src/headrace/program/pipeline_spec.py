"""The specification of a pipeline: a request, checked and traced through all stages before anything runs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.tree import PyTree
from headrace.engine.accumulation import AccumulatorType, empty_sums, widened
from headrace.engine.devices import replica_mesh, start_devices
from headrace.engine.placement import Placement
from headrace.engine.visible import count_replicas
from headrace.job import current_group
from headrace.plan.device_mapping import check_device_mapping
from headrace.plan.schedule import Node, Work, strict_rule
from headrace.plan.simulation import make_table
from headrace.plan.timeline import Timetable
from headrace.program.gradients import accumulates, offloads
from headrace.program.pipeline_request import PipelineRequest, check_values, leaving_values, run_constants
from headrace.program.stage import Function, OptimizerOutput, check_stages, make_functions
from headrace.program.structure import Structure, can_take, describe_call, element_arguments, structure_of


@dataclass(frozen=True, kw_only=True)
class TracedNode:
    """A stage, or one function of a concurrent stage: its function and devices, and its inputs and outputs."""

    function: Function
    mesh: Mesh
    inputs: Structure  # (args, kwargs)
    outputs: Structure  # a tuple


@dataclass(frozen=True, kw_only=True)
class PipelineEnding:
    """What comes after the last stage in training."""

    optimizer: Callable[..., Any]  # of the run's arguments
    loss: Structure
    arguments: Structure
    finish: Callable[..., OptimizerOutput]  # the user's optimizer function
    apart: bool  # every stage's weights are updated by themselves

    def blank_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer for arguments of zeros, to see what it does with weights."""
        return self.optimizer(*jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), self.arguments.shapes()))

    def loss_and_arguments(self, *outputs: PyTree) -> tuple[PyTree, PyTree]:
        """Return the loss of a micro batch and the optimizer's arguments."""
        result = self.finish(*outputs)
        return jnp.asarray(result.loss), jax.tree.map(jnp.asarray, result.arguments)


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """A checked pipeline: nodes with their structures, the schedule, the optimizer, and the outfeed's rows."""

    request: PipelineRequest
    table: Timetable
    functions: dict[Node, Function]
    nodes: dict[Node, TracedNode]
    inputs: tuple[Any, ...]  # run constants, host arrays
    ending: PipelineEnding | None  # None in inference
    placement: Placement  # of the optimizer's state
    leaving: Structure  # the structure of one row of the outfeed
    nested: tuple[tuple[Node, ...] | Node, ...]  # nodes, nested as the stages were given

    @property
    def work(self) -> Work:
        """The work that the schedule arranges in one step."""
        return self.table.work

    @property
    def params(self) -> dict[int, PyTree]:
        """The initial weights, host arrays by their number."""
        return {function.weights: function.params for function in self.functions.values()}

    def nodes_of(self, weights: int) -> list[Node]:
        """Return the nodes that share these weights."""
        return [node for node, function in self.functions.items() if function.weights == weights]


def make_spec(request: PipelineRequest) -> PipelineSpec:
    """Check the request and trace every stage; refuse what cannot work."""
    stages = check_stages(request.stages)
    check_values(request)
    branches = [len(entry) if isinstance(entry, tuple) else None for entry in stages]
    training = request.optimizer_function is not None
    try:
        # The check is that of the command line, whose messages name its option.
        mapping = check_device_mapping(request.device_mapping, len(stages), branches)
    except ConfigError as error:
        raise _renamed(error, "--device-mapping", "device_mapping") from None
    work = Work(mapping, request.gradient_accumulation_count, training)
    table = make_table(request.pipeline_schedule, work)
    if request.strict and (
        broken := strict_rule(
            request.pipeline_schedule, work.num_stages, work.num_micros, training=training, device_mapping=mapping
        )
    ):
        raise _renamed(ConfigError(broken), "--strict-pipeline", "strict=True")
    functions = make_functions(stages, work)
    num_processes = current_group().num_processes  # jax.process_count() would start the devices: too early
    replicas = count_replicas(request.replicas, work.num_devices, num_processes)
    request = replace(request, replicas=replicas)
    if replicas % num_processes:
        raise ConfigError(
            f"replicas is {replicas}, but there are {num_processes} processes.",
            rule="Every process has the same number of replicas, with all devices of their stages.",
            remedy=f"Give a multiple of {num_processes}.",
        )
    devices = start_devices("auto", replicas * work.num_devices, num_processes)
    grid = np.array(devices).reshape(replicas, work.num_devices)
    meshes = {node: replica_mesh(list(grid[:, device])) for node, device in work.device_of.items()}
    inputs = run_constants(request.inputs)
    nodes = _trace_stages(request, work, functions, meshes, inputs)
    ending = _trace_loss(request, work, nodes)
    leaving = leaving_values(request, [nodes[node].outputs for node in work.stages[-1]], ending and ending.loss)
    placement = Placement(
        in_host_memory=training and offloads(request.offload_weight_update_variables, work.num_micros, devices[0]),
        sharded=request.replicated_optimizer_state_sharding,
    )
    return PipelineSpec(
        request=request,
        table=table,
        functions=functions,
        nodes=nodes,
        inputs=inputs,
        ending=ending,
        placement=placement,
        leaving=leaving,
        nested=tuple(
            nodes if isinstance(entry, tuple) else nodes[0] for nodes, entry in zip(work.stages, stages, strict=True)
        ),
    )


def _renamed(error: ConfigError, option: str, name: str) -> ConfigError:
    problem, rule, remedy = (part.replace(option, name) for part in (error.problem, error.rule, error.remedy))
    return ConfigError(problem, rule=rule, remedy=remedy)


def _trace_stages(
    request: PipelineRequest,
    work: Work,
    functions: dict[Node, Function],
    meshes: dict[Node, Mesh],
    inputs: tuple[object, ...],
) -> dict[Node, TracedNode]:
    """Follow the shapes from the first stage to the last."""
    element = () if request.infeed is None else request.infeed.structure.shapes()
    more, kwargs = ((), {}) if request.infeed is None else element_arguments(element)
    given = ((*(structure_of(value).shapes() for value in inputs), *more), kwargs)
    nodes: dict[Node, TracedNode] = {}
    for stage in work.stages:
        for node in stage:
            nodes[node] = TracedNode(
                function=functions[node],
                mesh=meshes[node],
                inputs=structure_of(given),
                outputs=_trace(functions[node], meshes[node], given),
            )
        given = (tuple(value for node in stage for value in nodes[node].outputs.shapes()), {})
    return nodes


def _trace(function: Function, mesh: Mesh, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Structure:
    args, kwargs = given
    if not can_take(function.apply, function.signature(args), kwargs):
        held = "" if function.is_plain else " after its params and state" if function.has_state else " after its params"
        raise ConfigError(
            f"{function.name} cannot be called with {describe_call(args, kwargs)}{held}.",
            rule="The first stage takes the inputs, then the infeed's element; each next one takes the outputs of the "
            "stage before, those of concurrent functions one after the other.",
            remedy="Thread what a later stage needs through all stages before it.",
        )

    def run(params: PyTree, state: PyTree, args: Any, kwargs: Any) -> Any:
        return jax.tree.map(jnp.asarray, function.call(params, state, args, kwargs)[0])

    try:
        outputs = jax.eval_shape(_everywhere(run, mesh), function.params, function.state, args, kwargs)
    except Exception as error:
        error.add_note(f"while tracing {function.name} of the pipeline with {structure_of((args, kwargs))}")
        raise
    return structure_of(outputs)


def _trace_loss(request: PipelineRequest, work: Work, nodes: dict[Node, TracedNode]) -> PipelineEnding | None:
    """Trace the optimizer function on the last stage's outputs; return None in inference."""
    function = request.optimizer_function
    if function is None:
        return None
    found: list[OptimizerOutput] = []

    def run(outputs: PyTree) -> Any:
        result = check_output(function(*outputs))
        found.append(result)
        return jax.tree.map(jnp.asarray, (result.loss, result.arguments))

    mesh = nodes[work.stages[-1][0]].mesh
    outputs = tuple(value for node in work.stages[-1] for value in nodes[node].outputs.shapes())
    loss, arguments = map(structure_of, jax.eval_shape(_everywhere(run, mesh), outputs))
    chosen = found[-1].optimizer
    ending = PipelineEnding(
        optimizer=chosen if found[-1].arguments else lambda: chosen,
        loss=loss,
        arguments=arguments,
        finish=function,
        apart=found[-1].apart,
    )
    _check_optimizer(ending, mesh, nodes, request.gradient_accumulation_dtype)
    return ending


def _everywhere(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Return the function inside a mesh, so that exchanges between replicas can be traced."""
    return jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def check_output(result: object) -> OptimizerOutput:
    """Check what an optimizer function returned."""
    if not isinstance(result, OptimizerOutput):
        raise ConfigError(
            f"optimizer_function returned a {type(result).__name__}.",
            rule="It returns headrace.OptimizerOutput(optimizer, loss).",
        )
    made = isinstance(result.optimizer, optax.GradientTransformation)
    if not (callable(result.optimizer) if result.arguments else made):
        raise ConfigError(
            f"The optimizer of the pipeline is of type {type(result.optimizer).__name__}.",
            rule="It is an optax transformation; with arguments, a function of them that returns one.",
        )
    if not isinstance(result.apart, bool):
        raise ConfigError(
            f"apart is {result.apart!r}.",
            rule="It is True (every stage updates its own weights) or False (all weights are updated together).",
        )
    try:
        loss = jnp.asarray(result.loss)
    except TypeError:
        raise ConfigError(
            f"The loss of the pipeline is of type {type(result.loss).__name__}.", rule="It is one number."
        ) from None
    if loss.shape or not jnp.issubdtype(loss.dtype, np.floating):
        raise ConfigError(
            f"The loss of the pipeline is {structure_of(loss)}.",
            rule="It is one floating-point number per micro batch.",
            remedy="Take the mean over the samples.",
        )
    return result


def _check_optimizer(ending: PipelineEnding, mesh: Mesh, nodes: dict[Node, TracedNode], dtype: AccumulatorType) -> None:
    weights = {node.function.weights: node.function.params for node in nodes.values()}
    params = {key: tree for key, tree in sorted(weights.items()) if jax.tree.leaves(tree)}
    # As the update will call it: sums and weights of 16 bits are widened.
    gradients = jax.eval_shape(lambda: widened(empty_sums(params, dtype, "gradient_accumulation_dtype")))
    params = jax.eval_shape(lambda: widened(jax.tree.map(jnp.asarray, params)))

    def once(gradients: PyTree, params: PyTree, arguments: PyTree) -> PyTree:
        made = ending.optimizer(*arguments)
        if not isinstance(made, optax.GradientTransformation):
            raise ConfigError(
                f"The optimizer of the pipeline, called with its arguments, is of type {type(made).__name__}.",
                rule="It returns an optax transformation.",
            )
        state = made.init(params)
        return made.update(gradients, state, params)

    for group in _grouped(list(params), ending.apart) or [()]:
        given = [{key: tree[key] for key in group} for tree in (gradients, params)]
        try:
            traced = jax.make_jaxpr(_everywhere(once, mesh), return_shape=True)(*given, ending.arguments.shapes())
        except HeadraceError:
            raise
        except Exception as error:
            whose = "the weights of one stage" if ending.apart else "the weights of all stages together"
            other = "" if ending.apart else "; OptimizerOutput(..., apart=True) gives it those of one stage at a time"
            error.add_note(f"while tracing the optimizer of the pipeline with {whose}{other}")
            raise
        _check_traced(*traced)


def _check_traced(closed: ClosedJaxpr, result: PyTree) -> None:
    if any(isinstance(value, Tracer) for value in closed.consts):
        raise ConfigError(
            "The optimizer holds values that came through the stages.",
            rule="It is applied at the end of a step, so such values are passed as arguments.",
            remedy="Write OptimizerOutput(optax.sgd, loss, arguments=(rate,)).",
        )
    if accumulates(result):
        raise ConfigError(
            "The optimizer of the pipeline accumulates gradients.",
            rule="A pipeline accumulates them itself, over gradient_accumulation_count micro batches.",
            remedy="Give the optimizer without accumulate_gradients() or optax.MultiSteps.",
        )


def update_groups(spec: PipelineSpec) -> list[tuple[int, ...]]:
    """Return which weights are updated together: all, or those of each stage where the user says so."""
    if spec.ending is None:
        return []
    return _grouped([key for key, tree in sorted(spec.params.items()) if jax.tree.leaves(tree)], spec.ending.apart)


def _grouped(keys: list[int], apart: bool) -> list[tuple[int, ...]]:
    # Together unless the user says otherwise: whether an optimizer combines gradients (a global norm, a step skipped
    # because one is not finite) cannot be read from a function, and updating such a one apart is wrong in silence.
    return [(key,) for key in keys] if apart or not keys else [tuple(keys)]
