"""The named configurations of the reference's first application, as our options; this table is from its values.

It gives learning rates as powers of two per image or absolutely, and weight decay coupled; defaults that its
configurations rely on are in the table too: float16 with a loss scale of 128, a warm-up of 5 epochs.
"""

import pytest

from headrace.config.load import named_blocks, resolve
from headrace.config.section_model import norm_choice
from headrace.run.design import design_run
from tests.reference.test_recipes_tf2 import as_given

SPLITS = ["b1/2/relu", "b2/3/relu", "b3/3/relu"]
SEVEN = [f"stage{unit}/relu" for unit in ("1/unit1", "1/unit3", "2/unit1", "2/unit3", "3/unit1", "3/unit4")]
DEFAULTS = {"half_type": "float16", "loss_scaling": 128, "label_smoothing_classes": "others", "weight_decay": 0}


def rate(power: float, global_batch: int) -> float:
    return 2.0**power * global_batch


BASE = DEFAULTS | {
    "model_name": "resnet50",
    "dataset": "imagenet",
    "stable_norm": True,
    "internal_exchange_optimization_target": "balanced",
    "half_partials": True,
    "normalization": "per-channel",
    "recomputation": True,
    "ckpts_per_epoch": 1,
    "logs_per_epoch": 1,
    "eight_bit_transfer": True,
    "l2_regularization": 1e-4,
    "num_epochs": 100,
    "precision": "16.16",
}
GN = BASE | {
    "micro_batch_size": 8,
    "optimizer": "momentum",
    "optimizer_params": {"momentum": 0.9},
    "num_epochs": 65,
    "lr_schedule": "cosine",
    "label_smoothing": 0.1,
}
BN = BASE | {
    "micro_batch_size": 16,
    "optimizer": "momentum",
    "optimizer_params": {"momentum": 0.9},
    "pipeline_num_parallel": 32,
    "pipeline_schedule": "Grouped",
    "pipeline_splits": SPLITS,
    "available_memory_proportion": [0.15],
    "optimizer_state_offloading": False,
    "precision": "16.32",
    "lr_schedule": "cosine",
    "label_smoothing": 0.1,
}
B4 = DEFAULTS | {
    "model_name": "efficientnet_b4",
    "dataset": "imagenet",
    "precision": "16.32",
    "norm_layer": {"name": "group_norm", "num_groups": 4},
    "optimizer": "rmsprop",
    "lr_schedule": "exponential",
    "recomputation": True,
    "conv_dithering": True,
    "available_memory_proportion": [0.15],
    "internal_exchange_optimization_target": "balanced",
    "pipeline_schedule": "Grouped",
    "average_decays": [0.97],
    "half_partials": True,
    "cutmix_lambda": 0.85,
    "mixup_alpha": 0.2,
    "optimizer_state_offloading": False,
    "num_epochs": 350,
    "label_smoothing": 0.1,
    "l2_regularization": 1e-5,
    "image_size": 380,
}
G1 = B4 | {
    "group_dim": 1,
    "expand_ratio": 6,
    "micro_batch_size": 3,
    "pipeline_splits": ["block2b", "block4b", "block6c"],
}
G16 = B4 | {
    "group_dim": 16,
    "expand_ratio": 4,
    "micro_batch_size": 5,
    "pipeline_splits": ["block2c", "block4c", "block6a"],
}
LARGE = B4 | {
    "precision": "16.16",
    "optimizer": "lars",
    "optimizer_params": {"momentum": 0.885, "weight_decay": 2.5e-6, "eeta": 0.001, "epsilon": 0},
    "lr_schedule": "polynomial",
    "internal_exchange_optimization_target": "memory",
    "available_memory_proportion": [0.4],
    "pipeline_splits": ["block4a"],
    "group_dim": 16,
    "expand_ratio": 4,
    "micro_batch_size": 3,
    "l2_regularization": 0,  # LARS decays by itself
    "lr_warmup_params": {"warmup_mode": "shift", "warmup_epochs": 70, "from_zero": True},
}
MLPERF = DEFAULTS | {
    "model_name": "resnet50",
    "dataset": "imagenet",
    "num_replicas": 16,
    "micro_batch_size": 16,
    "pipeline_splits": ["stage1/unit1/relu", "stage1/unit3/relu", "stage2/unit4/relu"],
    "device_mapping": [0, 0, 0, 0],
    "recomputation": True,
    "optimizer": "momentum",
    "optimizer_params": {"momentum": 0.9},
    "normalization": "per-channel",
    "pipeline_schedule": "Sequential",
    "available_memory_proportion": [0.2],
    "ckpts_per_epoch": 0.25,
    "internal_exchange_optimization_target": "memory",
    "half_partials": True,
    "eight_bit_transfer": True,
    "lr_schedule": "polynomial",
    "lr_warmup_params": {"warmup_mode": "shift", "warmup_epochs": 5, "from_zero": True},
    "num_epochs": 44,
    "label_smoothing": 0.1,
    "l2_regularization": 2.5e-5,
    "bn_momentum": 0.9,
    "dbn_replica_group_size": 2,
    "optimizer_state_offloading": False,
    "max_cross_replica_buffer_size": 52428800,
    "logs_per_epoch": 5,
    "fused_preprocessing": True,
    "gather_conv_output": False,
}
BS20 = MLPERF | {
    "micro_batch_size": 20,
    "available_memory_proportion": [0.15],
    "gather_conv_output": True,
    "num_epochs": 40,
    "pipeline_splits": SEVEN,
    "device_mapping": [0] * 7,
}
BS20_64 = BS20 | {"available_memory_proportion": [0.145], "num_epochs": 41, "ckpts_per_epoch": 1}
LARS = BS20 | {
    "optimizer": "lars",
    "optimizer_params": {"momentum": 0.9, "weight_decay": 5e-5, "eeta": 0.001, "epsilon": 0},
    "num_epochs": 38,
    "ckpts_per_epoch": 0.5,
    "l2_regularization": 5e-5,
    "lr_warmup_params": {"warmup_mode": "shift", "warmup_epochs": 2, "from_zero": True},
}
LARS_MANY = LARS | {"num_epochs": 41, "ckpts_per_epoch": 1, "max_reduce_many_buffer_size": 216}

