"""The plan of a run: derived from options, dataset and network, then printed, stored with the run and executed."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from headrace.config.schema import Config
from headrace.core.errors import ConfigError
from headrace.core.units import format_count, parse_bytes
from headrace.data.dataset import DataInfo
from headrace.data.feeding.block_reader import FeedOptions, feed_options
from headrace.data.feeding.cache import CacheChoice
from headrace.data.feeding.eval_feed import EvalCache, plan_eval_cache
from headrace.model.network import Network
from headrace.plan.batch import BatchPlan, ValidationPlan, make_batch_plan, make_validation_plan
from headrace.plan.data_memory import SentData, resident_data, sent_data, with_validation
from headrace.plan.memory import MemoryPlan, estimate_memory
from headrace.plan.pipeline import PipelinePlan, estimate_stage_memory, plan_stages
from headrace.plan.recompute import kept_elements, recompute_points
from headrace.plan.report import (
    PlanLine,
    Section,
    batch_lines,
    event_lines,
    format_pipeline,
    format_sections,
    memory_lines,
    pipeline_lines,
    saving_lines,
    step_lines,
    validation_lines,
)
from headrace.plan.savings import Saving, find_savings
from headrace.plan.steps import (
    CHECKPOINT_SECONDS,
    Events,
    StepPlan,
    frequency,
    make_epoch_plan,
    make_step_plan,
    no_steps,
)


def refuse_split_replicas(config: Config, batch: BatchPlan, validation: ValidationPlan, num_processes: int) -> None:
    """Raise ConfigError if the replicas cannot be divided evenly among the processes."""
    if num_processes < 1:
        raise ConfigError(f"The number of processes is {num_processes}.", rule="There is at least one.")
    counts = [("", batch.num_replicas, config.run.training)]
    counts.append(("validation ", validation.num_replicas, config.validation.validation))
    for kind, replicas, is_used in counts:
        if is_used and replicas % num_processes:
            raise ConfigError(
                f"{replicas} {kind}replicas cannot be divided evenly among {num_processes} processes.",
                rule="Every process owns the same number of whole replicas.",
                remedy=_remedy(f"--{kind.replace(' ', '-')}num-replicas", replicas, num_processes),
            )


def _remedy(option: str, replicas: int, processes: int) -> str:
    """Suggest the next larger number of replicas that works, and numbers of processes that would."""
    fitting = [str(count) for count in range(1, replicas + 1) if replicas % count == 0][-4:]
    more = -(-replicas // processes) * processes
    return f"Give {option} {more}, or start {' or '.join(fitting)} process{'es' * (fitting != ['1'])}."


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All numbers of a run. The rest of the code reads them here and never derives them again."""

    batch: BatchPlan
    steps: StepPlan
    validation: ValidationPlan
    memory_by_device: tuple[MemoryPlan, ...]  # of one replica; replicas are alike
    savings: tuple[Saving, ...]
    pipeline: PipelinePlan | None  # None: there are no stages
    one_program: bool  # a call is one device program; otherwise the host dispatches each stage's passes
    recompute_points: tuple[int, ...]  # blocks whose inputs recomputation keeps
    feed: FeedOptions  # how images reach the devices, in training and in evaluation
    validation_cache: EvalCache  # where validation images are kept
    num_parameters: int
    flops_per_image: int
    image_hwc: tuple[int, int, int]  # of the network's input
    num_processes: int = 1

    @property
    def num_devices(self) -> int:
        """Return how many devices the run needs."""
        return max(self.batch.num_replicas * self.devices_per_replica, self.validation.num_devices)

    @property
    def devices_per_replica(self) -> int:
        """Return how many devices the stages of one replica take."""
        return self.pipeline.num_devices if self.pipeline else 1

    @property
    def whole_steps(self) -> bool:
        """Whether a call is one device program; stages on several devices are launched by the host."""
        return self.pipeline is None or self.one_program

    @property
    def cache(self) -> CacheChoice:
        """Return where the dataset is kept."""
        return self.feed.cache

    @property
    def replicas_per_process(self) -> int:
        """Return how many whole replicas a process owns."""
        return self.batch.num_replicas // self.num_processes

    @property
    def devices_per_process(self) -> int:
        """Return how many devices a process needs."""
        return self.num_devices // self.num_processes

    @property
    def memory(self) -> MemoryPlan:
        """Return the estimate for the fullest device."""
        return max(self.memory_by_device, key=lambda memory: memory.total_bytes)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the user, such as where the plan differs from what was requested."""
        return self.batch.warnings + self.steps.warnings + (self.pipeline.advice if self.pipeline else ())

    def __str__(self) -> str:
        return format_plan(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for the run record and `headrace plan --json`."""
        return {
            "num_devices": self.num_devices,
            "num_processes": self.num_processes,
            "devices_per_process": self.devices_per_process,
            "replicas_per_process": self.replicas_per_process,
            "num_parameters": self.num_parameters,
            "flops_per_image": self.flops_per_image,
            "dataset_cache": self.cache._asdict(),
            "batch": self.batch.to_dict(),
            "steps": self.steps.to_dict(),
            "validation": self.validation.to_dict() | {"cache": self.validation_cache.to_dict()},
            "pipeline": self.pipeline.to_dict() if self.pipeline else None,
            "one_program": self.one_program,
            "memory": self.memory.to_dict(),
            "memory_by_device": [memory.total_bytes for memory in self.memory_by_device],
            "savings": {saving.option: saving.num_bytes for saving in self.savings},
            "warnings": list(self.warnings),
        }


