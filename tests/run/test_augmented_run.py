"""Whole runs with changed, mixed and weighted samples: plans with the same micro-batches give the same weights."""

import pytest

from headrace.checkpoint.store import list_checkpoints
from headrace.core.errors import ConfigError
from headrace.run.fit import resume, train

from .conftest import assert_close, assert_same_bits, final_state

SMALL = {
    "num_epochs": 1,
    "weight_updates_per_epoch": 6,
    "micro_batch_size": 8,
    "global_batch_size": 32,
    "lr_schedule_params": {"initial_learning_rate": 0.0001},
    "label_smoothing": 0.1,
    "class_weights": "balanced",
    "mixup_alpha": 0.4,
    "cutmix_alpha": 1.0,
    "color_jitter": 0.3,
    "gaussian_blur": 0.3,
    "vertical_flip": True,
    "rotation": 20,
    "rand_augment": 1,
    "rand_augment_operations": ["contrast", "rotate"],
    "random_erasing": 0.5,
}


def test_stages_and_replicas_mix_the_same_images_and_labels(quick):
    """The labels are mixed on the last stage, without the images."""
    plain = train(quick(run_name="plain", **SMALL, validation=False))
    staged = train(quick(run_name="staged", **SMALL, validation=False, num_pipeline_stages=2, num_replicas=2))
    assert_close(final_state(staged.directory), final_state(plain.directory), 5e-4)


TODAY = {
    **SMALL,
    "model_name": "cifar_resnet8",
    "class_weights": "",
    "optimizer": "lamb",
    # With its usual 1e-6 a gradient that is only rounding, as those of some betas are, moves a weight as far as others.
    "optimizer_params": {"epsilon": 0.01},
    "lr_schedule_params": {"absolute_learning_rate": 0.005},
    "weight_decay": 0.02,
    "weight_decay_exclude": ["gamma", "beta", "bias"],
    "loss": "bce",
    "bce_target_threshold": 0.2,
    "mixup_switch_prob": 0.5,
    "rand_augment_std": 3.0,
    "rand_augment_probability": 0.5,
    "repeated_augmentation": 3,
    "block_survival_prob": 0.5,
    "train_image_size": 24,
    "ema_decay": 0.9,
}


@pytest.mark.slow
def test_all_of_the_a2_procedure_in_stages_and_replicas(quick, tmp_path):
    plain = train(quick(run_name="plain", **TODAY))
    staged = train(quick(run_name="staged", **TODAY, num_pipeline_stages=2, num_replicas=2))
    assert_close(final_state(staged.directory), final_state(plain.directory), 5e-4)
    assert "training images: 24x24, shrunk from 32x32" in (tmp_path / "runs" / "plain" / "metrics.jsonl").read_text()
    kept = train(quick(run_name="kept", **TODAY | {"block_survival_prob": 1.0}))
    with pytest.raises(AssertionError):
        assert_close(final_state(kept.directory), final_state(plain.directory), 5e-4)


@pytest.mark.slow
def test_the_host_side_gives_the_same_weights(quick):
    plain = train(quick(run_name="plain", **SMALL))
    host = train(quick(run_name="host", **SMALL, accelerator_side_preprocess=False))
    assert_close(final_state(host.directory), final_state(plain.directory), 5e-4)
    unmixed = train(quick(run_name="unmixed", **SMALL | {"mixup_alpha": 0, "cutmix_alpha": 0}))
    with pytest.raises(AssertionError):
        assert_close(final_state(unmixed.directory), final_state(plain.directory), 5e-4)


def test_weights_must_be_one_for_each_class(quick, tmp_path):
    with pytest.raises(ConfigError, match="3 numbers"):
        train(quick(class_weights="1 2 3"))
    assert not (tmp_path / "runs").exists()


GROWING = {
    "model_name": "cifar_resnet8",
    "num_epochs": 3,
    "weight_updates_per_epoch": 2,
    "micro_batch_size": 8,
    "global_batch_size": 16,
    "progressive_resolution": 8,
    "progressive_resolution_sizes": 2,
    "progressive_resolution_end": 0.67,
    "cutmix_alpha": 1.0,
}


@pytest.mark.slow
def test_growing_images_in_stages_and_after_a_resume(quick, tmp_path):
    plain = train(quick(run_name="plain", **GROWING))
    staged = train(quick(run_name="staged", **GROWING, num_pipeline_stages=2))
    assert_close(final_state(staged.directory), final_state(plain.directory), 5e-4)
    text = (tmp_path / "runs" / "plain" / "metrics.jsonl").read_text()
    assert "image sizes: 8x8 from step 0, 32x32 from step 4" in text
    assert "training at 8x8 compiled" in text
    newest = list_checkpoints(tmp_path / "runs" / "plain" / "checkpoints")[-1]
    whole = final_state(plain.directory)
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    (tmp_path / "runs" / "plain" / "metrics.jsonl").unlink()
    resumed = resume(tmp_path / "runs" / "plain")
    assert resumed.step == 6
    assert_same_bits(final_state(resumed.directory), whole)
