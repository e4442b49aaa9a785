"""The training side of a run on its devices: the feed, the compiled call program, and the calls one after the other."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from headrace.config.schema import Learning
from headrace.core.errors import RunStopped
from headrace.data.balance import class_weights
from headrace.data.dataset import DataSet
from headrace.data.feed import FeedOptions, TrainFeed
from headrace.data.fetch import fetch, fetch_labels
from headrace.data.order import StepShape
from headrace.data.share import WHOLE, Share
from headrace.engine.compiler import compiler_options
from headrace.engine.devices import CompileCounts, count_compilations
from headrace.engine.objective import training_loss
from headrace.engine.state import State
from headrace.engine.step import StepSpec
from headrace.plan.plan import Plan
from headrace.run.design import Design
from headrace.run.executor import Executor


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program, ready to run, and what compiling it took."""

    program: Any
    seconds: float
    counts: CompileCounts
    device_bytes: int  # arguments, outputs and temporaries of one device, as XLA reports them


def step_spec(design: Design, options: FeedOptions, dataset: DataSet) -> StepSpec:
    """Return what the step of this design needs; of the data set only the labels matter, for weights of classes."""
    config, batch = design.config, design.plan.batch
    weights = class_weights(config.learning.class_weights, dataset.train.labels, design.info.num_classes)
    smoothing = smoothing_over_all(config.learning, design.info.num_classes)
    return StepSpec(
        network=design.network,
        optimizer=design.optimizer,
        lr_curve=design.lr_curve,
        precision=design.precision,
        numerics=config.numerics,
        fetch=lambda resident, micro: fetch(resident, micro, options.preprocess, train=True),
        fetch_labels=lambda resident, micro: fetch_labels(resident, micro, options.preprocess, train=True),
        num_replicas=batch.num_replicas,
        gradient_accumulation_count=batch.gradient_accumulation_count,
        seed=config.run.seed,
        objective=partial(training_loss, label_smoothing=smoothing, class_weights=weights),
        stable_norm=config.model.stable_norm,
        norm_group_size=config.model.dbn_replica_group_size,
        bn_momentum=config.model.bn_momentum,
        ema_decay=config.learning.ema_decay,
        frozen=design.trainable.frozen if design.trainable.any_frozen else None,
        recompute_points=design.plan.recompute_points,
        compiler_options=tuple(compiler_options(config.compiler).items()),
    )


def smoothing_over_all(learning: Learning, num_classes: int) -> float:
    """Return the smoothing that, spread over all C classes, is the one asked for: s / (C - 1) each is s' / C."""
    others = learning.label_smoothing_classes == "others" and num_classes > 1
    return learning.label_smoothing * (num_classes / (num_classes - 1) if others else 1.0)


def own_share(plan: Plan) -> Share:
    """Return this process's share of every batch; its devices must have been started."""
    return Share(process=jax.process_index(), num_processes=plan.num_processes) if plan.num_processes > 1 else WHOLE


def open_feed(design: Design, dataset: DataSet, options: FeedOptions, executor: Executor, first_step: int) -> TrainFeed:
    """Return the feed that starts at `first_step`."""
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
    )
    num_calls = (steps.total_steps - first_step) // steps.steps_per_call
    options = replace(options, share=own_share(design.plan))
    return TrainFeed(dataset.train, shape, steps.steps_per_call, first_step, num_calls, options, executor.put)


def compile_call(executor: Executor, state: State, resident: Any, block: dict[str, Any]) -> Compiled:
    """Compile the call program ahead of its first use, so that compile time is kept apart from training time."""
    return compiled_from(lambda: executor.compile(state, resident, block))


def compiled_from(build: Callable[[], Any]) -> Compiled:
    """Return the program that `build` compiles, with what that took."""
    begin = time.perf_counter()
    with count_compilations() as counts:
        program = build()
    memory = program.memory_analysis() if hasattr(program, "memory_analysis") else None  # a pipeline is many programs
    parts = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    held = sum(getattr(memory, part, 0) for part in parts) - getattr(memory, "alias_size_in_bytes", 0) if memory else 0
    return Compiled(program=program, seconds=time.perf_counter() - begin, counts=counts, device_bytes=held)


class advise_on_memory:
    """Turn a device's out-of-memory error into advice that keeps the global batch."""

    def __init__(self, plan: Plan) -> None:
        self.batch = plan.batch

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" not in str(error):
            return
        micro, count = self.batch.micro_batch_size, self.batch.gradient_accumulation_count
        remedy = "Use a smaller model or image, or keep the data set off the device (--dataset-cache host)."
        if micro % 2 == 0:
            remedy = (
                f"Half the micro batch with twice the accumulation keeps the global batch of "
                f"{self.batch.global_batch_size}: --micro-batch-size {micro // 2} "
                f"--gradient-accumulation-count {count * 2}. --dataset-cache host frees the data set's memory."
            )
        raise RunStopped(f"The device ran out of memory at micro batch {micro}.", remedy=remedy) from error
