"""Every option of the reference's two applications, and what it is here: tables of docs/documents.

The names are the reference's; everything else comes from the schema, the table of translations and that of options
without effect.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headrace.config.field import find_option, option_names
from headrace.config.section_compiler import EVERYWHERE, NO_EFFECT
from headrace.config.translations import known_options
from headrace.rows.values import BOOL, format_value
from headrace_reference.tables import BY_OPTION, tf1_defaults, tf2_defaults

STATED: Mapping[str, Mapping[str, list[dict[str, Any]]]] = yaml.safe_load(
    Path(__file__).with_name("options.yml").read_text()
)
PROOFS: Mapping[str, Mapping[str, Any]] = yaml.safe_load(Path(__file__).with_name("proofs.yml").read_text())
APPLICATIONS = {"000": "tf2", "001": "tf1"}
NAMES = {
    application: tuple(dict.fromkeys(row["option"] for rows in STATED[document].values() for row in rows))
    for document, application in APPLICATIONS.items()
}

# Names that are not options of a run.
ELSEWHERE: Mapping[str, str] = {
    "config": "a named configuration: a recipe of the package, or a block of `--config-path`",
    "config-path": "the YAML file that has it",
    "repeat": "measurements of `headrace bench`",
}

# Remarks, by our option.
REMARKS: Mapping[str, str] = {
    "dataset": "cifar-10, cifar-100 and gc-imagenet are accepted; in tf1 the path names it",
    "dataset_path": "also `$DATASETS_DIR`, `$DATA_DIR`",
    "model_name": "a family (with `--model-size`) or a network",
    "precision": "16 means bfloat16, in tf1 and tf2 float16 (`--half-type`)",
    "loss_scaling": "128 in tf1, else off; never changes the size of the update",
    "lr_schedule": "stepped has epochs and absolute rates; in tf1 shares of the run and a factor, our `drops`",
    "lr_schedule_params": "`initial_learning_rate` is per image, times the global batch",
    "label_smoothing": "s / C for each class; in tf1 s / (C - 1) for each other class",
    "weight_decay": "decoupled; in tf1 coupled (`l2_regularization`), without the norms on ImageNet",
    "pipeline_schedule": "any number of micro batches works; `--strict-pipeline` asks for the reference's multiples",
    "pipeline_splits": "the names of both applications; `--pipeline` without them prints those of the network",
    "split_include_filter": "where stages are split automatically",
    "split_exclude_filter": "where stages are split automatically",
    "optimizer": "SGD, momentum, RMSprop and LARS of tf1 have its formulas",
    "recomputation": "needs no stages here, except in tf2",
    "logs_per_epoch": "the nearest number that divides the steps of an epoch, with a warning",
    "batch_size": "in tf1 the micro-batch, `--micro-batch-size`",
    "ckpts_per_epoch": "0 saves only at the end",
    "stochastic_rounding": "of 16-bit weights; the same on all replicas",
    "dataset_cache": "read from the disk in every epoch",
    "seed": "a run is reproducible with any number of threads",
    "max_steps_per_call": "the longest call that also fits logs, checkpoints and validations",
    "half_partials": "16-bit results of matrix products, as convolutions have anyway; sums inside are the library's",
    "internal_exchange_optimization_target": "XLA's effort for speed (cycles) or memory; balanced changes nothing",
    "max_cross_replica_buffer_size": "XLA's `xla_gpu_all_reduce_combine_threshold_bytes`",
    "max_reduce_many_buffer_size": "XLA's `xla_gpu_{reduce_scatter,all_gather}_combine_threshold_bytes`",
    "available_memory_proportion": "the memory that XLA's GPU compiler plans with: `xla_gpu_memory_limit_slop_factor`",
    "select_ipus": "`jax_cuda_visible_devices` from that number on",
    "generated_data": "made on the host and sent",
    "synthetic_data": "made on the device",
}


@dataclass(frozen=True, kw_only=True)
class Example:
    """What shows that an option works: see the head of proofs.yml."""

    option: str  # our name
    typed: str
    needs: str
    test: str
    partly: str = ""  # what it does less than the document says


def example_of(document: str, name: str) -> Example:
    """Return how an option of a document is typed, with a value, and the test of its effect."""
    plain = name.replace("-", "_")
    ours = plain if name.replace("_", "-") in ELSEWHERE else find_option(name, option_names(known_options())).name
    row = PROOFS[ours]
    value = row.get(f"value_{document}", row.get("value", ""))
    if isinstance(value, bool):  # document 000 types True, document 001 a flag alone
        value = value if document == "000" else ""
    value = "" if name.startswith("no-") else value
    needs = row.get(f"with_{document}", row.get("with", ""))
    return Example(
        option=ours,
        typed=f"--{name} {value}".strip(),
        needs=needs,
        test=f"tests/{row.get(f'test_{document}', row['test'])}",
        partly=row.get("partly", ""),
    )


def option_status(document: str, name: str) -> str:
    """Return whether an option works here, and how that is known; or why it cannot mean anything."""
    example = example_of(document, name)
    shown_by = f"partly: {example.partly} (`{example.test}`)" if example.partly else f"works (`{example.test}`)"
    if (row := BY_OPTION.get(example.option)) and row.no_effect:
        return f"no counterpart: {row.no_effect.rstrip('.')}"
    reasons = [row for row in NO_EFFECT if row.option == example.option and row.backends != EVERYWHERE]
    return "; ".join([shown_by, *(f"no effect on {', '.join(r.backends)}: {r.reason.rstrip('.')}" for r in reasons)])


def options_of_heading(document: str, heading: str) -> str:
    """Return the table of the options under a heading of a document, with the defaults that it states."""
    lines = ["| option | default there | ours | name here | what it does | status |", "|---|---|---|---|---|---|"]
    known = option_names(known_options())
    for row in STATED[document][heading]:
        name = row["option"]
        here, does = describe(name)
        stated = _cell(row, "value") if "value" in row else "not stated"
        stated += f" ({row['why']})" if "why" in row else ""
        spelled = known.get(name.replace("-", "_").lower())
        ours = known_options()[spelled.name] if spelled else None
        default = format_value(ours.default).replace("|", "\\|") if ours and ours.section != "reference" else ""
        typed, status = example_of(document, name).typed, option_status(document, name)
        lines.append(f"| `{typed}` | {stated} | {default} | {here} | {does} | {status} |")
    return "\n".join(lines)


def describe(name: str) -> tuple[str, str]:
    """Return (our name for an option of the reference, what it does here)."""
    known = option_names(known_options())
    if (plain := name.replace("_", "-")) in ELSEWHERE and name.replace("-", "_") not in known:
        return "the same", ELSEWHERE[plain]
    spelled = find_option(name, known)
    ours = known_options()[spelled.name]
    flag = f"--no-{ours.flag[2:]}" if spelled.negated else ours.flag
    here = "the same" if flag == f"--{name}" else f"`{flag}`"
    told = _converted(spelled.name) or ours.help[0].lower() + ours.help[1:].rstrip(".")
    told = "; ".join(part for part in (told, REMARKS.get(spelled.name, "")) if part)
    turned_off = spelled.negated and ours.kind is BOOL
    return here, ("turned off: " if turned_off else "") + told


def _converted(option: str) -> str:
    row = BY_OPTION.get(option)
    if row is None:
        return ""
    sets = ", ".join(f"`{setting}`" for setting in row.sets)
    return f"{sets}: {row.description}" if sets and row.description else sets or row.description


def _look(**given: Any) -> Callable[[str], Any]:
    return lambda name: given.get(name, "" if name == "dataset_path" else None)


def _cell(table: Mapping[str, Any], name: str) -> str:
    return format_value(table[name]).replace("|", "\\|") if name in table else ""


# Why ours differs, by option; rows of the table that share a reason name the first one.
FORMULAS = "its formula of the learning rate; ours is given by `lr_schedule_params`"
REASONS: Mapping[str, str] = {
    "accelerator_side_preprocess": "on the host it costs time and four times the transfer; no set stays on the device",
    "base_learning_rate": FORMULAS,
    "checkpoint_dir": "checkpoints stay with their run, for `validate`, `resume` and `predict`",
    "ckpts_per_epoch": "as often as logs, at most once an epoch",
    "clean_dir": "a trained network is kept unless one asks for it to be deleted",
    "cutmix_version": "the fraction is drawn anew for each micro batch, as published",
    "dataset": "digits are in the package: `headrace train` alone works without a download",
    "download": "nothing is downloaded unasked",
    "eight_bit_transfer": "follows from where images are preprocessed; on the device it is on",
    "events_divide_epoch": "a call may have any length, so events need not divide an epoch",
    "norm_layer": "networks are as published; batch norm suits the larger batches of today's devices",
    "half_type": "bfloat16 needs no loss scaling and is as fast",
    "l2_regularization": "regularisation is for the user, or a named configuration, to ask for",
    "label_smoothing": "regularisation is for the user, or a named configuration, to ask for",
    "label_smoothing_classes": "over all classes, as published",
    "lars_eeta": "an optimizer's own settings are given with it, in `optimizer_params`",
    "lars_epsilon": "see `lars_eeta`",
    "lars_weight_decay": "see `lars_eeta`",
    "learning_rate_decay": FORMULAS,
    "learning_rate_schedule": FORMULAS,
    "log_freq": "a number of steps; ours is per epoch, `logs_per_epoch`",
    "logs_per_epoch": "one line per epoch; the progress line moves with every call anyway",
    "loss_scaling": "bfloat16 has the range of 32 bits",
    "lr_decay_rate": FORMULAS,
    "lr_drops": FORMULAS,
    "lr_schedule": "steps depend on the dataset; rate, curve and warm-up are chosen where nobody gives them",
    "max_ckpts_to_keep": "all of them fill a disk; the newest three and the best are kept",
    "max_cross_replica_buffer_size": "XLA's own threshold; 0 sends every tensor by itself",
    "max_reduce_many_buffer_size": "XLA's own threshold; 0 sends every tensor by itself",
    "max_steps_per_call": "events and `call_seconds` limit a call; any number of steps may be in one",
    "micro_batch_size": "chosen for dataset and device where nobody gives it ([training](../howto/training.md))",
    "model_name": "a network that fits the default dataset",
    "momentum": "a setting of the optimizer, in `optimizer_params`",
    "normalization": "mean and deviation, as published; centred subtracts the mean alone",
    "num_epochs": "chosen for the dataset where nobody gives it ([training](../howto/training.md))",
    "num_replicas": "one for each accelerator that is found",
    "optimizer_state_offloading": "devices have memory to spare, and steps that stream their state are no loop",
    "pipeline_num_parallel": "as many threads as there are processors",
    "pipeline_schedule": "Interleaved stores less in the same time ([schedules](../explanation/schedules.md))",
    "poly_lr_decay_power": FORMULAS,
    "poly_lr_end_ratio": FORMULAS,
    "precision": "chosen for the device: 32 bits on CPUs, 16.32 on accelerators",
    "rmsprop_base_decay_exp": "see `lars_eeta`",
    "rmsprop_decay": "see `lars_eeta`",
    "rmsprop_epsilon": "see `lars_eeta`",
    "seed": "a command repeated gives the same bits; -1 draws one",
    "stable_norm": "32-bit sums are accurate enough, and two passes are slower",
    "stochastic_rounding": "16-bit weights lose small updates without it (document 000 states off, document 001 on)",
    "validations_per_epoch": "as often as logs, at most once an epoch",
    "warmup_epochs": "chosen with the rate where nobody gives it ([training](../howto/training.md))",
    "weight_decay": "1 takes the learning rate's fraction of every weight at each step; a run that has it warns",
    "weight_decay_exclude": "what is decayed is the user's choice; a named configuration says it",
}


def defaults_markdown() -> str:
    """Return the table of defaults that differ between the applications, with the reason for ours."""
    large = tf1_defaults(_look(dataset="imagenet", optimizer="momentum"))
    small = tf1_defaults(_look(dataset="cifar10", optimizer="momentum"))
    efficient = tf1_defaults(_look(dataset="imagenet", optimizer="rmsprop", model_name="efficientnet"))
    efficient["model_name"] = "efficientnet"
    second = tf2_defaults(_look(gradient_accumulation_count=2, optimizer_params={"momentum": 0.9}))
    lines = [
        "| option | ours | tf2 | tf1: ImageNet | tf1: CIFAR | tf1: EfficientNet | why ours differs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted({*large, *efficient, *second}):
        ours = format_value(known_options()[name].default)
        values = [_cell(table, name) for table in (second, large, small, efficient)]
        if any(value not in ("", ours) for value in values):
            lines.append(f"| `{name}` | {ours} | {' | '.join(values)} | {REASONS[name]} |")
    return "\n".join(lines)
