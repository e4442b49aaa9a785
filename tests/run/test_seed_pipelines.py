"""The pipelines of the first seed on virtual CPU devices, with smaller images and fewer steps."""

import json

import pytest

from tests.job.processes import start

CIFAR = "conv2_block1_post_addition_relu conv3_block1_post_addition_relu conv4_block1_post_addition_relu"
SMALL = "--dataset generated --weight-updates-per-epoch 1 --num-epochs 1 --progress plain --logs-per-epoch 1"

COMMANDS = {
    # replicas, stages, micro batches, schedule
    "--config mk2_resnet50_8k_bn_pipeline --global-batch-size 32 --micro-batch-size 1 --image-size 32 --num-classes 10 "
    f"--num-samples 64 --lr-warmup-params none --lr-schedule const {SMALL} --validation-micro-batch-size 4 "
    "--pipeline-validation-model": (4, 4, 8, "Grouped"),
    f"--config none --model-name cifar_resnet8 --pipeline-splits {CIFAR} --device-mapping 0 1 2 3 "
    f"--gradient-accumulation-count 8 --recomputation True {SMALL} --num-samples 64": (1, 4, 8, "Interleaved"),
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_pipelines_of_the_seed_run(command, tmp_path):
    replicas, stages, micros, schedule = COMMANDS[command]
    words = [*command.split(), "--log-dir", tmp_path / "runs", "--run-name", "seed", "--compilation-cache-dir", "none"]
    process = start(["train", *words], tmp_path / "out.txt")
    assert process.wait(1400) == 0, (tmp_path / "out.txt").read_text()[-2000:]
    plan = json.loads((tmp_path / "runs" / "seed" / "plan.json").read_text())
    pipeline = plan["pipeline"]
    assert (plan["batch"]["num_replicas"], len(pipeline["stages"])) == (replicas, stages)
    assert (pipeline["num_micros"], pipeline["schedule"], pipeline["recomputation"]) == (micros, schedule, True)
    assert plan["num_devices"] == replicas * stages
    records = [json.loads(line) for line in (tmp_path / "runs" / "seed" / "metrics.jsonl").read_text().splitlines()]
    assert any(record.get("kind") == "validation" or "top1" in record for record in records)
