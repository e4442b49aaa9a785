"""How replicas and devices are divided among processes, and what is refused."""

import json

import pytest

from headrace.cli.main import main
from headrace.core.errors import ConfigError
from headrace.plan.plan import format_plan
from headrace.run.design import design_run
from tests.conftest import MakeConfig


@pytest.mark.parametrize(("num_processes", "replicas", "devices"), [(1, 8, 16), (2, 4, 8), (8, 1, 2)])
def test_replicas_and_their_pipelines_are_dealt_out_evenly(
    tiny_config: MakeConfig, num_processes: int, replicas: int, devices: int
) -> None:
    config = tiny_config(num_replicas=8, num_pipeline_stages=2, micro_batch_size=1)
    plan = design_run(config, num_processes=num_processes).plan
    assert (plan.num_devices, plan.replicas_per_process, plan.devices_per_process) == (16, replicas, devices)
    told = f"each with {replicas} of the replicas on {devices} of the devices"
    assert (told in format_plan(plan)) == (num_processes > 1)
    assert plan.to_dict()["num_processes"] == num_processes


def test_replicas_that_cannot_be_divided_are_refused(tiny_config: MakeConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        design_run(tiny_config(num_replicas=6), num_processes=4)
    assert caught.value.problem == "6 replicas cannot be divided evenly among 4 processes."
    assert caught.value.remedy == "Give --num-replicas 8, or start 1 or 2 or 3 or 6 processes."
    with pytest.raises(ConfigError, match="3 validation replicas"):
        design_run(tiny_config(num_replicas=4, validation_num_replicas=3), num_processes=4)
    design_run(tiny_config(num_replicas=4, validation_num_replicas=3, validation=False), num_processes=4)
    with pytest.raises(ConfigError, match="The number of processes is 0"):
        design_run(tiny_config(), num_processes=0)


def test_headrace_plan_takes_a_number_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--num-replicas", "4", "--num-processes", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["num_processes"], plan["replicas_per_process"], plan["num_devices"]) == (2, 2, 4)
    assert main(["plan", "--num-replicas", "3", "--num-processes", "2", "--batch-size", "30"]) == 2
    assert "3 replicas cannot be divided evenly among 2 processes" in capsys.readouterr().err
