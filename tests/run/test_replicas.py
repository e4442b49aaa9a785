"""The number of replicas where it is left open: all accelerators, virtual CPU devices only if asked for."""

import json
from typing import Any

import jax
import pytest

from headrace.cli.main import main
from headrace.config.load import resolve
from headrace.engine.visible import Visible
from headrace.job import ProcessGroup
from headrace.run import choices, design
from headrace.run.choices import settle
from headrace.run.fit import train


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the devices which a run will find."""

    def set_devices(platform: str, count: int) -> None:
        found = Visible(platform=platform, count=count)
        monkeypatch.setattr(choices, "visible_devices", lambda wanted, **_: found)

    return set_devices


def settled(name: str = "default", **options: str) -> Any:
    return settle(resolve({key.replace("_", "-"): value for key, value in options.items()}, name, environ={}))


def test_every_accelerator_has_a_replica(machine):
    machine("gpu", 8)
    found = settled()
    assert found.config.batch.num_replicas == 8
    assert found.notes[0] == "num_replicas is 8, chosen from 8 gpu devices"
    assert str(found.origins["num_replicas"]) == "chosen from 8 gpu devices"
    assert design.design_run(found.config).plan.batch.global_batch_size == 64, "8 images for each"


def test_a_given_number_stays_and_one_device_needs_no_word(machine):
    machine("gpu", 8)
    assert settled(num_replicas="2").config.batch.num_replicas == 2
    assert settled(first_device="3").config.batch.num_replicas is None
    machine("gpu", 1)
    assert not any("num_replicas" in note for note in settled().notes)


def test_stages_take_devices_and_the_batch_has_to_divide(machine):
    machine("gpu", 8)
    staged = settled(num_pipeline_stages="2", batch_size="36", gradient_accumulation_count="3")
    assert staged.config.batch.num_replicas == 4
    assert staged.notes[0] == "num_replicas is 4, chosen from 8 gpu devices, 2 for the stages of each"
    machine("gpu", 6)
    uneven = settled(batch_size="32")
    assert uneven.config.batch.num_replicas == 4
    assert "2 of them unused: --batch-size 32 has to divide" in uneven.notes[0]


@pytest.mark.parametrize("devices", range(1, 10))
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_numbers_said_are_right_for_every_combination(machine, devices, stages):
    """Of devices, stages and batch: against what the words mean, and not against the formula."""
    machine("cpu", devices)
    for size, count in ((None, None), (64, 1), (60, 1), (7, 1), (48, 3)):
        batch = {} if size is None else {"batch_size": f"{size}", "gradient_accumulation_count": f"{count}"}
        options = {"num_replicas": "auto", "num_pipeline_stages": f"{stages}", "pipeline_schedule": "Sequential"}
        found = settled(**options, **batch)
        replicas = found.config.batch.num_replicas
        (note,) = [text for text in found.notes if text.startswith("num_replicas")]
        assert note.startswith(f"num_replicas is {replicas}, chosen from {devices} cpu device{'s' * (devices > 1)}")
        possible = [r for r in range(1, devices + 1) if r * stages <= devices]
        even = [r for r in possible if size is None or size % (r * (count or 1)) == 0]
        assert replicas == max(even, default=1)
        spare = devices - replicas * stages
        assert ("of them unused" in note) == (spare > 0)
        assert spare <= 0 or f", {spare} of them unused" in note
        assert (f"--batch-size {size} has to divide" in note) == (replicas < max(possible, default=1))
        assert (f", fewer than the {stages} for the stages of each" in note) == (devices < stages)
        assert (f", {stages} for the stages of each" in note) == (1 < stages <= devices)


@pytest.mark.parametrize(("platform", "replicas"), [("gpu", 16), ("cpu", 2)])
def test_a_process_for_each_host_has_all_its_devices(machine, monkeypatch, platform, replicas):
    """On Kubernetes and SkyPilot, where 7 of 8 GPUs had nothing to do; a CPU is one device."""
    machine(platform, 8)
    environ = {
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "10.0.0.4 10.0.0.7",
    }
    resolved = resolve({}, "default", environ=environ)
    assert resolved.config.batch.num_replicas is None
    monkeypatch.setattr(choices, "current_group", lambda: ProcessGroup(process=0, num_processes=2))
    monkeypatch.setattr(choices, "is_watched", lambda: True)
    found = choices.with_replicas(resolved)
    assert found.config.batch.num_replicas == replicas
    assert found.notes[-1].endswith("in each of 2 processes")
    uneven = choices.with_replicas(resolve({"batch-size": 48}, "default", environ=environ))
    assert uneven.config.batch.num_replicas == (2 if platform == "cpu" else 16)
    uneven = choices.with_replicas(resolve({"batch-size": 36}, "default", environ=environ))
    assert uneven.config.batch.num_replicas == (2 if platform == "cpu" else 12)


def test_virtual_cpu_devices_are_counted_only_if_asked_for(machine):
    machine("cpu", 4)
    assert settled().config.batch.num_replicas is None
    assert settled(num_replicas="auto").config.batch.num_replicas == 4


@pytest.mark.reference
def test_the_reference_has_one_replica(machine):
    machine("gpu", 8)
    assert settled("resnet8_test").config.batch.num_replicas == 1
    assert settle(resolve({"application": "tf1", "dataset": "cifar10"}, environ={})).config.batch.num_replicas == 1


def test_the_plan_says_it(machine, capsys):
    machine("gpu", 4)
    assert main(["plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"] == {
        "micro_batch_size": 8,
        "num_replicas": 4,
        "gradient_accumulation_count": 1,
        "global_batch_size": 32,
    }
    assert main(["plan"]) == 0
    assert "note: num_replicas is 4, chosen from 4 gpu devices" in capsys.readouterr().err


def test_a_run_on_all_devices_that_are_there(quick):
    count = len(jax.local_devices())
    assert count > 1, "the tests run on several virtual devices"
    result = train(quick(num_replicas="auto", num_epochs=1, weight_updates_per_epoch=1, global_batch_size=16 * count))
    saved = json.loads((result.directory / "config.json").read_text())
    assert saved["values"]["num_replicas"] == count
    assert saved["origins"]["num_replicas"] == {"kind": "chosen", "where": f"from {count} cpu devices"}
