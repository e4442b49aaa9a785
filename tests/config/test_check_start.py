"""What cannot be meant is refused of a new run, with value, rule and remedy; and the remedy works."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

import headrace
from headrace.cli.main import main
from headrace.config.checks import check_start
from headrace.config.load import override, resolve, resolve_code
from headrace.core.errors import ConfigError

HALF = {"precision": "16.32", "half_type": "float16"}
RAND: dict[str, Any] = {"rand_augment_magnitude": 5.0}

# the options, what is said of them, and options after the remedy
REFUSED: tuple[tuple[Mapping[str, Any], str, Mapping[str, Any]], ...] = (
    ({"freeze": "backbone"}, r"freeze backbone .* keeps random weights.*--weights", {}),
    ({"variable_filter": "predictions"}, r"variable_filter predictions .* keeps random weights", {}),
    ({"init_ema": True}, r"init_ema .* has no effect without weights", {}),
    ({"dataset": "generated", "class_weights": "balanced"}, r"class_weights balanced .* labels are random", {}),
    ({"dataset": "cifar10", "synthetic_data": "device", "class_weights": "balanced"}, r"labels are random", {}),
    (
        {"class_weights": "balanced", "balanced_sampling": True},
        r"Both are given: class_weights balanced .* Leave one of them out",
        {"balanced_sampling": True},
    ),
    (HALF, r"float16 without loss scaling .*--loss-scaling dynamic", {**HALF, "loss_scaling": "dynamic"}),
    ({**HALF, "loss_scaling": 1}, r"loss_scaling 1.*--loss-scaling dynamic", {**HALF, "loss_scaling": 128}),
    ({"half_type": "float16"}, r"half_type float16 .* no effect with precision 32.32 .*16.32", {}),
    (
        {"half_type": "bfloat16", "precision": "32.32"},
        r"half_type bfloat16 .* no effect with precision 32.32",
        {"half_type": "bfloat16", "precision": "16.32"},
    ),
    ({"stochastic_rounding": True}, r"stochastic_rounding .* no effect on 32-bit weights .*16.16", {}),
    ({"loss_scaling_params": {"initial": 4}}, r"is for a loss scale that changes.*--loss-scaling dynamic", {}),
    ({"mixup_switch_prob": 0.5}, r"mixup_switch_prob 0.5 .* no effect without mixup_alpha and cutmix", {}),
    (
        {"mixup_switch_prob": 0.5, "mixup_alpha": 0.2},
        r"mixup_switch_prob 0.5 .* no effect without mixup_alpha and cutmix",
        {"mixup_switch_prob": 0.5, "mixup_alpha": 0.2, "cutmix_alpha": 1},
    ),
    (RAND, r"rand_augment_magnitude 5 .* no effect without rand_augment", {**RAND, "rand_augment": 2}),
    ({"cutmix_version": 2}, r"cutmix_version 2 .* no effect without cutmix_lambda", {}),
    ({"progressive_resolution_end": 0.5}, r"no effect without progressive_resolution", {}),
    ({"crop_padding": 2, "train_augmentation": "flip"}, r"crop_padding 2 .* no effect with train_augmentation", {}),
    ({"bce_target_threshold": 0.2}, r"no effect without --loss bce", {"bce_target_threshold": 0.2, "loss": "bce"}),
    ({"strict_pipeline": True}, r"strict_pipeline .* no effect without pipeline stages", {}),
    ({"device_memory": "1GiB"}, r"device_memory .* no effect without pipeline stages", {}),
    ({"split_include_filter": "relu"}, r"split_include_filter relu .* no effect without pipeline stages", {}),
    ({"dataset": "digits", "dataset_path": "/tmp"}, r"dataset_path /tmp .* no effect with dataset digits", {}),
    ({"target_accuracy": 0.9, "validation": False}, r"target_accuracy 0.9 .* is never checked.*or validate", {}),
    ({"early_stopping": 2, "validation": False}, r"early_stopping 2 .* is never checked", {"early_stopping": 2}),
)


@pytest.mark.parametrize(("options", "words", "remedied"), REFUSED)
def test_what_cannot_be_meant_is_refused(options: Mapping[str, Any], words: str, remedied: Mapping[str, Any]) -> None:
    for resolved in (resolve(options, "none", environ={}), resolve_code(options)):
        with pytest.raises(ConfigError) as error:
            check_start(resolved)
        assert re.search(words, str(error.value), re.DOTALL)
        assert "A new run does what each of its options says" in str(error.value)
        check_start(resolve(remedied, "none", environ={}))


def test_each_row_is_of_what_was_asked_for(tmp_path) -> None:
    """A file may be written for several runs, and a recipe is: what they give is remarked on, not refused."""
    (tmp_path / "runs.yml").write_text("mine:\n  rand_augment_magnitude: 5\n  half_type: float16\n")
    found = resolve({}, "mine", str(tmp_path / "runs.yml"), environ={})
    check_start(found)
    assert [note for note in found.notes if "rand_augment_magnitude 5" in note]
    with pytest.raises(ConfigError, match="rand_augment_magnitude 6"):
        check_start(resolve({"rand_augment_magnitude": 6}, "mine", str(tmp_path / "runs.yml"), environ={}))


def test_saved_runs_are_read_whatever_was_accepted_once() -> None:
    saved = resolve({"half_type": "float16", "freeze": "backbone", "target_accuracy": 0.9, "validation": False}, "none")
    again = override(saved, {}, environ={})
    assert any("half_type float16" in note for note in again.notes)
    assert any("target_accuracy 0.9" in text for text in again.warnings)


def test_weights_given_by_code_may_be_frozen() -> None:
    check_start(resolve_code({"freeze": "backbone", "init_min_loaded": 0.5}), has_weights=True)
    check_start(resolve({"freeze": "backbone", "weights": "file.pth"}, "none", environ={}))


@pytest.mark.reference
def test_the_reference_s_applications_do_what_they_did() -> None:
    options = {"application": "tf2", "half_type": "float16", "precision": "16.16", "loss_scaling": 1}
    check_start(resolve({**options, "target_accuracy": 0.9, "validation": False}, environ={}))


@pytest.mark.parametrize("command", ["train", "plan", "lr-find"])
def test_commands_that_start_a_run_refuse(command: str, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, "--freeze", "backbone"]) == 2
    printed = capsys.readouterr().err
    assert "freeze backbone (command line) keeps random weights" in printed
    assert "--weights" in printed
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_fit_refuses(tmp_path, monkeypatch) -> None:
    import numpy as np

    monkeypatch.chdir(tmp_path)
    model = headrace.Model("toy_model", input_shape=(32, 32, 3), num_classes=2)
    images, labels = np.zeros((8, 32, 32, 3), np.uint8), np.arange(8) % 2
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"target_accuracy": 0.9}, "is never checked: validation off"),
        (RAND, "rand_augment_magnitude 5"),
    )
    for option, words in cases:
        with pytest.raises(ConfigError, match=words):
            model.fit(images, labels, epochs=1, **option)
    assert not list(tmp_path.iterdir())


def test_a_loaded_model_is_not_refused_what_its_run_was_asked_for(tmp_path, monkeypatch) -> None:
    import numpy as np

    monkeypatch.chdir(tmp_path)
    short = {"epochs": 1, "steps_per_epoch": 1, "progress": "none", "report": False}
    model = headrace.Model("toy_model", num_classes=2, micro_batch_size=4, early_stopping=3)
    images, labels = np.zeros((8, 32, 32, 3), np.uint8), np.arange(8) % 2
    run = model.fit(images, labels, validation_data=(images, labels), run_name="first", **short)
    again = headrace.Model.load(run.directory)
    again.fit(images, labels, run_name="second", **short)  # without validation data
    with pytest.raises(ConfigError, match=r"early_stopping 2 \(code\) is never checked"):
        again.fit(images, labels, run_name="third", early_stopping=2, **short)
    with pytest.raises(ConfigError, match=r"early_stopping 3 \(code\) is never checked"):
        headrace.Model.load(run.directory, early_stopping=3).fit(images, labels, run_name="third", **short)
