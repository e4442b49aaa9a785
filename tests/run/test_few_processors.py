"""Replicas, sharding, stages and shared norms where XLA's pool has no thread to spare: a thread for each device."""

import json
import os
import shlex
from pathlib import Path

import pytest

from tests.job.processes import finish, start

# One call of all steps, so that the host may launch far ahead of the devices; validations and checkpoints between.
OPTIONS = shlex.split("""
    train --config none --dataset digits --model-name toy_model_bn --micro-batch-size 4 --weight-updates-per-epoch 40
    --num-epochs 2 --call-seconds 0 --ckpts-per-epoch 2 --validations-per-epoch 2 --progress none
""")

SHARDED = ["--replicated-optimizer-state-sharding"]
SHARED = ["--dbn-replica-group-size", "2"]
TWO_STAGES = ["--num-pipeline-stages", "2"]
TWO = ["--num-replicas", "2"]

# By the number of devices, since XLA's pool has at least as many threads.
PLANS = {
    2: {
        "replicas": TWO,
        "shared": [*TWO, *SHARED],
        "sharded": [*TWO, *SHARDED],
        "sharded-shared": [*TWO, *SHARDED, *SHARED],
        "sharded-accumulated": [*TWO, *SHARDED, "--gradient-accumulation-count", "6"],
        "stages": TWO_STAGES,
    },
    4: {
        "replicas": ["--num-replicas", "4", *SHARED],
        "sharded": ["--num-replicas", "4", *SHARDED],
        "stages": [*TWO, *TWO_STAGES],
        "stages-shared": [*TWO, *TWO_STAGES, *SHARED],
        "stages-sharded": [*TWO, *TWO_STAGES, *SHARDED],
        "stages-sharded-shared": [*TWO, *TWO_STAGES, *SHARDED, *SHARED],
        "stages-sharded-accumulated": [*TWO, *TWO_STAGES, *SHARDED, "--gradient-accumulation-count", "6"],
    },
}

# Runs one plan after the other, in a process that may use so many processors: XLA counts those when its devices start.
PROGRAM = """
import json, os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(sys.argv[1])])
from headrace.cli.main import main
import jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))
for words in json.loads(sys.argv[3]):
    print(*words, flush=True)
    assert main(words) == 0, words
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processors cannot be taken away here")
@pytest.mark.parametrize("num_devices", PLANS)
@pytest.mark.parametrize("num_processors", [1, 2])
def test_every_plan_ends_where_each_device_has_but_one_thread(
    tmp_path: Path, num_processors: int, num_devices: int
) -> None:
    plans = PLANS[num_devices]
    words = [[*OPTIONS, "--log-dir", str(tmp_path), "--run-name", name, *plan] for name, plan in plans.items()]
    output = tmp_path / "out.txt"
    given = [str(num_processors), str(num_devices), json.dumps(words)]
    code = finish(start(given, output, program=("-c", PROGRAM)))
    assert code == 0, output.read_text()[-3000:]
    for name in plans:
        last = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
        assert (last["outcome"], last["step"]) == ("finished", 80), name
