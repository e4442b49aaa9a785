"""Every option of the reference's two applications, and what it is here: the tables of docs/seed_options.md.

The names are the reference's; everything else comes from the schema, the table of translations and that of options
without effect.
"""

from collections.abc import Callable, Mapping
from typing import Any

from headrace.config.field import find, spellings
from headrace.config.section_compiler import EVERYWHERE, NO_EFFECT
from headrace.config.values import BOOL, shown
from headrace.reference.defaults import tf1_defaults, tf2_defaults
from headrace.reference.entrance import known_options
from headrace.reference.option_table import BY_OPTION

_FIRST = """
    model model-size batch-norm group-norm groups BN-span group-dim expand-ratio batch-size base-learning-rate
    epochs epoch iterations data-dir dataset lr-schedule learning-rate-decay learning-rate-schedule warmup-epochs
    gradient-accumulation-count eight-bit-io shards sharding-exclude-filter sharding-include-filter pipeline
    pipeline-splits pipeline-split pipeline-schedule enable-recomputation enable-recompute xla-recompute precision
    no-stochastic-rounding batches-per-step select-ipus fp-exceptions no-hostside-norm gc-profile
    available-memory-proportion no-validation valid-batch-size generated-data synthetic-data repeat replicas
    optimiser momentum label-smoothing weight-decay loss-scaling seed standard-imagenet no-dataset-cache image-size
    normalise-input stable-norm enable-half-partials max-cross-replica-buffer-size
    internal-exchange-optimisation-target disable-variable-offloading ckpts-per-epoch enable-conv-dithering
    weight-avg-exp weight-avg-N cutmix-lambda mixup-alpha pipeline-num-parallel wandb restore-path distributed
    config
"""
_SECOND = """
    config config-path on-demand seed checkpoints checkpoint-dir clean-dir dataset dataset-path model-name model
    eight-bit-transfer pipeline-num-parallel training micro-batch-size num-epochs logs-per-epoch
    weight-updates-per-epoch num-replicas gradient-accumulation-count gradient-accumulation global-batch-size
    precision pipeline-splits device-mapping pipeline-schedule optimizer optimizer-params loss-scaling weight-decay
    l2-regularization recomputation accelerator-side-preprocess stochastic-rounding optimizer-state-offloading
    fp-exceptions lr-schedule lr-warmup-params lr-schedule-params lr-staircase dbn-replica-group-size bn-momentum
    label-smoothing half-partials internal-exchange-optimization-target max-cross-replica-buffer-size
    max-reduce-many-buffer-size gather-conv-output stable-norm available-memory-proportion wandb validation
    validation-micro-batch-size validation-num-replicas
"""
FIRST, SECOND = tuple(_FIRST.split()), tuple(_SECOND.split())

# Names that are not options of a run.
ELSEWHERE: Mapping[str, str] = {
    "config": "a named configuration: a recipe of the package, or a block of `--config-path`",
    "config-path": "the YAML file that has it",
    "repeat": "measurements of `headrace bench`",
    "distributed": "processes are found by `$TF_CONFIG`; see [hosts.md](hosts.md)",
    "wandb": "a tracker of the run",
}

# Remarks, by our option.
REMARKS: Mapping[str, str] = {
    "dataset": "cifar-10, cifar-100 and gc-imagenet are accepted; in tf1 the path names it",
    "dataset_path": "also `$DATASETS_DIR`, `$DATA_DIR`",
    "model_name": "a family (with `--model-size`) or a network",
    "precision": "16 means bfloat16, in tf1 float16 (`--half-type`)",
    "loss_scaling": "128 in tf1, else off; never changes the size of the update",
    "lr_schedule": "stepped has epochs and absolute rates; in tf1 shares of the run and a factor, our `drops`",
    "lr_schedule_params": "`initial_learning_rate` is per image, times the global batch",
    "label_smoothing": "s / C for each class; in tf1 s / (C - 1) for each other class",
    "weight_decay": "decoupled; in tf1 coupled (`l2_regularization`), without the norms on ImageNet",
    "pipeline_schedule": "any number of micro batches works; `--strict-pipeline` asks for the reference's multiples",
    "pipeline_splits": "the names of both applications; `--pipeline` without them prints those of the network",
    "optimizer": "SGD, momentum, RMSprop and LARS of tf1 have its formulas",
    "recomputation": "needs no stages here, except in tf2",
    "logs_per_epoch": "the nearest number that divides the steps of an epoch, with a warning",
    "batch_size": "in tf1 the micro-batch, `--micro-batch-size`",
    "ckpts_per_epoch": "0 saves only at the end",
    "clean_dir": "off by default",
    "accelerator_side_preprocess": "on by default",
    "optimizer_state_offloading": "off by default",
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


def seed_options_markdown() -> str:
    """Return the table of the reference's options, one row each, in the order of their names."""
    lines = ["| option | of | here | what it does |", "|---|---|---|---|"]
    for name in sorted({*FIRST, *SECOND}, key=str.lower):
        apps = " ".join(app for app, names in (("tf1", FIRST), ("tf2", SECOND)) if name in names)
        here, does = describe(name)
        lines.append(f"| `--{name}` | {apps} | {here} | {does} |")
    return "\n".join(lines)


def describe(name: str) -> tuple[str, str]:
    """Return (our name for an option of the reference, what it does here)."""
    known = spellings(known_options())
    if name in ELSEWHERE and name.replace("-", "_") not in known:
        return "the same", ELSEWHERE[name]
    spelled = find(name, known)
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
    return shown(table[name]).replace("|", "\\|") if name in table else ""


def defaults_markdown() -> str:
    """Return the table of defaults that differ between the applications."""
    large = tf1_defaults(_look(dataset="imagenet", optimizer="momentum"))
    small = tf1_defaults(_look(dataset="cifar10", optimizer="momentum"))
    efficient = tf1_defaults(_look(dataset="imagenet", optimizer="rmsprop", model_name="efficientnet"))
    efficient["model_name"] = "efficientnet"
    second = tf2_defaults(_look(gradient_accumulation_count=2, optimizer_params={"momentum": 0.9}))
    lines = ["| option | ours | tf2 | tf1: ImageNet | tf1: CIFAR | tf1: EfficientNet |", "|---|---|---|---|---|---|"]
    for name in sorted({*large, *efficient, *second}):
        ours = shown(known_options()[name].default)
        values = [_cell(table, name) for table in (second, large, small, efficient)]
        if any(value not in ("", ours) for value in values):
            lines.append(f"| `{name}` | {ours} | {' | '.join(values)} |")
    return "\n".join(lines)
