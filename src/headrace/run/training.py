"""The training side of a run on its devices: the feed, the compiled call program, and the calls one after the other."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from headrace.config.schema import Learning, PipelineSection
from headrace.core.process import keep_freed_memory
from headrace.core.tree import PyTree
from headrace.data.dataset import DataSet
from headrace.data.feeding.balance import class_weights
from headrace.data.feeding.block_reader import FeedOptions
from headrace.data.feeding.feed import CallSpans, TrainFeed
from headrace.data.feeding.fetch import FetchSamples
from headrace.data.feeding.order import StepShape
from headrace.data.feeding.prefetch import GROWTH
from headrace.data.feeding.shard import WHOLE, ProcessShard
from headrace.engine.call_loop import OnOneMesh, make_call
from headrace.engine.compiler import compiler_options
from headrace.engine.devices import CompileCounts, count_compilations, replica_mesh, replicated, take
from headrace.engine.lr_curve import rate_table
from headrace.engine.multiprocess_arrays import place
from headrace.engine.objective import Objective
from headrace.engine.pipeline.dispatch import make_dispatcher
from headrace.engine.pipeline.training_stages import StageSpec
from headrace.engine.placement import Placement, host_memory_of
from headrace.engine.state import State, put_state, snapshot
from headrace.engine.step import Metrics, StepSpec, make_step, with_packing, without_values_of
from headrace.engine.stored_programs import Draft, ProgramRequest
from headrace.plan.image_sizes import SizeSpan
from headrace.plan.plan import Plan
from headrace.run.custom_functions import by_sample
from headrace.run.design import Design

# The state between calls, on the devices as an executor keeps it: cut by stages where there are any.
Placed = PyTree
# (state, resident set, block, the rows of it to run) -> (state, metrics of all rows)
Call = Callable[[Placed, PyTree, PyTree, range], tuple[Placed, Metrics]]


class Executor(Protocol):
    """Runs training calls `(state, resident, block) -> (state, metrics)`: a device loop, or a pipeline's dispatcher."""

    @property
    def meshes(self) -> Sequence[Mesh]:
        """The groups of devices that communicate."""
        ...

    def put(self, tree: PyTree, kind: str) -> PyTree:
        """Put a block (`steps`) or a resident set (`replicated`) on the devices."""
        ...

    def place(self, state: State) -> Placed:
        """Put a state in host memory on the devices."""
        ...

    def join(self, state: Placed, /) -> State:
        """Return the same arrays as one state."""
        ...

    def copy_to_save(self, state: Placed, /) -> State:
        """Copy a state so that it outlives the next call and this process can read it whole."""
        ...

    def compile(self, state: Placed, /, resident: PyTree, block: PyTree) -> Call:
        """Return the call's program `(state, resident, block, rows)`, compiled; the state is left as it is."""
        ...


@dataclass(frozen=True)
class DeviceLoop(OnOneMesh):
    """One stage: K steps in one device program."""

    spec: StepSpec

    def place(self, state: State) -> State:
        """Put a state on every device."""
        return put_state(state, self.mesh)

    def join(self, state: State) -> State:
        """Return the state, which is never cut."""
        return state

    def copy_to_save(self, state: State) -> State:
        """Copy a state: it is whole on every device."""
        return snapshot(state)

    def compile(self, state: State, resident: PyTree, block: PyTree) -> "CallProgram":
        """Compile the call ahead of its first use."""
        return self.trace(state, resident, block).compile()

    def trace(self, state: State, resident: PyTree, block: PyTree) -> "TracedCall":
        """Make XLA's input from Python, or find the program. Only shapes matter: the state may be in host memory."""
        keep_freed_memory(keep=False)  # after an inference of this process
        begin = time.perf_counter()
        request = self._request(state, resident, block)
        return TracedCall(request.prepare(), replicated(self.mesh), begin)

    def lower(self, state: State, resident: PyTree, block: PyTree) -> jax.stages.Lowered:
        """Make XLA's input from Python, for devices that need not be here."""
        return self._request(state, resident, block).lower()

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's options."""
        return dict(self.spec.compiler_options)

    def _request(self, state: State, resident: PyTree, block: PyTree) -> ProgramRequest:
        whole = replicated(self.mesh)
        # Only here, where whole steps are one program: stages of a pipeline have their own parts of the state.
        spec = without_values_of(block, with_packing(self.spec, state))
        # Which rows to run is an array, not Python numbers: a call of other rows then needs no other program.
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state, _ends(range(1))))
        state, ends = place(shapes, whole)
        return ProgramRequest(
            make=_make_call,
            spec=spec,
            mesh=self.mesh,
            more=(tuple(block),),
            arguments=(state, resident, block, ends),
            options=self.options,
            storable=not spec.streams,
        )


