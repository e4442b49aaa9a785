"""Options without effect: named with their reasons, by backend."""

import json

import pytest

from headrace.cli.main import main
from headrace.config.field import TRANSLATED, Origin
from headrace.config.load import resolve, resolve_code
from headrace.config.schema import all_options
from headrace.config.section_compiler import NO_EFFECT, describe_without_effect, without_effect


def test_nothing_is_said_where_nothing_was_asked():
    for backend in ("cpu", "gpu", "tpu"):
        nothing = resolve_code({})
        assert describe_without_effect(nothing.config, backend, nothing.origins) == []


@pytest.mark.parametrize(
    ("options", "cpu", "gpu"),
    [
        ({"half_partials": True, "precision": "16.32"}, True, False),
        ({"internal_exchange_optimisation_target": "balanced"}, True, True),
        ({"internal_exchange_optimisation_target": "memory"}, False, False),
        ({"max_cross_replica_buffer_size": 0}, True, False),
        ({"max_reduce_many_buffer_size": 216}, True, False),
        ({"available_memory_proportion": [15]}, True, False),
        ({"first_device": 3}, True, False),
        ({"first_device": 0}, False, False),
    ],
)
def test_by_backend(options, cpu, gpu):
    resolved = resolve_code(options)
    config, origins = resolved.config, resolved.origins
    assert (bool(without_effect(config, "cpu", origins)), bool(without_effect(config, "gpu", origins))) == (cpu, gpu)
    for backend in ("cpu", "gpu"):
        for line in describe_without_effect(config, backend, origins):
            assert line.startswith(f"without effect on {backend}: ")
        translated = dict(origins) | dict.fromkeys(all_options(), Origin(kind=TRANSLATED))
        assert without_effect(config, backend, translated) == {}


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_plan_says_what_has_no_effect(form, capsys):
    words = "plan --config none --dataset cifar10 --micro-batch-size 8 --max-cross-replica-buffer-size 0 --platform cpu"
    assert main([*words.split(), *form]) == 0
    printed = capsys.readouterr()
    said = json.loads(printed.out)["remarks"] if form else printed.err.splitlines()
    assert [line for line in said if "without effect on cpu: max_cross_replica_buffer_size (" in line]


def test_every_row_has_an_option_and_a_reason():
    for row in NO_EFFECT:
        assert all_options()[row.option].section == row.section
        assert row.reason.endswith(".")


def test_padding_for_crops_that_are_not_made():
    options = {"crop_padding": 2, "crop_fill": "reflect"}
    notes = resolve(options | {"train_augmentation": "flip"}, "none", environ={}).notes
    assert [note for note in notes if "no effect" in note] == [
        "crop_padding 2 (command line) has no effect with train_augmentation flip (command line).",
        "crop_fill reflect (command line) has no effect with train_augmentation flip (command line).",
    ]
    assert resolve(options | {"train_augmentation": "crop"}, "none", environ={}).notes == ()
