"""A saved run and a new command line, in the words of either application: the options of training may be typed again.

Document 001, of validation.py: the options should be the same as those used for training, with --restore-path.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.cli.bench import add_arguments, call_length
from headrace.cli.options import read_arguments, read_config_arguments, resolve_arguments, without_recipe
from headrace.config.load import Resolved, from_saved, override, to_saved
from headrace.core.errors import ConfigError
from headrace_reference.scripts import SCRIPTS
from tests.seeds.option_tables import NAMES, example_of
from tests.seeds.reading import SeedCommand, read_commands, script_words, split_launch, variables
from tests.seeds.running import tf_config

RUN, GA = "runs/a", "gradient_accumulation_count"
DOCUMENTS = {"tf2": "000", "tf1": "001"}
TRAINED = ("train.py", "headrace train", "efficientnet_CIFAR10_train.py")
CONTINUED = ("train.py", "validation.py", "restore.py", "headrace validate", "headrace resume")
NOT_OF_A_RUN = ("config", "config-path", "repeat", "restore-path", "distributed")
WITH = {
    "tf2": "--model cifar_resnet8",
    "tf1": "--dataset cifar-10",
}  # other options need norms, and data of a known shape


def trained(words: str, environ: Mapping[str, str] | None = None, script: str = "train.py") -> Resolved:
    """Return what a run that a script was given these words has saved."""
    given = shlex.split(words)
    given = SCRIPTS[script.removesuffix(".py")](given)[1:] if script.endswith(".py") else given
    return stored(resolve_arguments(read_config_arguments(given, "headrace train"), environ or {}))


def stored(resolved: Resolved) -> Resolved:
    return from_saved(json.loads(json.dumps(to_saved(resolved))))


def continued(saved: Resolved, script: str, words: str, environ: Mapping[str, str] | None = None) -> Resolved:
    """Return the configuration of a run that a script continues with these words."""
    given = shlex.split(words)
    if script.endswith(".py"):
        given = SCRIPTS[script.removesuffix(".py")]([*given, "--restore-path", RUN])
    else:
        given = [script.split()[1], RUN, *given]
    command, path, *left = given
    assert command in ("resume", "validate")
    assert path == RUN
    parsed = read_arguments(without_recipe(left), f"headrace {command}")
    return override(saved, parsed.options, environ or {})


def written(resolved: Resolved) -> object:
    """Return all values of a configuration as a run saves them, and what is translated anew."""
    saved = json.loads(json.dumps(to_saved(resolved)))
    return saved["values"], {name: given["value"] for name, given in saved.get("source", {}).items()}


def options_of(application: str) -> list[str]:
    names = ["--iterations 20 --log-freq 10", "--epochs 3"] if application == "tf1" else []
    for name in NAMES[application]:
        if name.replace("_", "-") not in NOT_OF_A_RUN:
            example = example_of(DOCUMENTS[application], name)
            names.append(" ".join(part for part in (WITH[application], example.needs, example.typed) if part))
    return names


CASES = [(application, words) for application in NAMES for words in options_of(application)]


@pytest.mark.parametrize("trainer", TRAINED[:2])
@pytest.mark.parametrize(("application", "words"), CASES)
def test_the_options_of_training_may_be_typed_again(application: str, words: str, trainer: str) -> None:
    saved = trained(f"{words} --application {application}", script=trainer)
    for script in CONTINUED:
        assert written(continued(saved, script, words)) == written(saved), script


OURS = (
    "--batch-size 16",
    "--micro-batch-size 8",
    "--num-epochs 3",
    "--seed 4",
    "--precision 32.32",
    "--max-steps-per-call 5",
)


@pytest.mark.parametrize("trainer", TRAINED)
@pytest.mark.parametrize("words", OURS)
def test_our_own_options_may_be_typed_again_behind_any_script(words: str, trainer: str) -> None:
    application = " --application tf2" if trainer == "train.py" else ""
    if trainer.startswith("efficientnet") and words.startswith("--batch-size"):
        words = "--global-batch-size 192"  # the recipe names a micro batch and its accumulation
    saved = trained(words + application, script=trainer)
    for script in CONTINUED:
        assert written(continued(saved, script, words)) == written(saved), script


FIRST = "--application tf1 --dataset cifar-10 --model-size 8"


@pytest.mark.parametrize("script", CONTINUED)
@pytest.mark.parametrize(
    ("before", "now", "wanted"),
    [
        ("--batch-size 8 --gradient-accumulation-count 4", "--batch-size 16", {"micro_batch_size": 16, GA: 4}),
        ("--batch-size 8", "--micro-batch-size 4", {"micro_batch_size": 4, "batch_size": None}),
        ("--micro-batch-size 4", "--batch-size 8", {"micro_batch_size": 8, "batch_size": None}),
        ("--weight-decay 0.01", "--weight-decay 0.02", {"l2_regularization": 0.02, "weight_decay": 0}),
        ("--weight-decay 0.01", "--l2-regularization 0.02", {"l2_regularization": 0.02, "weight_decay": 0}),
        ("--weight-decay 0", "--weight-decay 0.02", {"l2_regularization": 0.02, "weight_decay": 0}),
        ("--iterations 20", "--epochs 3", {"num_epochs": 3, "weight_updates_per_epoch": -1}),
        ("--epochs 3", "--iterations 20", {"num_epochs": 1, "weight_updates_per_epoch": 20}),
        ("--iterations 20", "--iterations 30", {"num_epochs": 1, "weight_updates_per_epoch": 30}),
        ("--batches-per-step 5", "--batches-per-step 3", {"max_steps_per_call": 3}),
        ("--epochs-per-ckpt 2 --epochs 4", "--ckpts-per-epoch 1", {"ckpts_per_epoch": 1}),
        ("--hostside-norm", "--accelerator-side-preprocess True", {"accelerator_side_preprocess": True}),
        ("--accelerator-side-preprocess True", "--hostside-norm", {"accelerator_side_preprocess": False}),
    ],
)
def test_what_is_typed_now_overrules_what_was_saved(
    before: str, now: str, wanted: Mapping[str, object], script: str
) -> None:
    values = to_saved(continued(trained(f"{FIRST} {before}"), script, now))["values"]
    assert {name: values[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("first", "second"),
    [("--abs-learning-rate 0.5", "--base-learning-rate -4"), ("--learning-rate 0.5", "--abs-learning-rate 0.25")],
)
def test_a_rate_said_in_another_way(first: str, second: str) -> None:
    again, alone = continued(trained(f"{FIRST} {first}"), "restore.py", second), trained(f"{FIRST} {second}")
    rates = [to_saved(one)["values"]["lr_schedule_params"] for one in (again, alone)]
    assert json.dumps(rates[0]) == json.dumps(rates[1])


@pytest.mark.parametrize(
    "now",
    ["--batch-size 8 --micro-batch-size 8", "--iterations 20 --epochs 1", "--weight-decay 1 --l2-regularization 1"],
)
def test_both_of_them_typed_now_are_refused(now: str) -> None:
    with pytest.raises(ConfigError, match=r"mixed|Both are given"):
        continued(trained(f"{FIRST} --seed 1"), "validation.py", now)


COMMANDS = [each for each in read_commands() if each.plan and each.kind == "train" and " train.py" in each.text]


@pytest.mark.parametrize("command", [pytest.param(each, id=each.name) for each in COMMANDS])
def test_every_command_of_the_documents(command: SeedCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    request, script, argv = split_launch(command.words(tmp_path))
    environ = variables(request) | ({"TF_CONFIG": tf_config(301)} if command.tf_config else {})
    words = script_words(script, argv)
    resolved = resolve_arguments(read_config_arguments(words[1:], "headrace train"), environ)
    saved = stored(resolved)
    assert written(continued(saved, "validation.py", shlex.join(argv), environ)) == written(saved)
    assert written(continued(saved, "restore.py", shlex.join(argv), environ)) == written(saved)


@pytest.mark.parametrize(("typed", "length"), [("", 50), ("--batches-per-step 3", 3), ("--batches-per-step 200", 200)])
def test_a_measurement_of_inference_takes_the_batches_of_a_call(typed: str, length: int) -> None:
    words = f"--model resnet --model-size 8 --dataset cifar-10 --batch-size 4 --synthetic-data --repeat 4 {typed}"
    command, *left = SCRIPTS["validation"](shlex.split(words))
    assert command == "bench"
    parsed = read_config_arguments(left, "headrace bench", add_arguments)
    assert call_length(resolve_arguments(parsed, {}), parsed.args.steps_per_call) == length


def test_two_lengths_of_a_call_are_refused() -> None:
    words = shlex.split("--config none --steps-per-call 20 --max-steps-per-call 10")
    parsed = read_config_arguments(words, "headrace bench", add_arguments)
    with pytest.raises(ConfigError, match="--steps-per-call 20 and --max-steps-per-call 10"):
        call_length(resolve_arguments(parsed, {}), parsed.args.steps_per_call)
