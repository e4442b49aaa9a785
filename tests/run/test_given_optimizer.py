"""An optimizer that code gives: beside ours with the same formula, resumed, sharded, and refused with a reason."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import headrace as hr
from headrace.core.errors import CheckpointError, ConfigError
from headrace.run.fit import resume

IMAGES = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 1), np.uint8)
LABELS = np.arange(64) % 4
OPTIONS: dict[str, Any] = {
    "batch_size": 16,
    "validation": False,
    "progress": "none",
    "lr_schedule": "linear",
    "warmup_epochs": 0,
    "learning_rate": 0.01,
    "ema_decay": 0,
    "report": False,
    "weight_decay": 0,
}


def trained(place: Path, optimizer: Any, epochs: int = 2, **options: Any) -> hr.Model:
    model = hr.Model("toy_model", num_classes=4)
    model.fit(IMAGES, LABELS, optimizer=optimizer, output=place, epochs=epochs, **OPTIONS | options)
    return model


def assert_close(one: hr.Model, other: hr.Model, rtol: float = 1e-5) -> None:
    pairs = list(zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True))
    assert len(pairs) > 2
    for mine, its in pairs:
        np.testing.assert_allclose(mine, its, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_replicas": 2, "replicated_optimizer_state_sharding": True},
        {"gradient_accumulation_count": 2, "batch_size": None, "micro_batch_size": 8},
    ],
)
def test_adam_of_optax_learns_what_ours_does(tmp_path, options):
    ours = trained(tmp_path / "ours", "adam", optimizer_params={"epsilon": 1e-8}, **options)
    assert_close(ours, trained(tmp_path / "optax", lambda rate: optax.adam(rate, eps=1e-8), **options))


def test_one_that_looks_at_all_weights_may_be_sharded(tmp_path):
    def clipped(rate: jax.Array) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(0.1), optax.adam(rate))

    shards = {"num_replicas": 2, "replicated_optimizer_state_sharding": True}
    whole = trained(tmp_path / "whole", clipped, num_replicas=2)
    assert_close(whole, trained(tmp_path / "sharded", clipped, **shards), rtol=1e-4)
    assert_close(whole, trained(tmp_path / "host", clipped, num_replicas=2, optimizer_state_offloading=True), rtol=1e-4)


def test_it_is_resumed_with_its_state(tmp_path):
    def adafactor(rate: jax.Array) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_block_rms(1.0), optax.scale_by_amsgrad(), optax.scale(-1.0), optax.scale(rate))

    whole = trained(tmp_path / "whole", adafactor, epochs=3, lr_schedule="const")
    trained(tmp_path / "part", adafactor, epochs=1, lr_schedule="const")
    model = hr.Model("toy_model", num_classes=4)
    model.fit(IMAGES, LABELS, optimizer=adafactor, resume=tmp_path / "part", epochs=3)
    for mine, its in zip(jax.tree.leaves(model.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_array_equal(mine, its)
    with pytest.raises(CheckpointError, match="optimizer"):
        resume(tmp_path / "part", {"num_epochs": 4})


def test_what_it_may_not_be(tmp_path):
    def refused(optimizer: Any, **options: Any) -> str:
        with pytest.raises(ConfigError) as error:
            trained(tmp_path / "none", optimizer, **options)
        assert not (tmp_path / "none").exists()
        return str(error.value)

    assert "a rate of its own" in refused(optax.adam(1e-3))
    with pytest.raises(ConfigError, match="no learning rate is"):
        hr.Model("toy_model", num_classes=4).fit(IMAGES, LABELS, optimizer=optax.adam, output=tmp_path / "none")
    assert "2 stages" in refused(optax.adam, num_pipeline_stages=2, gradient_accumulation_count=2)
    grows = optax.GradientTransformation(
        lambda params: jnp.zeros(1), lambda updates, state, params=None: (updates, jnp.zeros(2))
    )
    assert "another form after a step" in refused(lambda rate: grows)
    with pytest.raises(ConfigError, match="no code gives it"):
        trained(tmp_path / "none", "given")


def test_an_error_in_it_names_its_line(tmp_path):
    def wrong(rate: jax.Array) -> optax.GradientTransformation:
        if rate > 0.1:
            return optax.sgd(0.1)
        return optax.adam(rate)

    with pytest.raises(Exception) as error:  # noqa: PT011
        trained(tmp_path / "none", wrong)
    assert "the optimizer failed" in "".join(error.value.__notes__)
