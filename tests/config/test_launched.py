"""The number of replicas under a launcher: REFERENCE 8.2 to 8.4."""

import json

import pytest

from headrace.config.load import override, resolve
from headrace.core.errors import ConfigError

LAUNCH = {
    "HEADRACE_PROCESS": "0",
    "HEADRACE_NUM_PROCESSES": "8",
    "HEADRACE_COORDINATOR": "a:1",
    "HEADRACE_NUM_REPLICAS": "16",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
WORKERS = {"cluster": {"worker": ["worker0:3636", "worker1:3636"]}, "task": {"type": "worker", "index": 0}}
TF_CONFIG = {"TF_CONFIG": json.dumps(WORKERS)}


def test_the_launcher_has_the_last_word() -> None:
    """8.2: num_replicas becomes the launcher's total, with a warning where the configuration said another."""
    found = resolve({"replicas": 4}, "none", environ=LAUNCH)
    assert found.config.batch.num_replicas == 16
    assert found.warnings[0] == (
        "num_replicas 4 (command line) is ignored: the launcher says 16 replicas, 2 in each of 8 processes"
    )
    assert str(found.origins["num_replicas"]) == "launcher HEADRACE_PROCESS"
    for options in ({}, {"num_replicas": 16}):
        found = resolve(options, "none", environ=LAUNCH)
        assert found.config.batch.num_replicas == 16
        assert not any("ignored" in warning for warning in found.warnings)


def test_under_mpirun_the_options_hold() -> None:
    assert resolve({"num_replicas": 6}, "none", environ=MPIRUN).config.batch.num_replicas == 6
    assert resolve({}, "none", environ=MPIRUN).config.batch.num_replicas == 2  # one in each process
    assert resolve({}, "none", environ={}).config.batch.num_replicas is None
    assert resolve({"num-replicas": "auto"}, "none", environ={}).config.batch.num_replicas is None


def test_the_legacy_form_counts_replicas_of_one_process() -> None:
    """8.4: total batch = workers * replicas * accumulation * batch."""
    options = {"replicas": 4, "batch_size": 4, "gradient_accumulation_count": 64, "distributed": True}
    found = resolve(options, "none", environ=TF_CONFIG)
    assert found.config.batch.num_replicas == 2 * 4
    with pytest.raises(ConfigError, match="--distributed is given under headrace launch"):
        resolve(options, "none", environ=LAUNCH)
    with pytest.raises(ConfigError, match="nothing defines which processes belong together"):
        resolve(options, "none", environ={})


def test_a_saved_configuration_goes_on_under_another_launcher() -> None:
    saved = resolve({"replicas": 4, "distributed": True}, "none", environ=TF_CONFIG)
    again = override(saved, {"distributed": True}, TF_CONFIG)
    assert again.config.batch.num_replicas == 8  # not multiplied again
    assert override(saved, {}, {}).config.batch.num_replicas == 8  # in one process, as big a batch
    saved = resolve({}, "none", environ=LAUNCH)
    again = override(saved, {}, LAUNCH | {"HEADRACE_NUM_PROCESSES": "4"})
    assert again.config.batch.num_replicas == 16
    assert not any("ignored" in warning for warning in again.warnings)
    assert override(saved, {}, {}).config.batch.num_replicas == 16
