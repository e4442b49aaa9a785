"""Messages in Python: flags of options become arguments with their values; all else stays."""

import re
from typing import Any

import pytest

from headrace import Model
from headrace.config.python_words import in_python
from headrace.config.schema import all_options
from headrace.core.errors import HeadraceError
from headrace.rows.values import BOOL


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Give --learning-rate 0.1 instead.", "Give learning_rate=0.1 instead."),
        ("validate less often (--validations-per-epoch)", "validate less often (validations_per_epoch)"),
        (
            "Say --validation-split 0.2, or --validation-path PATH.",
            "Say validation_split=0.2, or validation_path=PATH.",
        ),
        ("--model-dialect torchvision computes it", 'model_dialect="torchvision" computes it'),
        ("use --dataset-cache device or more", 'use dataset_cache="device" or more'),
        ("--dataset-cache keeps them", "dataset_cache keeps them"),
        ("leave --eight-bit-transfer on, or", "leave eight_bit_transfer on, or"),
        ("no --ckpts-per-epoch, or a lower one", "no ckpts_per_epoch, or a lower one"),
        ("use --no-validation here", "use validation=False here"),
        ("a limit: --device-memory 16GiB.", 'a limit: device_memory="16GiB".'),
        ("--time-budget 10m ends it", 'time_budget="10m" ends it'),
        ("--num-replicas auto; --loss-scaling dynamic.", 'num_replicas="auto"; loss_scaling="dynamic".'),
        ("--epochs N", "epochs=N"),
        ("headrace export RUN --format onnx", "headrace export RUN --format onnx"),  # a command's, of no run
        ("a range 3--5, and --- too", "a range 3--5, and --- too"),
    ],
)
def test_flags_become_arguments(said: str, told: str) -> None:
    assert in_python(said) == told


def test_every_flag_of_an_option_is_known_and_nothing_keeps_its_dashes() -> None:
    for option in all_options().values():
        assert in_python(f"Use {option.flag}.") == f"Use {option.name}."
        if option.kind is BOOL:
            assert in_python(f"Use --no-{option.flag[2:]}.") == f"Use {option.name}=False."


def test_errors_of_a_model_speak_python(tmp_path) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"num_pipeline_stages": 99},
        {"pipeline_splits": ["nowhere"]},
        {"mixup_alpha": -1},
        {"epochs": 0},
        {"layer_decay": 3},
        {"image_size": 64},
        {"validation_split": 0.5, "validation_path": "x"},
    )
    for options in wrong:
        with pytest.raises(HeadraceError) as caught:
            Model("cifar_resnet8", log_dir=str(tmp_path), **options).fit("digits", steps_per_epoch=1)
        text = f"{caught.value} {caught.value.problem} {caught.value.rule} {caught.value.remedy}"
        assert not re.search(r"(?<!\w)--[a-z]", text), text


def test_notes_and_verdict_of_a_run_by_code_name_arguments(tmp_path) -> None:
    """With an image in nine calls of its own, a note and the verdict advise options."""
    model = Model("toy_model_bn", log_dir=str(tmp_path), micro_batch_size=32, progress="none", config="none")
    run = model.fit("digits", epochs=1, steps_per_epoch=9, nan_policy="skip", half_partials=True, cpu_kernels="off")
    text = (run.directory / "log.txt").read_text()
    assert "half_partials" in text, "a note about it"
    assert not re.search(r"(?<![\w-])--[a-z]", text + run.verdict), text
