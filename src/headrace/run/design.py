"""The design of a run: all values that follow from its configuration before any device is touched."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from headrace.config.load import Resolved, override, to_flat
from headrace.config.schema import Compiler, Config
from headrace.core import __version__
from headrace.core.errors import ConfigError, DataError
from headrace.core.tree import PyTree, flatten_named
from headrace.data.dataset import DataInfo, DataSet, FoundSet, find_set
from headrace.data.feeding.balance import EVEN_OUT, describe_uneven, refuse_weights
from headrace.engine.compiler import decide
from headrace.engine.loss_scale import LossScaling, make_loss_scaling, resumed_loss_scale
from headrace.engine.lr_curve import LrCurve, make_lr_curve
from headrace.engine.objective import CustomObjective, LossFunction, loss_named
from headrace.engine.optimizer import Update, make_optimizer
from headrace.engine.precision import Precision, make_precision
from headrace.engine.state import State, state_from
from headrace.engine.trainable import Trainable, make_trainable
from headrace.job import check_devices_per_replica, current_group
from headrace.model.network import Network, weights_like
from headrace.model.zoo import build_network
from headrace.ops import check_kernels
from headrace.plan.image_sizes import SizeSpan, size_spans
from headrace.plan.plan import Plan, make_plan
from headrace.plan.scaling import ScaleRow, device_counts, replicas_on, scale_row
from headrace.rows.optimizers.given import OptimizerFunction
from headrace.rows.row import Metric, Span, Task
from headrace.rows.tasks import CLASSIFICATION, TASKS
from headrace.run.callbacks import Callback, Callbacks, callbacks_of
from headrace.run.custom_functions import (
    AugmentFunction,
    Metrics,
    check_augment,
    check_objective,
    check_optimizer,
    read_metrics,
    refuse_scores,
)
from headrace.run.directory import PARTS
from headrace.run.time_budget import refuse_unpaced
from headrace.telemetry.validation_report import validation_report

# Options that may differ between the processes of a job: paths, how much a host can do, what it shows.
MAY_DIFFER = (
    "dataset_path",
    "validation_path",
    "labels",
    "log_dir",
    "checkpoint_dir",
    "compilation_cache_dir",
    "pipeline_num_parallel",
    "progress",
    "report",
)


@dataclass(frozen=True, kw_only=True)
class CustomParts:
    """What code gives to a run instead of options, or beside them; without arguments, nothing."""

    network: Network | None = None
    dataset: DataSet | None = None
    weights: tuple[PyTree, PyTree] | None = None  # (params, stats) in float32; None: drawn with the seed
    callbacks: tuple[Callback, ...] = ()
    loss: LossFunction | None = None
    metrics: Metrics = field(default_factory=dict)
    augment: AugmentFunction | None = None
    optimizer: OptimizerFunction | None = None
    speaks_python: bool = False  # notes and verdicts name arguments instead of flags
    found: FoundSet | None = None  # the set that options name, where it was found already

    @property
    def objective(self) -> CustomObjective:
        """What the run minimises and measures."""
        rows = self.metric_rows
        return CustomObjective(
            loss=self.loss,
            metrics={row.name: row.per_image for row in rows if row.per_image is not None},
            sums={row.name: row.sums for row in rows if row.sums is not None},
            keeps_scores=any(row.of_scores for row in rows),
        )

    @property
    def metric_rows(self) -> tuple[Metric, ...]:
        """The metrics that code gave, and those of ours that it named."""
        return read_metrics(self.metrics)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of what options cannot give: without it the run cannot be resumed."""
        return tuple(name for name in PARTS if getattr(self, name))

    def record(self) -> dict[str, Any] | None:
        """Return what is stored with the run: what code gave, and enough to prepare images as for its training."""
        if not self.parts:
            return None
        network = {"network": self.network.name} if self.network else {}
        info = self.dataset.info if self.dataset else None
        names = ("image_hwc", "num_classes", "image_dtype", "normalization", "channel_mean", "channel_std")
        form = {name: getattr(info, name) for name in names} if info else {}
        return {"parts": list(self.parts)} | network | form


NOTHING = CustomParts()


