"""Every error of the reference applications has its counterpart: a command line, and what its refusal says.

`plan` goes through parsing, checks, dataset, network and plan without a device; what it refuses, `train` refuses
before it starts.
"""

import shlex

import pytest

from headrace.cli.main import main

CIFAR = "--dataset cifar10 --generated-data --model cifar_resnet8 --micro-batch-size 8"
SECOND = f"{CIFAR} --application tf2"
FIRST = "--application tf1 --dataset cifar-10 --generated-data --model-size 8"

# the reference's section: command line, parts of the message
BATCHES = [
    (f"{CIFAR} --gradient-accumulation-count 2 --global-batch-size 32", ["Both are given", "Leave one of them out"]),
    ("--micro-batch-size 0", ["--micro-batch-size is '0': must be 1 or more"]),
    ("--num-replicas 0", ["--num-replicas is '0': must be 1 or more"]),
    ("--logs-per-epoch -1", ["--logs-per-epoch is '-1': must be 0 or more"]),
    ("--ckpts-per-epoch -1", ["--ckpts-per-epoch is '-1': must be 0 or more"]),
    (f"{SECOND} --num-epochs 5 --logs-per-epoch 0.5", ["It is not possible to log 2.0 epochs a time for 5 epochs"]),
    (f"{SECOND} --num-epochs 6 --logs-per-epoch 0.25", ["It is not possible to log 4.0 epochs a time for 6 epochs"]),
    (f"{SECOND} --num-epochs 6 --ckpts-per-epoch 1e-320", ["to save a checkpoint inf epochs a time for 6 epochs"]),
    (f"{CIFAR} --gradient-accumulation-count 100000", ["One step takes 800,000 samples", "has 50,000"]),
    (f"{FIRST} --batch-size 4 --epochs 1 --iterations 10", ["Both are given", "iterations 10", "num_epochs 1"]),
    ("--dbn-replica-group-size 3 --num-replicas 4", ["must be a multiple"]),
]
LEARNING = [
    ("--lr-schedule square", ["--lr-schedule is 'square'", "not one of the choices"]),
    (
        "--config none --lr-schedule polynomial --lr-schedule-params '{\"initial_learning_rate\": 0.1}'",
        ["lacks end_learning_rate_ratio, power", "found initial_learning_rate"],
    ),
    (
        """--lr-schedule stepped --lr-schedule-params '{"boundaries": [1, 2], "values": [1, 2]}'""",
        ["2 values for 2 boundaries", "one value more"],
    ),
    (
        """--lr-warmup-params '{"warmup_mode": "shfit", "warmup_epochs": 2}'""",
        ["'shfit'", "shift, mask", "Did you mean shift?"],
    ),
    (f"{FIRST} --lr-schedule sometimes", ["--lr-schedule is 'sometimes'"]),
    ("--optimizer adma", ["--optimizer is 'adma'", "Did you mean"]),
    ("--config none --optimizer lars", ["optimizer_params lacks weight_decay, eeta, epsilon for lars"]),
    ("--optimizer sgd --optimizer-params '{\"momentum\": -1}'", ["momentum is -1", "at least 0"]),
    (f"{FIRST} --optimiser LARS --momentum -0.1", ["--momentum is '-0.1'", "at least 0"]),
    (f"{FIRST} --optimiser LARS --lars-weight-decay -1", ["--lars-weight-decay is '-1'"]),
    (f"{FIRST} --optimiser LARS --lars-skip-list beta kernel", ["lars_skip_list beta kernel", "and nothing else"]),
    ("--precision foo", ["'foo'", "this is not a precision"]),
    ("--precision 32.16", ["'32.16'", "is well formed, but only 16.16, 16.32, 32.32 are supported"]),
    ("--label-smoothing 1.5", ["--label-smoothing is '1.5'"]),
    (f"{FIRST} --weight-decay 1e-4 --l2-regularization 1e-4", ["Options of two applications are mixed"]),
]
NETWORKS = [
    ("--model 5", ["There is no model named '5'", "`headrace models` lists all networks"]),
    ("--model resent50", ["There is no model named 'resent50'", "Did you mean resnet50?"]),
    ("--model resnet --model-size 51", ["resnet has no size '51'", "18"]),
    ("""--norm-layer '{"name": "group_norm", "num_groups": 8, "channels_per_group": 2}'""", ["both num_groups and"]),
    ("""--norm-layer '{"name": "butch_norm"}'""", ["'butch_norm'", "Did you mean batch_norm?"]),
    (f"{FIRST} --batch-norm --group-norm", ["Two norms are asked for"]),
]
DATA = [
    ("--dataset imagent", ["--dataset is 'imagent'", "Did you mean imagenet?"]),
    ("train --dataset cifar10 --dataset-path /no/such/place", ["/no/such/place"]),
    ("train --dataset imagenet", ["The path of ImageNet is not given", "--dataset-path"]),
    ("train --application tf1 --dataset cifar-10", ["--dataset-path"]),
    (f"{CIFAR} --image-size 64", ["image_size 64", "cifar10"]),
    (f"{FIRST} --image-size 64", ["image_size 64", "cifar10"]),
    ("--eight-bit-transfer True --accelerator-side-preprocess False", ["only raw pixels can cross as 8 bits"]),
    ("--fused-preprocessing True --accelerator-side-preprocess False", ["What is fused is the device's preprocessing"]),
    (f"{FIRST} --mixup-alpha 0.2 --batch-size 1", ["mixup_alpha 0.2", "Use --micro-batch-size 2 or more"]),
    (f"{FIRST} --cutmix-lambda 1.5", ["--cutmix-lambda is '1.5': must be from 0 to 1"]),
    ("--generated-data --dataset folder", ["folder", "whose shape is known only from its files"]),
]
SPLITS = "Possible splits of cifar_resnet8: conv2_block1, conv2_block1_post_addition_relu, conv3_block1, "
KNOWN_THERE = [
    (f"{FIRST} --name-suffix x", ["no option --name-suffix", "--run-name"]),
    (f"{FIRST} --log-all-instances", ["no option --log-all-instances", "Process 0 writes for all processes"]),
    (f"{SECOND} --distributed-training True", ["no option --distributed-training", "--distributed"]),
]
PIPELINES = [
    (f"{CIFAR} --device-mapping 0 1 1 0", ["without pipeline stages", SPLITS]),
    (f"{SECOND} --recomputation True", ["without pipeline stages, in application tf2", SPLITS]),
    (f"{FIRST} --pipeline", ["One shard needs a split", "Possible splits of cifar_resnet8: b1/0/relu, b2/0/relu"]),
    (f"{FIRST} --pipeline --shards 2", ["2 shards need 1 split", "Possible splits of cifar_resnet8: b1/0/relu, "]),
    (f"{FIRST} --pipeline --shards 2 --pipeline-splits", ["2 shards need 1 split", "cifar_resnet8: b1/0/relu, "]),
    (
        f"{CIFAR} --pipeline-splits conv2_block9_out",
        ["no block 'conv2_block9_out'", "Possible splits of cifar_resnet8"],
    ),
    (
        f"{CIFAR} --pipeline-splits conv4_block1_post_addition_relu conv3_block1_post_addition_relu",
        ["conv3_block1_post_addition_relu comes before", "In order:"],
    ),
    (
        f"{CIFAR} --pipeline-splits conv3_block1_post_addition_relu --device-mapping 0 1 2",
        ["3", "2 stages"],
    ),
    (
        f"{CIFAR} --num-pipeline-stages 4 --device-mapping 0 1 2 4",
        ["0 1 2 4"],
    ),
    (f"{CIFAR} --application tf2 --recomputation True", ["recomputation on (command line) without pipeline stages"]),
    (f"{CIFAR} --device-mapping 0 1", ["device_mapping 0 1 (command line) without pipeline stages"]),
    (f"{CIFAR} --available-memory-proportion 15 15", ["available_memory_proportion 15 15", "without pipeline stages"]),
    (f"{CIFAR} --num-pipeline-stages 2 --available-memory-proportion 15 15 15", ["3 values for 2 stages"]),
    (f"{CIFAR} --available-memory-proportion 0.15", ["It is a percentage (15), not a fraction (0.15)"]),
    (
        f"{FIRST} --available-memory-proportion 15",
        ["In application tf1 it is a fraction (0.15), elsewhere a percentage (15)"],
    ),
    (
        f"{FIRST} --pipeline --shards 2 --pipeline-splits b2/0/relu --available-memory-proportion 0.1 0.1 0.1",
        ["3 values for 2 stages"],
    ),
    (f"{FIRST} --pipeline --shards 4", ["4 shards need 3 splits", "b1/0/relu, b2/0/relu, b3/0/relu"]),
    (f"{FIRST} --pipeline --shards 3 --pipeline-splits b2/0/relu", ["3 shards need 2 splits", "b1/0/relu"]),
    (f"{FIRST} --pipeline", ["One shard needs a split", "b1/0/relu"]),
    (f"{FIRST} --pipeline-splits b2/0/relu", ["without --pipeline", "Add --pipeline --shards N"]),
    (
        f"{FIRST} --pipeline --pipeline-splits b2/0/relu --pipeline-schedule Grouped",
        ["pipeline on (command line) on one device with pipeline_schedule Grouped", "Sequential"],
    ),
    (
        f"{FIRST} --model efficientnet --model-size cifar --pipeline --shards 2",
        [
            "2 shards need 1 split:",
            "block1a/b, block1a/SE, block1a/c, block2a, block2a/b, block2a/SE, block2a/c, block2b, block3a",
            "Top",
        ],
    ),
    (
        f"{CIFAR} --num-pipeline-stages 2 --pipeline-schedule Grouped --gradient-accumulation 6 --strict-pipeline",
        ["multiple of", "4"],
    ),
    (f"{CIFAR} --pipeline-validation-model", ["pipeline_validation_model on (command line) without pipeline stages"]),
    (f"{CIFAR} --pipeline-schedule Groupd", ["--pipeline-schedule is 'Groupd'", "Did you mean Grouped?"]),
    (f"{CIFAR} --internal-exchange-optimization-target cycle", ["Did you mean cycles?"]),
]
RUNS = [
    ("--training False --validation False", ["Nothing is left to do"]),
    (f"{FIRST} --epochs-per-ckpt 2 --ckpts-per-epoch 2", ["Both are given"]),
    (f"{FIRST} --syncs-per-epoch 2 --epochs-per-sync 2", ["Both are given"]),
    (f"{FIRST} --select-ipus first", ["select_ipus first", "AUTO or the number"]),
    (f"{FIRST} --weight-avg-exp 1.5", ["--weight-avg-exp is", "1.5", "less than 1"]),
    (f"{FIRST} --weight-avg-N 0", ["--weight-avg-N is", "more than 0"]),
    ("--config no_such_config", ["There is no configuration no_such_config"]),
    ("--no-such-option 3", ["There is no option --no-such-option"]),
    ("--gc-profile EVERYTHING", ["EVERYTHING"]),
]
CASES = [*BATCHES, *KNOWN_THERE, *LEARNING, *NETWORKS, *DATA, *PIPELINES, *RUNS]


@pytest.mark.parametrize(("line", "parts"), CASES, ids=[line for line, _ in CASES])
def test_the_refusal(line, parts, tmp_path, monkeypatch, capsys):
    for variable in ("DATASETS_DIR", "DATA_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    code = main(words if words[0] == "train" else ["plan", *words])
    printed = capsys.readouterr().err
    assert code == 2, printed
    for part in parts:
        assert part in printed
    assert list(tmp_path.iterdir()) == []