@dataclass(frozen=True)
class TracedCall:
    """A device loop that is still to be compiled or loaded."""

    draft: Draft
    where: NamedSharding
    began: float  # on the performance counter

    def compile(self) -> "CallProgram":
        """Return the program; its devices must have started."""
        programs = self.draft.compile()
        (program,) = programs.compiled
        return CallProgram(program, self.where, programs.trace_seconds)


def _make_call(spec: StepSpec, mesh: Mesh, names: tuple[str, ...]) -> Any:
    return make_call(make_step(spec), mesh, names, spec.packing, streams=spec.streams)


def _ends(rows: range) -> np.ndarray:
    return np.array([rows.start, rows.stop], np.int32)  # one array: each is sent by itself


@dataclass(frozen=True)
class CallProgram:
    """A compiled device loop; the ends of the rows are put where it needs them."""

    program: jax.stages.Compiled
    where: NamedSharding
    trace_seconds: float = 0.0  # of making XLA's input from Python; 0 if it was found

    def __call__(self, state: State, resident: PyTree, block: PyTree, rows: range) -> tuple[State, Metrics]:
        """Run the steps of these rows of a block; the state is donated."""
        return self.program(state, resident, block, place(_ends(rows), self.where))

    def memory_analysis(self) -> Any:
        """Return what XLA says of the program's memory."""
        return self.program.memory_analysis()


def make_executor(plan: Plan, spec: StepSpec, devices: list[Any], wanted: PipelineSection) -> Executor:
    """Return the executor of a plan's calls, on the first devices of the list."""
    replicas, pipeline = plan.batch.num_replicas, plan.pipeline
    # Stages that share one device have nothing to overlap: as one program they need no launches between them.
    if pipeline is None or plan.one_program:
        return DeviceLoop(replica_mesh(take(devices, replicas)), spec)
    grid = np.array(take(devices, replicas * pipeline.num_devices)).reshape(replicas, pipeline.num_devices)
    placement = Placement(
        # Some backends cannot address host memory from a program; the run then says so and keeps the state on the
        # devices.
        in_host_memory=wanted.optimizer_state_offloading and host_memory_of(devices[0]),
        sharded=wanted.replicated_optimizer_state_sharding,
    )
    stages = [
        StageSpec(
            step=spec,
            blocks=(stage.first, stage.end),
            recompute=wanted.recomputation,
            placement=placement,
        )
        for stage in pipeline.stages
    ]
    return make_dispatcher(stages, grid, pipeline.table)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program, ready to run, and how long compiling it took."""

    program: Any
    began: float  # on the performance counter
    seconds: float
    trace_seconds: float  # part of it; 0 where it is not known
    counts: CompileCounts
    device_bytes: int  # arguments, outputs and temporaries of one device, as XLA reports them


def step_spec(design: Design, options: FeedOptions, dataset: DataSet) -> StepSpec:
    """Return what the step of this design needs; of the dataset only the labels matter, for the class weights."""
    config, batch, custom = design.config, design.plan.batch, design.custom
    weights = class_weights(config.learning.class_weights, dataset.train.labels, design.info.num_classes)
    smoothing = smoothing_over_all(config.learning, design.info.num_classes)
    # The block brings the seed: with it in the specification, every seed would have a program of its own.
    preprocess = options.preprocess.with_seed(0)
    if custom.augment is not None:
        preprocess = replace(preprocess, augment=by_sample(custom.augment, config.run.seed))
    return StepSpec(
        network=design.network,
        optimizer=design.optimizer,
        precision=design.precision,
        loss_scaling=design.loss_scaling,
        fp_exceptions=config.numerics.fp_exceptions,
        fetch=FetchSamples(preprocess, train=True),
        num_replicas=batch.num_replicas,
        gradient_accumulation_count=batch.gradient_accumulation_count,
        seed=config.run.seed,
        objective=Objective(label_smoothing=smoothing, class_weights=weights, custom=design.objective),
        stable_norm=config.model.stable_norm,
        norm_group_size=config.model.dbn_replica_group_size,
        bn_momentum=config.model.bn_momentum,
        bn_momentum_start=config.model.bn_momentum_start,
        ema_decay=config.learning.ema_decay,
        recompute_points=design.plan.recompute_points,
        cpu_kernels=config.compiler.cpu_kernels,
        histograms=config.logging.histograms,
        streams=config.batch.stream_results,
        compiler_options=tuple(compiler_options(design.compiler, exchanging=exchanges_early(design)).items()),
    )


def exchanges_early(design: Design) -> bool:
    """Say whether replicas exchange gradients in the program of whole steps, as the backward pass makes them."""
    batch = design.plan.batch
    return batch.num_replicas > 1 and batch.gradient_accumulation_count == 1 and design.plan.whole_steps


def smoothing_over_all(learning: Learning, num_classes: int) -> float:
    """Return the smoothing that, spread over all C classes, is the one asked for: s / (C - 1) each is s' / C."""
    others = learning.label_smoothing_classes == "others" and num_classes > 1
    # The target is the same, 1 - s for the label, so that one formula of the loss serves both.
    return learning.label_smoothing * (num_classes / (num_classes - 1) if others else 1.0)