@dataclass(frozen=True, kw_only=True)
class Design:
    """Everything that is known of a run before a device is used. Whatever cannot work is refused while this is made."""

    config: Config
    info: DataInfo
    network: Network
    plan: Plan
    precision: Precision
    optimizer: Update
    trainable: Trainable
    sizes: tuple[SizeSpan, ...]  # of training images, in their order
    custom: CustomParts = NOTHING

    @property
    def lr_curve(self) -> LrCurve:
        """The learning rate of each step."""
        return self.optimizer.lr_curve

    @property
    def loss_scaling(self) -> LossScaling:
        """The loss scale of the run."""
        steps, batch = self.plan.steps, self.plan.batch
        span = Span(
            global_batch_size=batch.global_batch_size,
            updates_per_epoch=steps.updates_per_epoch,
            num_epochs=steps.num_epochs,
        )
        return make_loss_scaling(self.config.numerics, span)

    @property
    def compiler(self) -> Compiler:
        """The compiler's options for training, with each `auto` decided."""
        flops = self.plan.flops_per_image * self.plan.batch.micro_batch_size
        return decide(self.config.compiler, flops, one_device=self.plan.num_devices == 1)

    @property
    def objective(self) -> CustomObjective:
        """What the run minimises and measures: a custom loss, or else that of the options."""
        learning, given = self.config.learning, self.custom.objective
        ours = () if self.task is CLASSIFICATION else self.task.metrics(self.info.scale)
        return replace(
            given,
            task=self.task.name,
            loss=given.loss or loss_named(learning.loss, learning.bce_target_threshold),
            metrics={row.name: row.per_image for row in ours if row.per_image is not None} | dict(given.metrics),
            keeps_scores=given.keeps_scores or any(row.of_scores for row in ours),
        )

    @property
    def task(self) -> Task:
        """What the network is trained to say of an image."""
        return TASKS[self.info.task]

    @property
    def metric_rows(self) -> tuple[Metric, ...]:
        """The metrics besides those that every classification has: of another task, and those that code gave."""
        ours = () if self.task is CLASSIFICATION else self.task.metrics(self.info.scale)
        return (*ours, *self.custom.metric_rows)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """All metrics of the run by name."""
        ours = {row.name: row for row in self.task.metrics(self.info.scale)}
        return {**ours, **{row.name: row for row in self.custom.metric_rows}}

    @property
    def monitored(self) -> Metric:
        """The metric by which validations are compared; the task's own where only the run had the one that it names."""
        metrics = self.metrics
        return metrics.get(self.config.run.monitor, metrics[self.task.monitor])

    def report(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Return the report for the sums over the validation set."""
        return validation_report(sums, self.info.class_names, self.metric_rows, (self.task, self.info.scale))

    def callbacks(self) -> Callbacks:
        """Return the callbacks that options and code ask for."""
        asked = callbacks_of(self.config.run, self.monitored)
        return Callbacks((*asked, *self.custom.callbacks), is_first=current_group().is_first)


def design_run(
    config: Config,
    custom: CustomParts = NOTHING,
    num_processes: int = 1,
    *,
    absent_ok: bool = False,
) -> Design:
    """Return the design of the run that a configuration describes, with `custom` parts given by code.

    `absent_ok`: an ImageNet that is not on this machine is planned with its published numbers of images.
    """
    # Described, not opened: a plan needs the numbers of images and classes only.
    custom = with_set(config, custom, absent_ok=absent_ok)
    info = described(config, custom)
    if not custom.dataset and config.run.training and not info.num_train:
        raise DataError(
            f"{info.place or info.name} has no training images.",
            rule="Validation images alone are enough for `headrace validate` and for --no-training.",
            remedy="Check --dataset-path.",
        )
    # cpu_kernels on is an error where they are missing; better now than at the first convolution that is traced.
    check_kernels(config.compiler.cpu_kernels)
    refuse_weights(config.learning.class_weights, info)
    _refuse_top5(config, info)
    class_weights = config.learning.class_weights if config.run.training else ()
    check_objective(custom.loss, custom.metric_rows, info.num_classes, class_weights, TASKS[info.task])
    check_augment(custom.augment, info.image_hwc)
    check_optimizer(custom.optimizer)
    network = custom.network or build_network(config.model, info.num_classes, info.image_hwc)
    # Before the plan: a split inside a block (b1/2/relu) makes two blocks of one, and all numbers are by block.
    network = network.refined(config.pipeline.pipeline_splits)
    plan = make_plan(config, info, network, num_processes)
    refuse_unpaced(config.run.time_budget, plan)
    if custom.optimizer is not None and plan.pipeline is not None and len(plan.pipeline.stages) > 1:
        raise ConfigError(
            f"An optimizer is given by code, and the network has {len(plan.pipeline.stages)} stages.",
            rule="Stages update their weights apart; whether an optimizer of yours may be, nobody says.",
            remedy="Choose an optimizer by its name, or train without stages.",
        )
    check_devices_per_replica(plan.devices_per_replica)
    if plan.pipeline is not None and plan.validation.devices_per_replica > 1:
        refuse_scores((*TASKS[info.task].metrics(info.scale), *custom.metric_rows))
    lr_curve = make_lr_curve(
        config.learning,
        global_batch_size=plan.batch.global_batch_size,
        updates_per_epoch=plan.steps.updates_per_epoch,
        num_epochs=plan.steps.num_epochs,
    )
    # As a function: only options that name weights need them, and making them takes time for a large network.
    trainable = make_trainable(
        config.weights, lambda: flatten_named(weights_like(network)[0]), network.head, network.block_names
    )
    return Design(
        config=config,
        info=info,
        network=network,
        plan=plan,
        precision=make_precision(config.numerics, config.batch, half_partials=config.compiler.half_partials),
        optimizer=make_optimizer(config.learning, lr_curve, plan.batch.global_batch_size, trainable, custom.optimizer),
        trainable=trainable,
        sizes=size_spans(config.augment, network, plan.steps),
        custom=custom,
    )


def with_set(config: Config, custom: CustomParts = NOTHING, *, absent_ok: bool = False) -> CustomParts:
    """Return the parts with the set that options name: found once, and again only where options name another one."""
    found = custom.found
    if custom.dataset or (found and found.is_of(config.data) and (absent_ok or not found.is_absent)):
        return custom
    return replace(custom, found=find_set(config.data, absent_ok=absent_ok))


def described(config: Config, custom: CustomParts) -> DataInfo:
    """Return the facts of the dataset that code gave, or that was found."""
    if custom.dataset:
        return custom.dataset.info
    assert custom.found
    return custom.found.info(config.data)


def _refuse_top5(config: Config, info: DataInfo) -> None:
    if config.run.monitor == "top5" and info.num_classes <= 5:
        raise ConfigError(
            f"monitor is top5, and {info.place or info.name} has {info.num_classes} classes.",
            rule="The class of an image is always among the five best of so few.",
            remedy="Choose --monitor top1 or loss.",
        )


def open_data(design: Design) -> DataSet:
    """Open a design's dataset; a trial run validates a part of it."""
    config, custom = design.config, with_set(design.config, design.custom)
    dataset = custom.dataset or (custom.found and custom.found.open(config.data, config.run.seed))
    assert dataset
    if not config.run.dry_run_steps:
        return dataset
    return replace(dataset, validation=dataset.validation.first(design.plan.validation.num_samples))


def starting_state(design: Design, weights: tuple[PyTree, PyTree] | None = None) -> State:
    """Return the state of step 0, in host memory, with these (params, stats) or those that the seed draws."""
    config = design.config
    weights = weights or design.network.init(config.run.seed)
    ema = config.learning.ema_decay > 0
    state = state_from(design.optimizer, design.precision, design.loss_scaling, weights, ema=ema)
    return with_scale_of(design, state, 0)


def with_scale_of(design: Design, state: State, step: int) -> State:
    """Return a state at the beginning of `step` with the loss scale that the options of now say."""
    scale = resumed_loss_scale(state["loss_scale"], step, design.loss_scaling)
    return {**state, "loss_scale": scale}


def given_facts(design: Design) -> dict[str, Any]:
    """Return what a process was started with, which must be equal in all processes of a job."""
    options = {name: value for name, value in to_flat(design.config).items() if name not in MAY_DIFFER}
    return options | {"version of headrace": __version__, "version of jax": jax.__version__}


def derived_facts(design: Design, dataset: DataSet, first_step: int) -> dict[str, Any]:
    """Return what may differ between processes even with equal options: the data, and the plan made from it."""
    labels = {f"labels of the {split} set": facts["labels"] for split, facts in dataset_identity(dataset).items()}
    plan = {f"plan: {name}": value for name, value in design.plan.to_dict().items() if name != "warnings"}
    return labels | {"step to start from": first_step} | plan


def dataset_identity(dataset: DataSet) -> dict[str, dict[str, Any]]:
    """Return what tells two datasets apart without reading their images: for each split, its size and its labels."""
    return {
        split: {
            "images": len(source.labels),
            # Labels are in memory already. Images would have to be read, which takes minutes for a large dataset.
            "labels": hashlib.sha256(np.ascontiguousarray(source.labels).tobytes()).hexdigest()[:12],
        }
        for split, source in (("training", dataset.train), ("validation", dataset.validation))
    }


def digest_of_dataset(identity: Mapping[str, Mapping[str, Any]], class_names: Sequence[str]) -> str:
    """Return a short text that is equal for equal labels of both splits and names of classes, for records."""
    return hashlib.sha256(json.dumps([identity, list(class_names)], sort_keys=True).encode()).hexdigest()[:12]


def uneven_remarks(config: Config, info: DataInfo) -> tuple[str, ...]:
    """Say that a run trains on uneven classes, with the options that would help, unless it has one of them already."""
    if not config.run.training or info.task != CLASSIFICATION.name:
        return ()
    if info.train_counts and not info.train_counts[0] and all(info.train_counts[1:]):
        first = (
            f"{info.class_names[0]} (label 0) has no training images, and every other class has: labels count from 0"
        )
        return (f"{first}, so {len(info.train_counts)} classes are trained.",)
    if config.data.balanced_sampling or config.learning.class_weights:
        return ()
    weights, sampling = EVEN_OUT
    fitting = [weights] if config.learning.loss == "cross_entropy" else []
    fitting += [sampling] if config.data.repeated_augmentation == 1 and config.data.shuffle else []
    return describe_uneven(info.class_names, info.train_counts, fitting)


BATCH_OPTIONS = ("batch_size", "micro_batch_size", "gradient_accumulation_count", "global_batch_size")


def with_batch_of(before: Resolved, now: Resolved, custom: CustomParts = NOTHING) -> Resolved:
    """Return the configuration `now` with as many images per weight update as `before`, if it only has other replicas.

    Options that ask for another batch are left as they are.
    """
    old, new = to_flat(before.config), to_flat(now.config)
    # Whoever gives a batch option asks for another batch, and gets it.
    if old["num_replicas"] == new["num_replicas"] or any(old[name] != new[name] for name in BATCH_OPTIONS):
        return now
    plan, changed = (design_run(each.config, custom, absent_ok=True).plan for each in (before, now))
    if plan.batch.global_batch_size == changed.batch.global_batch_size:
        return now
    kept = override(now, {"global_batch_size": plan.batch.global_batch_size})
    return replace(kept, warnings=now.warnings, notes=now.notes)


def scale_to_devices(
    resolved: Resolved, num_devices: int, custom: CustomParts = NOTHING
) -> tuple[Resolved, tuple[ScaleRow, ...]]:
    """Return the configuration with the same global batch on that many devices, and a row for each size on the way."""
    plan = design_run(resolved.config, custom, absent_ok=True).plan
    replicas_on(plan, num_devices)  # refuses what does not fill the devices
    found: dict[int, tuple[Resolved, Plan]] = {}
    for count in device_counts(plan, num_devices):
        changed = _with_replicas(resolved, plan, replicas_on(plan, count))
        found[count] = changed, design_run(changed.config, custom, absent_ok=True).plan
    return found[num_devices][0], tuple(scale_row(plan) for _, plan in found.values())


def _with_replicas(resolved: Resolved, plan: Plan, num_replicas: int) -> Resolved:
    if num_replicas == plan.batch.num_replicas:
        return resolved
    options = {"num_replicas": num_replicas, "global_batch_size": plan.batch.global_batch_size}
    changed = override(resolved, options)
    return replace(changed, warnings=resolved.warnings, notes=resolved.notes)
