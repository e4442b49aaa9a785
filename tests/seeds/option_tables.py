"""Every option of the reference's two applications, and what it is here: tables of docs/reference.

The names are the reference's; everything else comes from the schema, the table of translations and that of options
without effect.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from headrace.config.field import find_option, option_names
from headrace.config.section_compiler import EVERYWHERE, NO_EFFECT
from headrace.config.values import BOOL, format_value
from headrace.reference.defaults import tf1_defaults, tf2_defaults
from headrace.reference.entrance import known_options
from headrace.reference.option_table import BY_OPTION

STATED: Mapping[str, Mapping[str, list[dict[str, Any]]]] = yaml.safe_load(
    Path(__file__).with_name("options.yml").read_text()
)
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
    "distributed": "processes are found by `$TF_CONFIG`; see [hosts.md](../hosts.md)",
    "wandb": "a tracker of the run",
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
    "internal_exchange_optimization_target": "XLA's effort for speed (cycles) or for memory; on the CPU its scheduler",
    "max_cross_replica_buffer_size": "XLA's `xla_gpu_all_reduce_combine_threshold_bytes`",
    "max_reduce_many_buffer_size": "XLA's `xla_gpu_{reduce_scatter,all_gather}_combine_threshold_bytes`",
    "available_memory_proportion": "the memory that XLA's GPU compiler plans with: `xla_gpu_memory_limit_slop_factor`",
    "select_ipus": "`jax_cuda_visible_devices` from that number on",
    "generated_data": "made on the host and sent",
    "synthetic_data": "made on the device",
}


def options_of_heading(document: str, heading: str) -> str:
    """Return the table of the options under a heading of a document, with the defaults that it states."""
    lines = ["| option | default there | ours | type here | what it does |", "|---|---|---|---|---|"]
    for row in STATED[document][heading]:
        here, does = describe(row["option"])
        stated = _cell(row, "value") if "value" in row else "not stated"
        stated += f" ({row['why']})" if "why" in row else ""
        known = option_names(known_options())
        spelled = known.get(row["option"].replace("-", "_").lower())
        ours = known_options()[spelled.name] if spelled else None
        default = format_value(ours.default).replace("|", "\\|") if ours and ours.section != "reference" else ""
        flag = f"`--{row['option']}`"
        lines.append(f"| {flag} | {stated} | {default} | {flag if here == 'the same' else here} | {does} |")
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
    reasons, converted = _reasons(spelled.name), _converted(spelled.name)
    told = converted or (
        "" if reasons and spelled.name not in REMARKS else ours.help[0].lower() + ours.help[1:].rstrip(".")
    )
    told = "; ".join(part for part in (told, REMARKS.get(spelled.name, ""), *reasons) if part)
    turned_off = spelled.negated and ours.kind is BOOL
    return here, ("turned off: " if turned_off else "") + told


def _converted(option: str) -> str:
    row = BY_OPTION.get(option)
    if row is None:
        return ""
    sets = ", ".join(f"`{setting}`" for setting in row.sets)
    return f"{sets}: {row.description}" if sets and row.description else sets or row.description


def _reasons(option: str) -> list[str]:
    """Return why an option has no effect, and where."""
    row = BY_OPTION.get(option)
    if row and row.no_effect:
        return [f"no effect: {row.no_effect.rstrip('.')}"]
    rows = [row for row in NO_EFFECT if row.option == option]
    return [
        f"no effect{'' if row.backends == EVERYWHERE else ' on ' + ', '.join(row.backends)}: {row.reason.rstrip('.')}"
        for row in rows
    ]


def _look(**given: Any) -> Callable[[str], Any]:
    return lambda name: given.get(name, "" if name == "dataset_path" else None)


def _cell(table: Mapping[str, Any], name: str) -> str:
    return format_value(table[name]).replace("|", "\\|") if name in table else ""


def defaults_markdown() -> str:
    """Return the table of defaults that differ between the applications."""
    large = tf1_defaults(_look(dataset="imagenet", optimizer="momentum"))
    small = tf1_defaults(_look(dataset="cifar10", optimizer="momentum"))
    efficient = tf1_defaults(_look(dataset="imagenet", optimizer="rmsprop", model_name="efficientnet"))
    efficient["model_name"] = "efficientnet"
    second = tf2_defaults(_look(gradient_accumulation_count=2, optimizer_params={"momentum": 0.9}))
    lines = ["| option | ours | tf2 | tf1: ImageNet | tf1: CIFAR | tf1: EfficientNet |", "|---|---|---|---|---|---|"]
    for name in sorted({*large, *efficient, *second}):
        ours = format_value(known_options()[name].default)
        values = [_cell(table, name) for table in (second, large, small, efficient)]
        if any(value not in ("", ours) for value in values):
            lines.append(f"| `{name}` | {ours} | {' | '.join(values)} |")
    return "\n".join(lines)