def process_shard(plan: Plan) -> ProcessShard:
    """Return this process's share of every batch; its devices must have been started."""
    return (
        ProcessShard(process=jax.process_index(), num_processes=plan.num_processes) if plan.num_processes > 1 else WHOLE
    )


# A block is read in at most about the time of so many of the longest calls: a run that waits for its images still shows
# progress and obeys signals. On an H200 with 16 cores a full block of 18 steps is read in 0.5 s.
_CALLS_PER_BLOCK = 4


def open_feed(
    design: Design, dataset: DataSet, options: FeedOptions, executor: Executor, first_step: int, limit: int = 0
) -> TrainFeed:
    """Return the feed that starts at `first_step`, with first calls of at most `limit` steps.

    0: calls, and blocks, are as long as they may be.
    """
    config, batch, steps = design.config, design.plan.batch, design.plan.steps
    shape = StepShape(
        seed=config.run.seed,
        num_samples=len(dataset.train),
        shuffle=config.data.shuffle,
        updates_per_epoch=steps.updates_per_epoch,
        gradient_accumulation_count=batch.gradient_accumulation_count,
        num_replicas=batch.num_replicas,
        micro_batch_size=batch.micro_batch_size,
        balanced=config.data.balanced_sampling,
        repeats=config.data.repeated_augmentation,
    )
    epochs_end_calls = design.callbacks().wait_for_epochs

    def next_size(step: int) -> int:
        # Each size of images has a program of its own.
        return min([span.first_step for span in design.sizes if span.first_step > step], default=steps.total_steps)

    def next_end(step: int) -> int:
        epoch_ends = [step + steps.updates_per_epoch - step % steps.updates_per_epoch] if epochs_end_calls else []
        # A call ends where something is due, and where a callback decides.
        return min([steps.next_event(step), *epoch_ends, next_size(step)])

    # The limit is for the first calls only; `CallLength` changes it once a step was measured.
    calls = CallSpans(
        first_step=first_step,
        last_step=steps.total_steps,
        max_steps=steps.steps_per_call,
        next_end=next_end,
        # Blocks of indices cost nothing, and end where a call must: one that begins between two events, in a resumed
        # run, would else make two calls of each.
        block_end=next_end if options.cache.where == "device" else next_size,
        limit=limit,
        block_seconds=_CALLS_PER_BLOCK * config.batch.call_seconds if limit and design.plan.num_processes == 1 else 0.0,
        rates=_rates_of(design),
    )
    return TrainFeed(dataset.train, shape, calls, replace(options, shard=process_shard(design.plan)), executor.put)


