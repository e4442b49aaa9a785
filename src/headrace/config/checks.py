"""Checks before a run starts: the rules, warnings and notes of all sections, and those across sections.

Limits of a single option and rules within a section are declared with the section (section_*.py), keys inside a
mapping in params.py.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.config.field import DEFAULT, Facts, Origin, Remark, Rule, conflict, idle
from headrace.config.params import complete
from headrace.config.schema import Config
from headrace.config.section_augment import AUGMENT_NOTES, AUGMENT_RULES
from headrace.config.section_compiler import COMPILER_RULES
from headrace.config.section_data import DATA_NOTES, DATA_RULES, DATA_WARNINGS, SYNTHETIC_DATASETS
from headrace.config.section_learning import (
    LEARNING_NOTES,
    LEARNING_RULES,
    LEARNING_WARNINGS,
    NUMERICS_NOTES,
    NUMERICS_WARNINGS,
)
from headrace.config.section_model import MODEL_RULES, WEIGHT_NOTES, WEIGHT_RULES, WEIGHTS_AT_START
from headrace.config.section_pipeline import PIPELINE_NOTES, PIPELINE_RULES, needs_stages
from headrace.config.section_run import BATCH_RULES, RUN_RULES
from headrace.config.task_rules import TASK_RULES, metric_names
from headrace.core.errors import ConfigError
from headrace.rows.row import Scale
from headrace.rows.tasks import TASKS

if TYPE_CHECKING:
    from headrace.config.load import Resolved


def _proportions(facts: Facts) -> tuple[float, ...]:
    return facts.config.compiler.available_memory_proportion


_SHARES = tuple(dict.fromkeys(row.name for task in TASKS.values() for row in task.metrics(Scale()) if row.is_share))

_ACROSS_SECTIONS = (
    conflict(
        "dbn_replica_group_size",
        "num_replicas",
        lambda facts: (facts.config.batch.num_replicas or 0) % facts.config.model.dbn_replica_group_size != 0,
        "Replicas share batch-norm statistics in groups of equal size: num_replicas must be a multiple of it.",
        "Choose a size that divides num_replicas, or leave dbn_replica_group_size out.",
    ),
    Rule(
        broken=lambda facts: not facts.config.run.training and not facts.config.validation.validation,
        problem=lambda facts: f"Nothing is left to do: {facts.describe('training')}, {facts.describe('validation')}.",
        rule="A run trains, validates, or both.",
        remedy="Leave one of them on; `headrace convert` makes a checkpoint of a file of weights.",
    ),
    Rule(
        broken=lambda facts: facts.config.augment.mixing and facts.config.batch.micro_batch_size == 1,
        problem=lambda facts: (
            f"{facts.describe(facts.config.augment.mixing)} with {facts.describe('micro_batch_size')}."
        ),
        rule="An image is mixed with another one of its micro-batch.",
        remedy="Use --micro-batch-size 2 or more, or leave mixing out.",
    ),
    conflict(
        "target_accuracy",
        "monitor",
        lambda facts: (
            facts.config.run.target_accuracy is not None
            and facts.config.run.monitor in metric_names(facts.config.data.task)
            and facts.config.run.monitor not in _SHARES
        ),
        "A target accuracy is a share of images, from 0 to 1.",
        f"Leave target_accuracy out, or monitor one of {', '.join(_SHARES)}.",
    ),
    conflict(
        "monitor",
        "validation",
        lambda facts: (
            facts.config.run.monitor != TASKS[facts.config.data.task].monitor and not facts.config.validation.validation
        ),
        "What is monitored are the results of validations.",
    ),
    conflict(
        "validation_flip",
        "pipeline_validation_model",
        lambda facts: facts.config.validation.pipeline_validation_model and facts.config.validation.validation_flip,
        "Mirror images are validated with the whole network on each device.",
    ),
    conflict(
        "validation_shift",
        "pipeline_validation_model",
        lambda facts: facts.config.validation.pipeline_validation_model and facts.config.validation.validation_shift,
        "Moved images are validated with the whole network on each device.",
    ),
    needs_stages("pipeline_validation_model", lambda config: config.validation.pipeline_validation_model),
    Rule(
        broken=lambda facts: len(_proportions(facts)) > 1 and facts.config.pipeline.num_stages == 1,
        problem=lambda facts: f"{facts.describe('available_memory_proportion')} without pipeline stages.",
        rule="Several values are for the stages of a pipeline, two for each.",
        remedy="Give one value, or name stages with --pipeline-splits.",
    ),
    Rule(
        broken=lambda facts: len(_proportions(facts)) not in (0, 1, 2 * facts.config.pipeline.num_stages),
        problem=lambda facts: (
            f"{facts.describe('available_memory_proportion')}: {len(_proportions(facts))} values for "
            f"{facts.config.pipeline.num_stages} stages."
        ),
        rule="Give one value, or two for each stage: for its convolutions and for its matrix products.",
        remedy="Give one value, or twice as many as there are stages.",
    ),
)

RULES = (
    *RUN_RULES,
    *BATCH_RULES,
    *DATA_RULES,
    *TASK_RULES,
    *LEARNING_RULES,
    *MODEL_RULES,
    *WEIGHT_RULES,
    *PIPELINE_RULES,
    *AUGMENT_RULES,
    *COMPILER_RULES,
    *_ACROSS_SECTIONS,
)


def _endless_warmup(facts: Facts) -> bool:
    warmup = facts.config.learning.lr_warmup_params
    open_end = facts.origins.get("num_epochs", DEFAULT).kind == DEFAULT.kind  # it is chosen later, and checked again
    return warmup is not None and not open_end and float(warmup["warmup_epochs"]) >= facts.config.batch.num_epochs


WARNINGS = (
    *NUMERICS_WARNINGS,
    Remark(
        when=lambda facts: facts.config.data.balanced_sampling and facts.config.learning.class_weights == ("balanced",),
        text=lambda facts: (
            f"Both are given: {facts.describe('class_weights')} and {facts.describe('balanced_sampling')}. A rare "
            "class would count more twice: in how often it is seen, and in the loss."
        ),
        option="class_weights",
        remedy="Leave one of them out.",
    ),
    *LEARNING_WARNINGS,
    *DATA_WARNINGS,
    Remark(
        when=_endless_warmup,
        text=lambda facts: (
            "The warm-up is not over when the run ends: "
            f"{facts.describe('lr_warmup_params')}, {facts.describe('num_epochs')}."
        ),
    ),
    *(
        Remark(
            when=lambda facts, name=name: (
                getattr(facts.config.run, name) is not None and not facts.config.validation.validation
            ),
            text=lambda facts, name=name: f"{facts.describe(name)} is never checked: {facts.describe('validation')}.",
            option=name,
            remedy=f"Leave {name} out, or validate.",
        )
        for name in ("target_accuracy", "early_stopping")
    ),
    idle(
        "half_partials",
        "precision",
        lambda facts: facts.config.compiler.half_partials and facts.config.numerics.precision == "32.32",
        refused=False,  # the precision may still be chosen
    ),
)

NOTES = (
    *NUMERICS_NOTES,
    *PIPELINE_NOTES,
    *LEARNING_NOTES,
    *WEIGHT_NOTES,
    *AUGMENT_NOTES,
    *DATA_NOTES,
    idle(
        "replicated_optimizer_state_sharding",
        "with one replica",
        lambda facts: (
            facts.config.pipeline.replicated_optimizer_state_sharding and facts.config.batch.num_replicas in (None, 1)
        ),
        refused=False,  # there may be more replicas on another machine
    ),
)

# What is refused of a new run and never remarked on.
AT_START = (
    *WEIGHTS_AT_START,
    Remark(
        when=lambda facts: facts.config.data.dataset in SYNTHETIC_DATASETS or facts.config.data.synthetic_on,
        text=lambda facts: f"{facts.describe('class_weights')} with synthetic images, whose labels are random.",
        option="class_weights",
    ),
)


def check(config: Config, origins: Mapping[str, Origin]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Refuse options that cannot work together; return (warnings, notes) about the rest."""
    facts = Facts(config=config, origins=origins)
    # First: the rules read keys of these mappings.
    _check_mappings(facts)
    for rule in RULES:
        rule.check(facts)
    warnings, notes = (
        tuple(remark.text(facts) for remark in remarks if remark.when(facts)) for remarks in (WARNINGS, NOTES)
    )
    return warnings, notes


