"""Checks across options that need no device: rules that stop a run before it starts, warnings and notes.

Limits of a single option are declared with the option (section_*.py), keys inside a mapping in params.py.
"""

from collections.abc import Mapping
from typing import Any

from headrace.config.field import DEFAULT, Facts, Origin, Remark, Rule
from headrace.config.params import complete
from headrace.config.schema import Config
from headrace.config.section_augment import AUGMENT_NOTES, AUGMENT_RULES
from headrace.config.section_compiler import COMPILER_RULES, COMPILER_WARNINGS
from headrace.config.section_data import DATA_RULES
from headrace.config.section_learning import LEARNING_NOTES, LEARNING_RULES
from headrace.config.section_model import MODEL_RULES, WEIGHT_NOTES
from headrace.config.section_pipeline import PIPELINE_NOTES, PIPELINE_RULES
from headrace.core.errors import ConfigError

RULES = (
    Rule(
        broken=lambda facts: (facts.config.batch.num_replicas or 0) % facts.config.model.dbn_replica_group_size != 0,
        problem=lambda facts: f"{facts.describe('dbn_replica_group_size')} with {facts.describe('num_replicas')}.",
        rule="Replicas share batch-norm statistics in groups of equal size: num_replicas must be a multiple of it.",
        remedy="Choose a size that divides num_replicas, or leave dbn_replica_group_size out.",
    ),
    Rule(
        broken=lambda facts: (
            bool(facts.config.data.eight_bit_transfer) and not facts.config.data.accelerator_side_preprocess
        ),
        problem=lambda facts: (
            f"{facts.describe('eight_bit_transfer')} with {facts.describe('accelerator_side_preprocess')}."
        ),
        rule="Images preprocessed on the host are floating-point numbers; only raw pixels can cross as 8 bits.",
        remedy="Set accelerator_side_preprocess, or leave eight_bit_transfer out.",
    ),
    Rule(
        broken=lambda facts: (
            facts.config.batch.gradient_accumulation_count is not None
            and facts.config.batch.global_batch_size is not None
        ),
        problem=lambda facts: (
            "Both are given: "
            f"{facts.describe('gradient_accumulation_count')} and {facts.describe('global_batch_size')}."
        ),
        rule="global_batch_size = micro_batch_size * num_replicas * gradient_accumulation_count.",
        remedy="Leave one of them out.",
    ),
    Rule(
        broken=lambda facts: (
            facts.config.batch.batch_size is not None and facts.config.batch.global_batch_size is not None
        ),
        problem=lambda facts: (
            f"Both are given: {facts.describe('batch_size')} and {facts.describe('global_batch_size')}."
        ),
        rule="Both are the images of one weight update.",
        remedy="Leave one of them out.",
    ),
    Rule(
        broken=lambda facts: not facts.config.run.training and not facts.config.validation.validation,
        problem=lambda facts: f"Nothing is left to do: {facts.describe('training')}, {facts.describe('validation')}.",
        rule="A run trains, validates, or both.",
        remedy="Leave one of them on; `headrace convert` makes a checkpoint of a file of weights.",
    ),
    *DATA_RULES,
    *LEARNING_RULES,
    *MODEL_RULES,
    *PIPELINE_RULES,
    *AUGMENT_RULES,
    *COMPILER_RULES,
)


def _float16_unscaled(facts: Facts) -> bool:
    numerics = facts.config.numerics
    return numerics.precision.startswith("16") and numerics.half_type == "float16" and numerics.loss_scaling == 0


def _endless_warmup(facts: Facts) -> bool:
    warmup = facts.config.learning.lr_warmup_params
    open_end = facts.origins.get("num_epochs", DEFAULT).kind == DEFAULT.kind  # it is chosen later, and checked again
    return warmup is not None and not open_end and float(warmup["warmup_epochs"]) >= facts.config.batch.num_epochs


WARNINGS = (
    Remark(
        when=_float16_unscaled,
        text=lambda facts: (
            f"float16 without loss scaling ({facts.describe('precision')}): gradients below about 6e-8 vanish. "
            "Use --loss-scaling dynamic, or --half-type bfloat16."
        ),
    ),
    Remark(
        # Measured: ResNet-8 on digits, 8 epochs at tf2's default rate reaches 15 % with a decay of 1, 56 % without.
        when=lambda facts: facts.config.learning.weight_decay >= 1,
        text=lambda facts: (
            f"{facts.describe('weight_decay')} takes the learning rate's fraction of every weight at each step, which "
            "leaves little to learn. --weight-decay 0 turns it off; 1e-4 is usual."
        ),
    ),
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
        )
        for name in ("target_accuracy", "early_stopping")
    ),
    *COMPILER_WARNINGS,
)

NOTES = (
    Remark(
        when=lambda facts: (
            facts.given("stochastic_rounding")
            and facts.config.numerics.stochastic_rounding
            and facts.config.numerics.precision != "16.16"
        ),
        text=lambda facts: (
            f"{facts.describe('stochastic_rounding')} has no effect on 32-bit weights ({facts.describe('precision')})."
        ),
    ),
    Remark(
        when=lambda facts: facts.given("half_type") and facts.config.numerics.precision == "32.32",
        text=lambda facts: f"{facts.describe('half_type')} has no effect with {facts.describe('precision')}.",
    ),
    Remark(
        when=lambda facts: (
            bool(facts.config.numerics.loss_scaling_params) and facts.config.numerics.loss_scaling != "dynamic"
        ),
        text=lambda facts: f"{facts.describe('loss_scaling_params')} is for dynamic loss scaling only.",
    ),
    *PIPELINE_NOTES,
    *LEARNING_NOTES,
    *WEIGHT_NOTES,
    *AUGMENT_NOTES,
)


def check(config: Config, origins: Mapping[str, Origin]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Refuse options that cannot work together; return (warnings, notes) about the rest."""
    facts = Facts(config=config, origins=origins)
    _check_mappings(facts)
    for rule in RULES:
        if rule.broken(facts):
            raise ConfigError(rule.problem(facts), rule=rule.rule, remedy=rule.remedy)
    warnings, notes = (
        tuple(remark.text(facts) for remark in remarks if remark.when(facts)) for remarks in (WARNINGS, NOTES)
    )
    return warnings, notes


def _check_mappings(facts: Facts) -> None:
    """Check the keys inside the options that are mappings, and say where a wrong one was written."""
    config = facts.config
    learning = config.learning
    mappings: list[tuple[str, str, str | None, dict[str, Any] | None]] = [
        ("optimizer_params", "optimizer", learning.optimizer, learning.optimizer_params),
        ("lr_schedule_params", "lr_schedule", learning.lr_schedule, learning.lr_schedule_params),
        ("lr_warmup_params", "lr_warmup", None, learning.lr_warmup_params),
        ("loss_scaling_params", "loss_scaling", "dynamic", config.numerics.loss_scaling_params),
        ("norm_layer", "norm_layer", None, config.model.norm_layer),
    ]
    for option, kind, name, given in mappings:
        try:
            if given is not None:
                complete(kind, name, given)
        except ConfigError as error:
            origin = facts.origins.get(option, DEFAULT)
            place = f"{origin.where}: " if origin.kind in ("recipe", "file") else ""
            raise ConfigError(place + error.problem, rule=error.rule, remedy=error.remedy) from None
