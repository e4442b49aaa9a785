"""The named configurations of the reference applications hold the published values, from which this table is."""

from typing import Any

import pytest

from headrace.config.load import Resolved, named_blocks, resolve, to_flat

SPLITS_4 = ["conv2_block2_out", "conv3_block1_out", "conv4_block2_out"]
SPLITS_MLPERF = ["conv2_block1_out", "conv2_block3_out", "conv3_block4_out"]
SPLITS_7 = ["conv2_block1_out", "conv2_block3_out", "conv3_block1_out", "conv3_block3_out"]
SPLITS_7 += ["conv4_block1_out", "conv4_block4_out"]

RESNET8_TEST = {
    "model_name": "cifar_resnet8",
    "dataset": "cifar10",
    "micro_batch_size": 8,
    "num_epochs": 1,
    "eight_bit_transfer": False,
    "gradient_accumulation_count": 1,
    "num_replicas": 1,
    "validation": False,
    "precision": "16.16",
}
RESNET8_16 = {
    "model_name": "cifar_resnet8",
    "dataset": "cifar10",
    "num_epochs": 70,
    "num_replicas": 16,
    "logs_per_epoch": 1,
    "precision": "16.16",
    "micro_batch_size": 25,
    "global_batch_size": 2000,
    "norm_layer": {"name": "batch_norm", "momentum": 0.99},
    "lr_schedule": "cosine",
    "lr_schedule_params": {"initial_learning_rate": 2**-13, "epochs_to_total_decay": 65},
    "lr_warmup_params": {"warmup_mode": "shift", "warmup_epochs": 5},
    "stochastic_rounding": True,
    "eight_bit_transfer": True,
    "l2_regularization": 1e-4,
    "accelerator_side_preprocess": True,
    "dbn_replica_group_size": 1,
    "half_partials": True,
}
RESNET50_8K = {
    "model_name": "resnet50",
    "dataset": "imagenet",
    "recomputation": True,
    "logs_per_epoch": 1,
    "eight_bit_transfer": True,
    "accelerator_side_preprocess": True,
    "num_epochs": 100,
    "validation": True,
    "micro_batch_size": 16,
    "global_batch_size": 8192,
    "num_replicas": 4,
    "optimizer": "sgd",
    "optimizer_params": {"momentum": 0.9},
    "pipeline_schedule": "Grouped",
    "pipeline_splits": SPLITS_4,
    "precision": "16.16",
    "stable_norm": True,
    "optimizer_state_offloading": False,
    "loss_scaling": 128,
    "l2_regularization": 1e-4,
    "weight_decay": 0,
    "stochastic_rounding": True,
    "lr_schedule": "cosine",
    "lr_schedule_params": {"initial_learning_rate": 2**-13, "epochs_to_total_decay": 100},
    "lr_warmup_params": {"warmup_mode": "mask", "warmup_epochs": 5},
    "lr_staircase": True,
    "half_partials": True,
    "available_memory_proportion": [15],
}
RESNET50_16K = RESNET50_8K | {
    "global_batch_size": 16384,
    "precision": "16.32",
    "stable_norm": False,
    "lr_schedule_params": {"initial_learning_rate": 2**-13, "epochs_to_total_decay": 95},
    "lr_warmup_params": {"warmup_mode": "shift", "warmup_epochs": 5},
}
ON_ONE = {
    "model_name": "resnet50",
    "dataset": "imagenet",
    "micro_batch_size": 12,
    "gradient_accumulation_count": 8,
    "num_replicas": 16,
    "precision": "16.16",
    "optimizer_state_offloading": True,
    "pipeline_schedule": "Sequential",
    "pipeline_splits": SPLITS_4,
    "device_mapping": [0, 0, 0, 0],
    "recomputation": True,
    "half_partials": True,
    "available_memory_proportion": [15],
}
MLPERF = {
    "model_name": "resnet50",
    "dataset": "imagenet",
    "micro_batch_size": 16,
    "global_batch_size": 2304,
    "loss_scaling": 128,
    "num_replicas": 16,
    "optimizer": "sgd",
    "optimizer_params": {"momentum": 0.9},
    "num_epochs": 44,
    "l2_regularization": 2.5e-5,
    "lr_schedule": "polynomial",
    "lr_schedule_params": {
        "initial_learning_rate": 0.001991319444444,
        "epochs_to_total_decay": 39,
        "end_learning_rate_ratio": 2.18e-5,
        "power": 2,
    },
    "lr_warmup_params": {"warmup_mode": "shift", "warmup_epochs": 5},
    "norm_layer": {"name": "custom_batch_norm", "momentum": 0.9},
    "bn_momentum": 0.9,
    "label_smoothing": 0.1,
    "precision": "16.16",
    "optimizer_state_offloading": False,
    "pipeline_schedule": "Sequential",
    "pipeline_splits": SPLITS_MLPERF,
    "device_mapping": [0, 0, 0, 0],
    "recomputation": True,
    "eight_bit_transfer": True,
    "accelerator_side_preprocess": True,
    "fused_preprocessing": True,
    "dbn_replica_group_size": 2,
    "ckpts_per_epoch": 0.25,
    "validation_micro_batch_size": 108,
    "half_partials": True,
    "available_memory_proportion": [20],
    "internal_exchange_optimization_target": "memory",
    "max_cross_replica_buffer_size": 52428800,
    "gather_conv_output": False,
    "min_remote_tensor_size": 128,
}
MLPERF_20 = MLPERF | {
    "micro_batch_size": 20,
    "global_batch_size": 1920,
    "num_epochs": 40,
    "pipeline_splits": SPLITS_7,
    "device_mapping": [0] * 7,
    "validation_micro_batch_size": 115,
    "available_memory_proportion": [15],
    "gather_conv_output": True,
}
MLPERF_LARS = MLPERF | {
    "micro_batch_size": 18,
    "global_batch_size": 3520,
    "pipeline_splits": SPLITS_7,
    "device_mapping": [0] * 7,
    "optimizer": "lars",
    "optimizer_params": {"momentum": 0.9, "weight_decay": 5e-5, "eeta": 0.001, "epsilon": 0},
    "l2_regularization": 5e-5,
    "num_epochs": 38,
    "lr_schedule_params": {
        "initial_learning_rate": 0.003045455,
        "epochs_to_total_decay": 36,
        "end_learning_rate_ratio": 9.32836e-6,
        "power": 2,
    },
    "lr_warmup_params": {"warmup_mode": "shift", "warmup_epochs": 2},
    "ckpts_per_epoch": 0.5,  # after epoch 2 and every fourth in the reference: a part of every second
    "available_memory_proportion": [15],
    "max_reduce_many_buffer_size": 216,
}
INFER = {
    "model_name": "resnet50",
    "dataset": "imagenet",
    "training": False,
    "label_smoothing": 0.1,
    "precision": "16.16",
    "eight_bit_transfer": True,
    "accelerator_side_preprocess": True,
    "fused_preprocessing": True,
    "recomputation": False,
    "num_replicas": 1,
    "half_partials": True,
    "available_memory_proportion": [20],
}