def format_plan(plan: Plan, learning_rates: Iterable[tuple[int, float]] = ()) -> str:
    """Return the whole plan as text: numbers, the learning rate at some steps if given, the stages, and warnings."""
    rates = tuple(PlanLine(f"step {step:,}", f"{rate:.4g}") for step, rate in learning_rates)
    sections = plan_sections(plan) + ((Section("learning rate", rates),) if rates else ())
    pipeline = plan.pipeline if plan.pipeline and plan.pipeline.num_stages > 1 else None
    stages = "\n" + format_pipeline(pipeline, plan.memory_by_device, plan.one_program) if pipeline else ""
    return format_sections(sections) + stages + "".join(f"\nwarning: {sentence}" for sentence in plan.warnings)


def plan_sections(plan: Plan) -> tuple[Section, ...]:
    """Return the plan as titled lines."""
    network = (
        PlanLine("parameters", format_count(plan.num_parameters)),
        PlanLine("image size", "x".join(map(str, plan.image_hwc)), "height, width, channels"),
        PlanLine("forward pass", f"{format_count(plan.flops_per_image, short=True)}FLOP", "per image"),
        PlanLine("devices", format_count(plan.num_devices)),
        *_process_lines(plan),
    )
    sections = [Section("network", network)]
    if plan.pipeline:
        sections.append(Section("pipeline", pipeline_lines(plan.pipeline, plan.one_program)))
    sections.append(Section("batch", batch_lines(plan.batch)))
    if plan.steps.total_steps:
        sections += [Section("steps", step_lines(plan.steps)), Section("events", event_lines(plan.steps))]
    else:
        sections.append(Section("steps", (PlanLine("total steps", "0", "the run does not train"),)))
    return (
        *sections,
        Section("validation", validation_lines(plan.validation, plan.validation_cache)),
        Section(_memory_title(plan), memory_lines(plan.memory, plan.cache.reason)),
        *((Section("possible savings on that device", saving_lines(plan.savings)),) if plan.savings else ()),
    )


def _process_lines(plan: Plan) -> tuple[PlanLine, ...]:
    if plan.num_processes == 1:
        return ()
    detail = f"each with {plan.replicas_per_process} of the replicas on {plan.devices_per_process} of the devices"
    return (PlanLine("processes", format_count(plan.num_processes), detail),)


def _memory_title(plan: Plan) -> str:
    if plan.devices_per_replica == 1:
        return "memory of one device (estimate)"
    return f"memory of device {plan.memory_by_device.index(plan.memory)}, the fullest of a replica (estimate)"