# name: (values, norm, replicas, accumulation, global batch, stages, devices, highest learning rate)
TABLE = {
    "mk2_resnet8_test": (
        DEFAULTS
        | {
            "model_name": "cifar_resnet8",
            "dataset": "cifar10",
            "ckpts_per_epoch": 1,
            "logs_per_epoch": 1,
            "half_partials": True,
            "num_epochs": 10,
            "validation": False,
            "micro_batch_size": 32,
        },
        ("batch_norm", 1, 1, 32, 1, 1, rate(-6, 32)),
    ),
    "mk2_resnet50_base": (BASE, ("group_norm", 1, 1, 4, 1, 1, rate(-8, 4))),
    "mk2_resnet50_gn_16ipus": (GN, ("group_norm", 16, 8, 1024, 1, 16, rate(-11, 1024))),
    "mk2_resnet50_gn_64ipus": (GN, ("group_norm", 64, 2, 1024, 1, 64, rate(-11, 1024))),
    "mk2_resnet50_bn_16ipus": (BN, ("batch_norm", 4, 256, 16384, 4, 16, rate(-13, 16384))),
    "mk2_resnet50_bn_64ipus": (BN, ("batch_norm", 16, 64, 16384, 4, 64, rate(-13, 16384))),
    "mk2_resnet50_bn_128ipus": (BN, ("batch_norm", 32, 32, 16384, 4, 128, rate(-13, 16384))),
    "mk2_resnext101_16ipus": (
        DEFAULTS
        | {
            "model_name": "resnext101",
            "dataset": "imagenet",
            "micro_batch_size": 6,
            "num_epochs": 120,
            "recomputation": True,
            "pipeline_splits": ["b3/3/relu"],
            "pipeline_schedule": "Grouped",
            "optimizer": "momentum",
            "optimizer_params": {"momentum": 0.9},
            "ckpts_per_epoch": 1,
            "internal_exchange_optimization_target": "balanced",
            "optimizer_state_offloading": False,
            "normalization": "per-channel",
            "stable_norm": True,
            "validation": False,
            "half_partials": True,
            "lr_schedule": "cosine",
            "label_smoothing": 0.1,
            "eight_bit_transfer": True,
        },
        ("group_norm", 8, 16, 768, 2, 16, rate(-11, 768)),
    ),
    "mk2_efficientnet_b4_g1_16ipus": (G1, ("group_norm", 4, 64, 768, 4, 16, rate(-14, 768))),
    "mk2_efficientnet_b4_g1_32ipus": (G1, ("group_norm", 8, 32, 768, 4, 32, rate(-14, 768))),
    "mk2_efficientnet_b4_g1_64ipus": (G1, ("group_norm", 16, 16, 768, 4, 64, rate(-14, 768))),
    "mk2_efficientnet_b4_g16_16ipus": (G16, ("group_norm", 4, 40, 800, 4, 16, rate(-14, 800))),
    "mk2_efficientnet_b4_g16_64ipus": (G16, ("group_norm", 16, 8, 640, 4, 64, rate(-14, 640))),
    "efficientnet_b4_g16_large_batch_size_high_throughput": (
        LARGE,
        ("group_norm", 4, 1, 12, 2, 8, rate(-9.5, 12)),
    ),
    "mk2_efficientnet_b4_g16_16ipus_large_batch": (LARGE, ("group_norm", 8, 256, 6144, 2, 16, rate(-9.5, 6144))),
    "mk2_efficientnet_b4_g16_32ipus": (LARGE, ("group_norm", 16, 128, 6144, 2, 32, rate(-9.5, 6144))),
    "mk2_efficientnet_b4_g16_64ipus_large_batch": (LARGE, ("group_norm", 32, 64, 6144, 2, 64, rate(-9.5, 6144))),
    "mk2_efficientnet_b4_g16_128ipus": (LARGE, ("group_norm", 64, 32, 6144, 2, 128, rate(-9.5, 6144))),
    "mk2_efficientnet_b4_g16_256ipus": (LARGE, ("group_norm", 128, 16, 6144, 2, 256, rate(-9.5, 6144))),
    "mk1_resnet50_16ipus": (
        GN
        | {
            "micro_batch_size": 4,
            "pipeline_splits": ["b1/2/relu", "b2/3/relu", "b3/5/relu"],
            "pipeline_schedule": "Grouped",
            "available_memory_proportion": [0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.16, 0.2],
            "max_cross_replica_buffer_size": 100000000,
            "eight_bit_transfer": None,
            "logs_per_epoch": 16,
        },
        ("group_norm", 4, 64, 1024, 4, 16, rate(-11, 1024)),
    ),
    "mk2_resnet50_mlperf_pod16": (MLPERF, ("batch_norm", 16, 9, 2304, 4, 16, 4.588)),
    "mk2_resnet50_mlperf_pod16_bs20": (BS20, ("batch_norm", 16, 6, 1920, 7, 16, 3.824)),
    "mk2_resnet50_mlperf_pod64_bs20": (BS20_64 | {"num_replicas": 64}, ("batch_norm", 64, 2, 2560, 7, 64, 5.098)),
    "mk2_resnet50_mlperf_pod128_bs20": (
        BS20_64 | {"num_replicas": 128, "available_memory_proportion": [0.14]},
        ("batch_norm", 128, 2, 5120, 7, 128, 4.078),
    ),
    "mk2_resnet50_mlperf_pod16_lars": (LARS, ("batch_norm", 16, 10, 3200, 7, 16, 10.72)),
    "mk2_resnet50_mlperf_pod64_lars": (
        LARS | {"num_replicas": 64, "max_reduce_many_buffer_size": 216},
        ("batch_norm", 64, 3, 3840, 7, 64, 12.15),
    ),
    "mk2_resnet50_mlperf_pod128_lars": (LARS_MANY | {"num_replicas": 128}, ("batch_norm", 128, 2, 5120, 7, 128, 12.1)),
    "mk2_resnet50_mlperf_pod256_lars": (
        LARS_MANY | {"num_replicas": 256, "num_epochs": 45},
        ("batch_norm", 256, 2, 10240, 7, 256, 20.2),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_values_and_plan(name):
    values, (norm, replicas, accumulation, global_batch, stages, devices, highest) = TABLE[name]
    resolved = resolve({}, name, environ={})
    config, flat = resolved.config, as_given(resolved)
    assert resolved.source["application"].value == "tf1"
    assert {option: flat[option] for option in values} == values
    assert norm_choice(config.model)["name"] == norm
    design = design_run(config, absent_ok=True)
    plan = design.plan
    assert (plan.batch.num_replicas, plan.batch.gradient_accumulation_count) == (replicas, accumulation)
    assert plan.batch.global_batch_size == global_batch
    assert (plan.pipeline.num_stages if plan.pipeline else 1) == stages
    assert plan.num_devices == devices
    # warmed up, and before the first decay of any curve has done much
    warm_up = int((flat["lr_warmup_params"] or {"warmup_epochs": 0})["warmup_epochs"] * plan.steps.updates_per_epoch)
    if flat["lr_warmup_params"]["warmup_mode"] == "shift":
        assert float(design.lr_curve(warm_up)) == pytest.approx(highest, rel=1e-3)
    else:
        assert flat["lr_schedule_params"]["initial_learning_rate"] * global_batch == pytest.approx(highest)


def test_the_base_of_the_efficientnets_asks_for_its_splits():
    flat = as_given(resolve({"pipeline_splits": ["block2b", "block4b", "block6c"]}, "mk2_efficientnet_b4_16ipus_base"))
    assert {option: flat[option] for option in B4} == B4
    assert flat["num_replicas"] == 4


def test_no_configuration_is_left_out_of_the_table():
    blocks = {block.name for block in named_blocks(None).values() if block.file == "reference_tf1.yml"}
    assert blocks == {*TABLE, "mk2_efficientnet_b4_16ipus_base"}