def check_start(resolved: "Resolved", *, has_weights: bool = False) -> None:
    """Refuse options of a new run that cannot be meant; `has_weights`: code gives the weights to start from.

    Runs that are resumed or validated were started before, and commands of the reference's applications do what they
    did there: neither is refused.
    """
    facts = Facts(config=resolved.config, origins=resolved.origins, has_weights=has_weights)
    if "application" not in resolved.source:
        for remark in (*WARNINGS, *NOTES, *AT_START):
            remark.refuse(facts)


def _check_mappings(facts: Facts) -> None:
    """Check the keys inside the options that are mappings, and say where a wrong one was written."""
    config = facts.config
    learning = config.learning
    loss_scale = config.numerics.loss_scaling if isinstance(config.numerics.loss_scaling, str) else "dynamic"
    mappings: list[tuple[str, str, str | None, dict[str, Any] | None]] = [
        ("optimizer_params", "optimizer", learning.optimizer, learning.optimizer_params),
        ("lr_schedule_params", "lr_schedule", learning.lr_schedule, learning.lr_schedule_params),
        ("lr_warmup_params", "lr_warmup", None, learning.lr_warmup_params),
        ("loss_scaling_params", "loss_scaling", loss_scale, config.numerics.loss_scaling_params),
        ("norm_layer", "norm_layer", None, config.model.norm_layer),
    ]
    for option, kind, name, given in mappings:
        try:
            if given is not None:
                complete(kind, name, given)
        except ConfigError as error:
            place = facts.origins.get(option, DEFAULT).prefix
            raise error.reworded(place + error.problem) from None