def batch_of(size: int) -> dict[str, int]:
    return {"micro_batch_size": size, "global_batch_size": size}


TF2 = {
    "resnet8_test": RESNET8_TEST,
    "resnet8_test_lars": RESNET8_TEST
    | {
        "num_epochs": 50,
        "validation": True,
        "precision": "32.32",
        "accelerator_side_preprocess": False,
        "l2_regularization": 1e-5,
        "optimizer": "lars",
        "optimizer_params": {"eeta": 0.001, "momentum": 0.9, "epsilon": 0, "weight_decay": 2.5e-6},
        "lr_schedule": "const",
        "lr_schedule_params": {"initial_learning_rate": 0.000125},
    },
    "imagenet_config": {"dataset": "imagenet", "model_name": "toy_model", "precision": "16.16"},
    "cifar10_config": {"dataset": "cifar10", "model_name": "toy_model", "precision": "16.16"},
    "resnet8_16ipus_bn": RESNET8_16,
    "resnet8_16ipus_bn_dbn": RESNET8_16 | {"dbn_replica_group_size": 16},
    "mk2_resnet50_8k_bn_pipeline": RESNET50_8K,
    "mk2_resnet50_16k_bn_pipeline": RESNET50_16K,
    "mk2_resnet50_on1ipu_pod16": ON_ONE,
    "resnet50_16ipus_8k_bn_pipeline": RESNET50_8K,
    "resnet50_16ipus_16k_bn_pipeline": RESNET50_16K,
    "mresnet50_on1ipu_pod16": ON_ONE,
    "resnet56_16ipus_8k_bn_pipeline": RESNET50_8K
    | {
        "model_name": "cifar_resnet56",
        "pipeline_validation_model": True,
        "available_memory_proportion": [13.5],
        "pipeline_splits": [f"{name}_post_addition_relu" for name in ("conv2_block4", "conv2_block7", "conv3_block4")],
    },
    "resnet50_16ipus_8k_gn_pipeline": RESNET50_8K | {"norm_layer": {"name": "group_norm", "num_groups": 32}},
    "resnet50_mlperf_bs16": MLPERF,
    "resnet50_mlperf_pod16_bs20": MLPERF_20,
    "resnet50_mlperf_pod4_bs20": MLPERF_20 | {"num_replicas": 4, "global_batch_size": 480},
    "resnet50_mlperf_pod16_lars": MLPERF_LARS,
    "resnet50_infer_base": INFER,
    "resnet50_infer_bs1": INFER | batch_of(1),
    "resnet50_infer_bs16": INFER | batch_of(16),
    "resnet50_infer_bs32": INFER | batch_of(32),
    "resnet50_infer_test": INFER | batch_of(1),
}


def as_given(resolved: Resolved) -> dict[str, Any]:
    """Return all values, those of the reference's options as its configurations give them."""
    source = {name: given.value for name, given in resolved.source.items()}
    return to_flat(resolved.config) | {name: list(v) if isinstance(v, tuple) else v for name, v in source.items()}


@pytest.mark.parametrize("name", TF2)
def test_values(name):
    resolved = resolve({}, name, environ={})
    flat = as_given(resolved)
    assert resolved.source["application"].value == "tf2"
    assert {option: flat[option] for option in TF2[name]} == TF2[name]


def test_no_configuration_is_left_out_of_the_table():
    blocks = [block.name for block in named_blocks(None).values() if block.file == "reference_tf2.yml"]
    assert {name for name in blocks if not name.startswith("_")} == set(TF2)
