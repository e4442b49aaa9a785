"""A scheduled loss scale in whole runs: recorded, without a trace in the weights, on replicas, in stages, resumed."""

import shutil
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint.store import list_checkpoints
from headrace.config.load import Resolved
from headrace.run.directory import read_run
from headrace.run.fit import resume, train
from headrace.telemetry.records import TrainRecord, read_records

from .conftest import assert_same_bits, final_state

RAMP: dict[str, Any] = {"loss_scaling": "doubling", "loss_scaling_params": {"initial": 16, "final": 128}}
WAYS: dict[str, dict[str, Any]] = {
    "one device": {},
    "replicas": {"num_replicas": 2},
    "stages": {"pipeline_splits": ["conv2d_1"], "num_replicas": 2},
}


def scales(directory: Any) -> list[float | None]:
    """Return the scale of the last step of each epoch, as it was recorded."""
    return [record.loss_scale for record in read_records(directory) if isinstance(record, TrainRecord)]


@pytest.mark.parametrize("way", WAYS)
def test_a_power_of_two_ramp_changes_no_bit_and_is_recorded(quick, way):
    """Powers of two cancel exactly in float32, so the weights must be those of a run without a scale."""
    given = WAYS[way] | {"validation": False, "num_epochs": 4}
    plain = train(quick(run_name="plain", **given))
    ramp = train(quick(run_name="ramp", **given, **RAMP))
    assert scales(ramp.directory) == [16, 32, 64, 128]
    assert scales(plain.directory) == [1] * 4
    without = {name: value for name, value in final_state(plain.directory).items() if "loss_scale" not in name}
    found = {name: value for name, value in final_state(ramp.directory).items() if "loss_scale" not in name}
    assert_same_bits(found, without)


def test_a_ramp_goes_on_where_a_run_is_resumed(quick):
    given = {"validation": False, "max_ckpts_to_keep": 4, **RAMP}
    whole = train(quick(run_name="whole", **given))
    cut = train(quick(run_name="cut", **given))
    for checkpoint in list_checkpoints(cut.directory / "checkpoints")[2:]:
        shutil.rmtree(checkpoint)
    again = resume(cut.directory)
    assert again.step == 80
    assert scales(cut.directory) == [16, 32, 64, 128]
    assert_same_bits(final_state(cut.directory), final_state(whole.directory))
    saved: Resolved = read_run(cut.directory)[1]
    assert saved.config.numerics.loss_scaling == "doubling"
    assert saved.config.numerics.loss_scaling_params == RAMP["loss_scaling_params"]


def test_resume_takes_another_scale(quick):
    """Also a static one, which its checkpoint has as a number."""
    run = train(quick(num_epochs=1, validation=False, loss_scaling=64)).directory
    resume(run, {"num_epochs": 2, "loss_scaling": 256})
    assert float(final_state(run)["loss_scale/scale"]) == 256
    steps = {"loss_scaling": "stepped", "loss_scaling_params": {"values": [64, 8, 4], "boundaries": [1, 3]}}
    resume(run, {"num_epochs": 4, **steps})
    assert scales(run) == [64, 256, 8, 4]
    np.testing.assert_equal(float(final_state(run)["loss_scale/scale"]), 4)