def _rates_of(design: Design) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the rates of steps that blocks bring, if they do."""
    # Processes on unlike processors might round a rate differently; their devices, which are alike, do not. With a time
    # budget the first one tells them.
    alone = design.plan.num_processes == 1 or design.config.run.time_budget is not None
    return rate_table(design.lr_curve) if alone else None


@dataclass
class CallLength:
    """How many steps a call has, so that it lasts at most about `seconds`: measured during the run.

    Between two calls the progress moves, and a signal is obeyed. 0 seconds: as many as fit.
    """

    seconds: float
    most: int
    steps: int = 0

    def __post_init__(self) -> None:
        # Nothing is known of the speed yet, and a first call of the full length could take minutes without a sign of
        # life.
        self.steps = 1 if self.seconds else self.most

    def update(self, step_seconds: float | None) -> int:
        """Return the length of calls to come after a step was measured to take so long."""
        if self.seconds and step_seconds:
            # Calls may shrink at once but grow by steps: a first measurement that is far too fast would make a call of
            # minutes.
            self.steps = max(1, min(int(self.seconds / step_seconds), GROWTH * self.steps, self.most))
        return self.steps


def compile_call(executor: Executor, state: Placed, resident: PyTree, block: dict[str, Any]) -> Compiled:
    """Compile the call program ahead of its first use, so that compile time is kept apart from training time."""
    return compiled_from(lambda: executor.compile(state, resident, block))


def compiled_from(build: Callable[[], Any], began: float | None = None) -> Compiled:
    """Return the program that `build` compiles, with the time and memory it takes; tracing may have begun before."""
    begin = time.perf_counter() if began is None else began
    with count_compilations() as counts:
        program = build()
    memory = program.memory_analysis() if hasattr(program, "memory_analysis") else None  # a pipeline is many programs
    parts = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    # Donated arguments are outputs as well, and counted twice without the last term. XLA's own peak was wrong on CPUs
    # (0.41 MB with 1.7 MB of temporaries).
    held = sum(getattr(memory, part, 0) for part in parts) - getattr(memory, "alias_size_in_bytes", 0) if memory else 0
    return Compiled(
        program=program,
        began=begin,
        seconds=time.perf_counter() - begin,
        trace_seconds=getattr(program, "trace_seconds", 0.0),
        counts=counts,
        device_bytes=held,
    )


class Calls:
    """The call programs of a run: one for each image size still to come, all on the same devices and state."""

    def __init__(self, design: Design, options: FeedOptions, dataset: DataSet, devices: list[Any], step: int) -> None:
        ends = [span.first_step for span in design.sizes[1:]] + [design.plan.steps.total_steps + 1]
        # Sizes that a resumed run has behind it are not compiled again.
        self._spans = [span for span, end in zip(design.sizes, ends, strict=True) if end > step]
        self._executors = [_executor(design, options, dataset, devices, span) for span in self._spans]
        self._programs: list[Call] = []
        self.executor = self._executors[-1]  # state and blocks are placed alike for all of them

    def compile(
        self, state: Placed, feed: TrainFeed, placed: Callable[[], Placed] | None = None
    ) -> list[tuple[str, Compiled]]:
        """Compile every program ahead of its first call; return their purposes and the results.

        With `placed`, which waits until the devices have the state, `state` is still in host memory: meanwhile whole
        steps are traced.
        """
        described, placed, results = feed.described(), placed or (lambda: state), []
        for span, executor in zip(self._spans, self._executors, strict=True):
            if isinstance(executor, DeviceLoop):
                traced = executor.trace(state, *described)
                placed()
                compiled = compiled_from(traced.compile, traced.began)
            else:
                compiled = compile_call(executor, placed(), *described)
            self._programs.append(compiled.program)
            size = f" at {span.image_hw[0]}x{span.image_hw[1]}" if len(self._spans) > 1 else ""
            results.append((f"training{size}", compiled))
        return results

    def at(self, step: int) -> Call:
        """Return the program of the call that begins after `step` steps."""
        begun = [program for span, program in zip(self._spans, self._programs, strict=True) if span.first_step <= step]
        return begun[-1]


def _executor(design: Design, options: FeedOptions, dataset: DataSet, devices: list[Any], span: SizeSpan) -> Executor:
    """Return the executor of calls on images of one size."""
    network = design.network
    if span.image_hw != network.input_hwc[:2]:
        design = replace(design, network=replace(network, input_hwc=(*span.image_hw, network.input_hwc[2])))
        options = replace(options, preprocess=options.preprocess.at_size(span.image_hw))
    spec = step_spec(design, options, dataset)
    return make_executor(design.plan, spec, devices, design.config.pipeline)
