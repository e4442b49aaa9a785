"""The commands of the seeds as values: read from commands.yml, made into words, planned by parser and planner."""

import functools
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import yaml

from headrace.cli.bench import add_arguments as bench_arguments
from headrace.cli.options import parse, read_config_arguments, resolve_arguments
from headrace.config.load import Resolved
from headrace.config.section_model import norm_choice
from headrace.job.launch_request import LaunchRequest, parse_launch_options
from headrace.job.local_processes import process_variables
from headrace.run.design import Design, design_run
from headrace_reference.scripts import SCRIPTS

NOT_OURS = "not ours"
OWN_BLOCKS = """
your_config: {model: cifar_resnet8, dataset: cifar10, micro-batch-size: 16, num-epochs: 2}
my_config: {model: resnet, model_size: 8, dataset: cifar-10, epochs: 4}
"""


@dataclass(frozen=True, kw_only=True)
class SeedCommand:
    """One command that a seed prints: see the head of commands.yml."""

    seed: str
    line: int
    text: str
    does: str
    kind: str = "train"
    plan: dict[str, Any] = field(default_factory=dict)
    bench: dict[str, Any] = field(default_factory=dict)
    launch: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    run: str = ""
    ran: str = ""  # when a slow one was last executed
    partly: str = ""  # what does not happen as typed, and what to type for it
    here: str = ""  # what to type in the place of a command that is not ours
    test: str = ""  # where that is tested
    file: str = ""
    fill: dict[str, str] = field(default_factory=dict)
    insert: str = ""
    fragment: str = ""
    tf_config: bool = False
    wandb: bool = False

    @property
    def name(self) -> str:
        return f"{self.seed}:{self.line}"

    def words(self, place: Path) -> list[str]:
        """Return the words that a shell would make of it, with values for what the seed leaves open."""
        text = f"{self.fragment} {self.text}".strip()
        for left_open, value in {
            **self.fill,
            "$DATASETS_DIR": str(place),
            ".../imagenet-data": str(place / "imagenet-data"),
            "$WORKSPACE": str(place),
        }.items():
            text = text.replace(left_open, value)
        if self.file:
            (place / self.file).write_text(OWN_BLOCKS)
        words = shlex.split(text)
        while "=" in words[0]:  # a variable in front of the command
            words.pop(0)
        if self.insert and words[0].startswith("python"):
            words.insert(1, self.insert)
        return words


@functools.cache
def read_commands() -> tuple[SeedCommand, ...]:
    """Return all commands, in the order of the seeds."""
    return tuple(SeedCommand(**row) for row in yaml.safe_load(Path(__file__).with_name("commands.yml").read_text()))


def split_launch(words: list[str]) -> tuple[LaunchRequest | None, str, list[str]]:
    """Return (what is launched or None, name of the script, its argv) of a command's words."""
    request = parse_launch_options(words[1:], "poprun") if words[0] == "poprun" else None
    words = list(request.program) if request else words
    assert words[0] in ("python", "python3"), words
    return request, PurePath(words[1]).stem, words[2:]


def script_words(script: str, argv: list[str]) -> list[str]:
    """Return the words of our command that a script makes of its own."""
    return SCRIPTS[script.removesuffix("_ipu")](argv)


def planned(words: list[str]) -> tuple[Resolved, Design]:
    """Return the configuration and design of `headrace train ...`."""
    assert words[0] == "train", words
    resolved, _ = parse(words[1:], "headrace train")
    return resolved, design_run(resolved.config, absent_ok=True)


def variables(request: LaunchRequest | None) -> dict[str, str]:
    """Return what the launcher tells its first process."""
    return process_variables(request, 0, "127.0.0.1:1", ()) if request else {}


def facts_of(resolved: Resolved, design: Design) -> dict[str, Any]:
    """Return what the seeds state of a run, by the names of commands.yml."""
    config, plan = resolved.config, design.plan
    learning, pipeline = config.learning, plan.pipeline
    return {
        "model": design.network.name,
        "dataset": config.data.dataset,
        "image_size": design.info.image_hwc[0],
        "on_device": config.data.accelerator_side_preprocess,
        "eight_bit": config.data.eight_bit_transfer,
        "parameters": plan.num_parameters,
        "norm": norm_choice(config.model)["name"],
        "precision": config.numerics.precision,
        "micro_batch": plan.batch.micro_batch_size,
        "accumulation": plan.batch.gradient_accumulation_count,
        "replicas": plan.batch.num_replicas,
        "global_batch": plan.batch.global_batch_size,
        "stages": pipeline.num_stages if pipeline else 1,
        "devices": plan.num_devices,
        "schedule": pipeline.schedule if pipeline else None,
        "recomputation": config.pipeline.recomputation,
        "epochs": plan.steps.num_epochs,
        "updates_per_epoch": plan.steps.updates_per_epoch,
        "calls": plan.steps.num_calls,
        "steps_per_call": plan.steps.steps_per_call,
        "log_every": plan.steps.log_every,
        "validation": config.validation.validation,
        "optimizer": learning.optimizer,
        "momentum": learning.optimizer_params.get("momentum"),
        "l2": learning.l2_regularization,
        "curve": learning.lr_schedule,
        "warmup": (learning.lr_warmup_params or {}).get("warmup_epochs"),
        "learning_rate_per_image": learning.lr_schedule_params.get("initial_learning_rate"),
        "smoothing": learning.label_smoothing,
    }


def benched(words: list[str]) -> dict[str, Any]:
    """Return what the seeds state of a measurement of inference."""
    assert words[:3] == ["bench", "--mode", "inference"]
    taken = read_config_arguments(words[1:], "headrace bench", bench_arguments)
    config = resolve_arguments(taken).config
    return {
        "model": config.model.model_name,
        "dataset": config.data.dataset,
        "batch": config.batch.micro_batch_size,
        "repeat": taken.args.num_calls,
        "norm": norm_choice(config.model)["name"],
        "made_up": config.data.synthetic_on,
        "precision": config.numerics.precision,
        "eight_bit": config.data.eight_bit_transfer,
    }
