"""The scripts at the repository's root: each finds the package, and turns its words into a command of ours."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.cli.main import run_script
from headrace.config.command_line import take_value
from headrace.core.errors import ConfigError
from headrace.telemetry.records import RunEnd
from headrace_reference.scripts import SCRIPTS, is_finished

ROOT = Path(__file__).parents[2]
FILES = sorted([*SCRIPTS, "efficientnet_CIFAR10_train_ipu", "efficientnet_CIFAR10_inference_ipu"])

WORDS = {
    ("train", "--model cifar_resnet8 --num-epochs 3"): "train --model cifar_resnet8 --num-epochs 3 --application tf2",
    ("train", "--model-size 50 --batch-size 8"): "train --model-size 50 --batch-size 8 --application tf1",
    ("train", "--config resnet8_test --num-epochs 2"): "train --config resnet8_test --num-epochs 2",
    ("train", "--restore-path runs/a --seed 1"): "resume runs/a --seed 1",
    ("validation", "--model resnet --synthetic-data --repeat 10"): (
        "bench --mode inference --model resnet --synthetic-data --repeat 10 --application tf1"
    ),
    (
        "validation",
        "--config mk2_resnet50_gn_16ipus --data-dir d --restore-path=runs/a",
    ): "validate runs/a --config mk2_resnet50_gn_16ipus --data-dir d",
    ("validation", "--model resnet --data-dir d"): "train --model resnet --data-dir d --application tf1 --no-training",
    ("restore", "--restore_path runs/a/"): "resume runs/a/",
    ("weight_avg", "--restore-path runs/a --mode exponential --decay 0.9 -N 4"): (
        "average runs/a --mode exponential --decay 0.9 -N 4"
    ),
    ("dataset_benchmark", "--dataset cifar10"): "data bench --parts block --dataset cifar10 --application tf2",
    ("verify_dataset", ""): "data verify --application tf2",
    ("efficientnet_CIFAR10_train", "--seed 2"): "train --config efficientnet_cifar10_pipeline --seed 2",
    ("efficientnet_CIFAR10_train_gpu", ""): (
        "train --config efficientnet_cifar10_pipeline --pipeline-splits 0 --micro-batch-size 192 "
        "--gradient-accumulation-count 1"
    ),
    ("efficientnet_CIFAR10_inference", "runs/a"): "validate runs/a",
}


@pytest.mark.parametrize(("script", "given"), WORDS)
def test_words(script, given):
    assert SCRIPTS[script](given.split()) == WORDS[script, given].split()


def test_there_is_a_file_for_each_and_it_is_a_few_lines():
    for name in FILES:
        lines = (ROOT / f"{name}.py").read_text().splitlines()
        assert len(lines) < 15
        assert lines[-1] == f'    sys.exit(run_script("{name.removesuffix("_ipu")}"))'


@pytest.mark.parametrize("name", FILES)
def test_a_clone_works_without_being_installed(name, tmp_path):
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, ROOT / f"{name}.py", "--help"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: headrace ")
    assert "--dataset-path" in done.stdout


@pytest.mark.parametrize(
    ("script", "given", "parts"),
    [
        ("restore", "", ["restore.py needs --restore-path", "runs/NAME"]),
        ("restore", "--restore-path", ["--restore-path has no value"]),
        ("weight_avg", "-N 3", ["weight_avg.py needs --restore-path"]),
        (
            "validation",
            "--restore-path runs/none --config resnet8_tst",
            ["no configuration resnet8_tst", "resnet8_test?"],
        ),
        ("train", "--restore-path runs/none", ["runs/none"]),
        ("efficientnet_CIFAR10_inference", "--log-dir nowhere", ["no run of an EfficientNet", "Train it first"]),
        (
            "train",
            '--base-learning-rate -11 --lr-schedule-params {"initial_learning_rate":1}',
            ["Options of two applications are mixed"],
        ),
    ],
)
def test_refusals_come_in_words(script, given, parts, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_script(script, given.split()) == 2
    told = capsys.readouterr().err
    for part in parts:
        assert part in told
    assert list(tmp_path.iterdir()) == []


def test_configurations_of_a_file_beside_the_command_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs.yml").write_text("mine: {model_size: 8, dataset: cifar-10}\nother: {model: cifar_resnet8}\n")
    found = "train --config mine --epochs 2 --config-path configs.yml --application tf1"
    assert SCRIPTS["train"](["--config", "mine", "--epochs", "2"]) == found.split()
    assert SCRIPTS["train"](["--config", "other"])[-1] == "tf2"
    shipped = ["--config", "resnet8_test"]
    assert SCRIPTS["train"](shipped) == ["train", *shipped]
    monkeypatch.chdir(ROOT)
    assert SCRIPTS["train"](["--config", "my_config"]) == [
        "train",
        "--config",
        "my_config",
        "--config-path",
        "configs.yml",
    ]


def test_the_last_value_counts():
    assert take_value(["--a", "1", "--b=2", "--b", "3"], "--b") == ("3", ["--a", "1"])
    with pytest.raises(ConfigError):
        take_value(["--b", "--a"], "--b")


def test_a_run_is_finished_by_its_records_wherever_its_checkpoints_are(tmp_path):
    assert not is_finished(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"values": {"checkpoint_dir": "/elsewhere"}, "origins": {}}))
    assert not is_finished(tmp_path)
    end = RunEnd(step=4, time="", outcome="finished", epoch=1.0, time_to_train=1.0)
    (tmp_path / "metrics.jsonl").write_text(end.to_json() + "\n")
    assert is_finished(tmp_path)
    assert SCRIPTS["train"](["--restore-path", str(tmp_path)]) == ["validate", str(tmp_path)]


def test_the_newest_efficientnet_is_validated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = {
        "efficientnet_b0-cifar10-b": ("efficientnet_b0", "cifar10"),
        "effnet": ("efficientnet_b0", "cifar10"),
        "later": ("efficientnet_b0", "imagenet"),
        "other": ("cifar_resnet8", "cifar10"),
        "efficientnet_b0-cifar10-broken": None,
    }
    for number, (name, facts) in enumerate(runs.items()):
        place = tmp_path / "runs" / name
        place.mkdir(parents=True)
        values = {"values": {"model_name": facts[0], "dataset": facts[1]}} if facts else {}
        (place / "config.json").write_text(json.dumps(values))
        os.utime(place / "config.json", (number, number))
    assert SCRIPTS["efficientnet_CIFAR10_inference"]([]) == ["validate", "runs/effnet", "--last"]


def python_with(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the packages in a folder and no others."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-S", *words], env=environ, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("script", ["train.py", "validation.py", "restore.py"])
def test_a_clone_without_its_packages_says_what_to_install(script, tmp_path):
    done = python_with(tmp_path, str(ROOT / script))
    assert done.returncode == 2
    assert done.stderr.startswith(f"headrace: Not installed for {sys.executable}: jax, jaxlib, ml_dtypes, numpy, ")
    assert "-m pip install -r requirements.txt" in done.stderr
    assert "Traceback" not in done.stderr


def test_only_jax_is_named_where_only_jax_is_missing(tmp_path):
    for name in ("ml_dtypes", "numpy", "optax", "yaml", "safetensors", "PIL", "rich", "simplejpeg", "flatbuffers"):
        (tmp_path / name).symlink_to(Path(str(importlib.import_module(name).__file__)).parent)
    done = python_with(tmp_path, str(ROOT / "train.py"), "--num-epochs", "1")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2,
        f"headrace: Not installed for {sys.executable}: jax, jaxlib.",
    )


def test_requirements_name_all_that_the_documents_say_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    line = (ROOT / "requirements.txt").read_text().splitlines()[-1]
    assert line == "-e .[wandb]"
    assert [re.split(r"\W", each)[0] for each in project["optional-dependencies"]["wandb"]] == ["wandb"]
    named = {re.split(r"[^\w]", each)[0] for each in project["dependencies"]}
    imported = {"PyYAML": "yaml", "Pillow": "PIL"}
    # Not imported, since that would take Ctrl-C from pytest.
    source = ast.parse((ROOT / "src" / "headrace" / "__main__.py").read_text())
    (needed,) = (
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NEEDED"
    )
    assert {imported.get(name, name) for name in named} | {"jaxlib"} == set(needed)


PLANNED = {
    "train --dataset imagenet --model-size 50 --batch-size 2 --shards 2 --pipeline --pipeline-splits b2/3/relu "
    "--gradient-accumulation-count 8": (2, 8),
    "train --model cifar_resnet8 --micro-batch-size 32": (32, 1),
    "efficientnet_CIFAR10_train_gpu": (192, 1),
}


@pytest.mark.parametrize("line", PLANNED)
def test_a_script_plans_its_own_command_line(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, *words = line.split()
    assert run_script(script, [*words, "--plan", "--json"]) == 0
    batch = json.loads(capsys.readouterr().out)["batch"]
    assert (batch["micro_batch_size"], batch["gradient_accumulation_count"]) == PLANNED[line]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", ["--restore-path runs/a", "--synthetic-data"])
def test_only_a_training_is_planned(words, capsys):
    assert run_script("validation", [*words.split(), "--plan"]) == 2
    assert "What can be planned is a training" in capsys.readouterr().err


@pytest.mark.parametrize(("platform", "is_idle"), [("cuda", False), ("cpu", True), ("tpu", True)])
def test_a_plan_speaks_of_the_platform_that_was_asked_for(platform, is_idle, capsys):
    words = f"--model cifar_resnet8 --available-memory-proportion 60 --platform {platform} --plan"
    assert run_script("train", words.split()) == 0
    told = capsys.readouterr().err
    assert (f"without effect on {platform}: available_memory_proportion" in told) is is_idle
    assert is_idle or "without effect" not in told