def make_plan(config: Config, info: DataInfo, network: Network, num_processes: int = 1) -> Plan:
    """Derive every number of the run; impossible requests raise ConfigError here, before a device is touched."""
    batch = make_batch_plan(config.batch)
    if config.augment.mixing and batch.micro_batch_size < 2 and config.run.training:
        raise ConfigError(
            f"{config.augment.mixing} with a micro batch of one image.",
            rule="An image is mixed with another one of its micro batch.",
            remedy="Use a larger --batch-size, or leave mixing out.",
        )
    feed = feed_options(config.data, info, config.run.seed, batch.num_replicas, config.augment)
    sent = sent_data(feed, info, batch) if feed.cache.where == "host" else None
    budget = parse_bytes(config.data.dataset_device_budget)
    # A call is no longer than what the budget can hold of the images that are sent for it.
    steps = _steps(config, info, batch, budget // sent.bytes_per_step if sent else None)
    if sent:
        steps = _with_shorter_calls_said(steps, config, feed, sent)
    if config.run.dry_run_steps:
        steps = steps.cut_short(config.run.dry_run_steps)
    data = sent.memory(steps.steps_per_call) if sent else resident_data(config, info, budget)
    wanted = config.pipeline
    points = recompute_points(network, wanted.recomputation_points, wanted.num_stages)
    pipeline = plan_stages(config, batch, network, points)
    cost, one_program = network.total_cost(), wanted.one_program
    # Stages that all share one device need no dispatching: their boundaries only serve as recomputation points.
    if pipeline and one_program:
        points = tuple(sorted({*points, *(stage.first for stage in pipeline.stages[1:])}))

    def memory(recomputation: bool) -> tuple[MemoryPlan, ...]:
        if pipeline and not one_program:
            return estimate_stage_memory(config, pipeline, data, recomputation=recomputation)
        kept = kept_elements(network, points if recomputation else None)
        return (estimate_memory(config, batch, cost.params, kept, data.images),)

    validation = _validation(config, info, batch, pipeline)
    # Here and not where options are checked: the number of replicas may follow from other options, and the number of
    # processes from the launcher.
    refuse_split_replicas(config, batch, validation, num_processes)
    # A trial validates a part of the set.
    counted, replicas = replace(info, num_validation=validation.num_samples), validation.num_replicas
    views = plan_eval_cache(counted, feed, config.validation, validation.batch_size, replicas, num_processes)
    by_device = memory(wanted.recomputation)
    if config.validation.validation and not views.resident:
        staged = validation.devices_per_replica > 1
        holders = [pipeline.stages[0].device] if pipeline and staged else range(len(by_device))
        by_device = with_validation(by_device, holders, views, validation, feed.prefetch_depth)
    fullest = max(range(len(by_device)), key=lambda device: by_device[device].total_bytes)
    parameters = pipeline.parameters_by_device()[fullest] if pipeline else cost.params
    return Plan(
        batch=batch,
        steps=steps,
        validation=validation,
        validation_cache=views,
        memory_by_device=by_device,
        savings=find_savings(config, parameters, by_device[fullest], lambda: memory(True)[fullest]),
        recompute_points=points if wanted.recomputation else (),
        pipeline=pipeline,
        one_program=one_program,
        feed=feed,
        num_parameters=cost.params,
        flops_per_image=cost.flops,
        image_hwc=network.input_hwc,
        num_processes=num_processes,
    )


def _validation(config: Config, info: DataInfo, batch: BatchPlan, pipeline: PipelinePlan | None) -> ValidationPlan:
    wanted, trial = config.validation, config.run.dry_run_steps
    plan = make_validation_plan(
        batch,
        micro_batch_size=wanted.validation_micro_batch_size,
        num_replicas=wanted.validation_num_replicas,
        num_samples=info.num_validation,
        devices_per_replica=pipeline.num_devices if pipeline else 1,
        pipelined=wanted.pipeline_validation_model,
    )
    return plan.first_batches(trial) if trial else plan


def _steps(config: Config, info: DataInfo, batch: BatchPlan, max_steps_per_call: int | None) -> StepPlan:
    wanted = config.batch
    if not config.run.training:
        return no_steps(info.num_train, batch.global_batch_size, wanted.num_epochs)
    epoch = make_epoch_plan(
        num_samples=info.num_train,
        global_batch_size=batch.global_batch_size,
        weight_updates_per_epoch=wanted.weight_updates_per_epoch,
        copies=config.data.repeated_augmentation,
    )
    # Logs cost little; validating and saving as often as somebody logs would cost more than the training.
    follows = min(wanted.logs_per_epoch, 1.0)

    def events_of(on: bool, per_epoch: float | None) -> float | None:
        return (follows if per_epoch is None else per_epoch) if on else None

    # Averages are of checkpoints at even distances.
    averages = config.checkpoint.average_last_epochs or config.checkpoint.average_decays
    by_time = config.checkpoint.checkpoints and wanted.ckpts_per_epoch is None and not averages
    events = Events(
        logs=wanted.logs_per_epoch,
        checkpoints=events_of(config.checkpoint.checkpoints, wanted.ckpts_per_epoch),
        validations=events_of(config.validation.validation, wanted.validations_per_epoch),
        checkpoint_seconds=CHECKPOINT_SECONDS if by_time else 0.0,
        divide_epoch=wanted.events_divide_epoch,
    )
    limits = [limit for limit in (max_steps_per_call, wanted.max_steps_per_call) if limit is not None]
    return make_step_plan(epoch, wanted.num_epochs, events, min(limits, default=None))


def _with_shorter_calls_said(steps: StepPlan, config: Config, feed: FeedOptions, sent: SentData) -> StepPlan:
    """Return the plan with a warning where the images of a call of several epochs do not fit the device."""
    wanted, asked = config.batch, steps.next_event(0)
    most = asked if wanted.max_steps_per_call is None else min(asked, wanted.max_steps_per_call)
    # Only where logs say how long the device is kept; elsewhere a call of any length does.
    if not (wanted.events_divide_epoch and wanted.logs_per_epoch < 1) or steps.steps_per_call >= most:
        return steps
    warning = (
        f"--logs-per-epoch {frequency(wanted.logs_per_epoch)} asks for calls of {asked:,} steps, and they have at most "
        f"{steps.steps_per_call:,}: the images of more exceed the budget ({feed.cache.reason}). Raise "
        f"--dataset-device-budget to {-(-asked * sent.bytes_per_step // 2**30)}GiB"
    )
    warning += "." if config.data.accelerator_side_preprocess else ", or add --accelerator-side-preprocess True."
    return replace(steps, warnings=(*steps.warnings, warning))
