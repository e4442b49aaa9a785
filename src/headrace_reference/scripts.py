"""The reference's scripts: each turns its arguments into a command line of ours.

The files at the repository's root (train.py, validation.py, ...) are these scripts. The reference's two applications
share their names; which one a command line is written for follows from the options that it uses.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.config.command_line import take_value
from headrace.config.load import choose_block, named_blocks
from headrace.core.errors import ConfigError
from headrace.core.json_text import parse_json
from headrace_reference.applications import detect_application, names_application, with_application

EFFICIENTNET = "efficientnet_cifar10_pipeline"
ONE_DEVICE = ("--pipeline-splits", "0", "--micro-batch-size", "192", "--gradient-accumulation-count", "1")
CONFIGS_FILE = "configs.yml"
_SYNTHETIC = ("--generated-data", "--synthetic-data")


PLAN = "--plan"


def script_words(script: str, argv: list[str]) -> list[str]:
    """Return the words of our command that a script makes of its own; with --plan it plans instead of training."""
    words = SCRIPTS[script]([word for word in argv if word != PLAN])
    if PLAN not in argv or not words:
        return words
    if words[0] != "train":
        raise ConfigError(
            f"{PLAN} is given, but this would be `headrace {words[0]}`.",
            rule="What can be planned is a training.",
            remedy=f"Leave {PLAN} out.",
        )
    return ["plan", *words[1:]]


def train(argv: list[str]) -> list[str]:
    """Train; with --restore-path resume a run, or validate it if it is finished."""
    place, words = take_value(_with_own_file(argv), "--restore-path")
    if place is None:
        return ["train", *_for_application(words)]
    if is_finished(Path(place)):
        return ["validate", place, *words]
    return ["resume", place, *words]


def validation(argv: list[str]) -> list[str]:
    """Validate checkpoints (--restore-path); without one measure inference (synthetic data) or untrained weights."""
    place, words = take_value(_with_own_file(argv), "--restore-path")
    if place is not None:
        return ["validate", place, *words]
    if any(_name(word) in _SYNTHETIC for word in words):
        return ["bench", "--mode", "inference", *_first_application(words)]
    if not _asks_for_help(words):
        print("warning: no --restore-path: the weights are untrained", file=sys.stderr)
    return ["train", *_first_application(words), "--no-training"]


def restore(argv: list[str]) -> list[str]:
    """Resume a run."""
    return ["resume", *_restored("restore.py", argv)]


def weight_avg(argv: list[str]) -> list[str]:
    """Average the checkpoints of a run."""
    return ["average", *_restored("weight_avg.py", argv)]


def inference(argv: list[str]) -> list[str]:
    """Validate the newest EfficientNet of efficientnet_CIFAR10_train.py, or the run named first."""
    if argv and (not argv[0].startswith("-") or _asks_for_help(argv)):
        return ["validate", *argv]
    log_dir, _ = take_value(argv, "--log-dir")
    runs = sorted(Path(log_dir or "runs").glob("*/config.json"))
    found = [file for file in runs if _is_efficientnet_on_cifar10(file)]
    if not found:
        raise ConfigError(
            f"There is no run of an EfficientNet on CIFAR-10 in {log_dir or 'runs'}.",
            remedy="Train it first: python efficientnet_CIFAR10_train.py; or give the directory of a run.",
        )
    newest = max(found, key=lambda file: file.stat().st_mtime).parent
    return ["validate", str(newest), "--last", *argv]


def _is_efficientnet_on_cifar10(file: Path) -> bool:
    """Say whether a run's configuration is one, whatever the run is called."""
    try:
        values = parse_json(file.read_bytes())["values"]
        return (values["model_name"], values["dataset"]) == ("efficientnet_b0", "cifar10")
    except (OSError, ValueError, LookupError, TypeError):
        return False


SCRIPTS: Mapping[str, Callable[[list[str]], list[str]]] = {
    "train": train,
    "validation": validation,
    "restore": restore,
    "weight_avg": weight_avg,
    "dataset_benchmark": lambda argv: ["data", "bench", "--parts", "block", *with_application(argv)],
    "verify_dataset": lambda argv: ["data", "verify", *with_application(argv)],
    "efficientnet_CIFAR10_train": lambda argv: ["train", "--config", EFFICIENTNET, *argv],
    "efficientnet_CIFAR10_train_gpu": lambda argv: ["train", "--config", EFFICIENTNET, *ONE_DEVICE, *argv],
    "efficientnet_CIFAR10_inference": inference,
}


def is_finished(place: Path) -> bool:
    """Whether a run has been trained to its end, by its records: its checkpoints may be anywhere."""
    from headrace.report.run_summary import read_summary  # here, since it loads JAX

    return read_summary(place).state == "finished"


def _with_own_file(argv: list[str]) -> list[str]:
    """Add --config-path where `configs.yml`, here or beside the script, has the named configuration."""
    name, file = take_value(argv, "--config")[0], take_value(argv, "--config-path")[0]
    if name is None or file is not None:
        return argv
    for folder in (Path(), Path(sys.argv[0]).parent):
        path = folder / CONFIGS_FILE
        if path.is_file() and name in named_blocks(str(path)):
            return [*argv, "--config-path", str(path)]
    return argv


def _restored(script: str, argv: list[str]) -> list[str]:
    """Put the run that --restore-path names in front; a script that needs one says so."""
    place, words = take_value(_with_own_file(argv), "--restore-path")
    if place is None and not _asks_for_help(words):
        raise ConfigError(f"{script} needs --restore-path.", remedy="Give the directory of a run, such as runs/NAME.")
    return [place, *words] if place else words


def _for_application(argv: list[str]) -> list[str]:
    """Add --application, judged by the options of the command line and of the user's own configuration file."""
    name, file = take_value(argv, "--config")[0], take_value(argv, "--config-path")[0]
    if name is None or file is None:
        return with_application(argv)
    block = choose_block(name, file)
    arguments = [*(f"--{entry.key}={entry.value}" for entry in block.merged + block.own), *argv]
    if names_application(arguments, by_config=False):
        return argv
    return [*argv, "--application", detect_application(arguments)]


def _first_application(argv: list[str]) -> list[str]:
    """Only the reference's first application has a validation.py."""
    return argv if names_application(argv) else [*argv, "--application", "tf1"]


def _name(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def _asks_for_help(argv: Sequence[str]) -> bool:
    return any(word in ("-h", "--help") for word in argv)
