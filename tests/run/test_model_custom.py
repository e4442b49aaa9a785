"""Own networks through the real machinery: every plan the same weights, exact evaluation, checkpoints, refusals."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from headrace import Model, custom_network
from headrace.checkpoint.store import verify
from headrace.core.errors import CheckpointError, ConfigError, DataError
from headrace.core.tree import flatten_named
from headrace.model.context import Ctx
from headrace.model.layers import Conv, Dense, GlobalAveragePool
from headrace.run.fit import resume
from headrace.run.validation import validate
from tests.model.build import compute

from .conftest import assert_same_bits, final_state

RNG = np.random.default_rng(5)
LABELS = RNG.integers(0, 4, 96)
IMAGES: Any = (RNG.normal(size=(96, 8, 8, 3)) + LABELS[:, None, None, None]).astype(np.float32)


def convolve(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def conv_init(channels):
    return lambda rng, shape: {"w": jax.random.normal(rng, (3, 3, shape[-1], channels)) / np.sqrt(9 * shape[-1])}


def norm_init(rng, shape):
    moments = {"mean": jnp.zeros(shape[-1]), "var": jnp.ones(shape[-1])}
    return {"gamma": jnp.ones(shape[-1])}, moments


def norm_apply(params, x, stats, train):
    if train:
        mean = x.mean((0, 1, 2))
        stats = {"mean": mean, "var": jnp.square(x - mean[None, None, None]).mean((0, 1, 2))}
    scale = params["gamma"] * jax.lax.rsqrt(stats["var"] + 1e-3)
    return (x - stats["mean"][None, None, None]) * scale[None, None, None], stats


def dropped(x, rng):
    return x if rng is None else jnp.where(jax.random.bernoulli(rng, 0.8, x.shape), x / 0.8, 0)


TRIPLES = [
    ("conv1", conv_init(8), lambda params, x: jnp.tanh(convolve(x, params["w"]))),
    ("norm", norm_init, norm_apply),
    ("drop", lambda rng, shape: (), lambda params, x, rng: dropped(x, rng)),
    ("conv2", conv_init(8), lambda params, x: jnp.tanh(convolve(x, params["w"]))),
    ("pool", lambda x: x.mean((1, 2))),
    ("head", lambda rng, shape: jax.random.normal(rng, (*shape, 4)), lambda params, x: x @ params),
]


class Block(linen.Module):
    channels: int

    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.Conv(self.channels, (3, 3), use_bias=False)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.8)(x)
        return linen.Dropout(0.2, deterministic=not train)(linen.swish(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(8, 8, (3, 3), rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.tanh(self.conv(x)))


FLAX = [("first", Block(8)), ("second", NnxBlock), ("pool", lambda x: x.mean((1, 2))), ("head", linen.Dense(4))]


@pytest.fixture
def make(tmp_path):
    def build(blocks: Any = TRIPLES, **options: Any) -> Model:
        places = {"log_dir": str(tmp_path / "runs"), "progress": "none"}
        batch = {"micro_batch_size": 4, "lr_schedule_params": {"initial_learning_rate": 0.01}}
        shape = {"input_shape": (8, 8, 3), "num_classes": 4} if isinstance(blocks, list) else {}
        every: dict[str, Any] = {"config": "none", "num_epochs": 1} | shape | batch | places | options
        return Model(blocks, **every)

    return build


def assert_close(found, wanted, tolerance=2e-5):
    """Compare two trees leaf by leaf, relative to the largest number of the leaf."""
    found, wanted = flatten_named(found), flatten_named(wanted)
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert np.abs(found[name] - leaf).max() <= tolerance * np.abs(leaf).max(), name


LEARNING = {"optimizer_params": {"momentum": 0.9}, "ema_decay": 0.9, "label_smoothing": 0.1}
ONE = {"gradient_accumulation_count": 8}
TWO_STAGES = {"gradient_accumulation_count": 4, "num_replicas": 2, "num_pipeline_stages": 2}
FOUR_STAGES = {
    "gradient_accumulation_count": 4,
    "num_replicas": 2,
    "num_pipeline_stages": 4,
    "device_mapping": [0, 1, 1, 0],
}
CASES = [
    pytest.param(TRIPLES, FOUR_STAGES, id="triples-4"),
    pytest.param(FLAX, TWO_STAGES, id="flax-2"),
    pytest.param(TRIPLES, TWO_STAGES | {"pipeline_schedule": "Grouped"}, id="triples-2", marks=pytest.mark.slow),
    pytest.param(FLAX, FOUR_STAGES | {"recomputation": True}, id="flax-4", marks=pytest.mark.slow),
    pytest.param(FLAX, {"num_replicas": 4, "gradient_accumulation_count": 2}, id="flax-1", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("blocks", "plan"), CASES)
def test_every_plan_gives_the_weights_of_one_device(make, blocks, plan):
    one, other = make(blocks, **LEARNING, **ONE), make(blocks, **LEARNING, **plan)
    assert (other.plan().pipeline is None) == ("num_pipeline_stages" not in plan)
    results: list[Any] = [model.fit(IMAGES, LABELS) for model in (one, other)]
    assert [result.step for result in results] == [3, 3]
    assert_close(other.params, one.params)
    assert_close(other.stats, one.stats)
    ema = [{k: v for k, v in final_state(result.directory).items() if k.startswith("ema")} for result in results]
    assert ema[0]
    assert_close(ema[1], ema[0])
    start = one.network.init(0)[0]
    assert min(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (start, one.params)), strict=True)) > 1e-3


def test_evaluate_and_predict_are_those_of_the_functions(make):
    model = make(num_replicas=2, gradient_accumulation_count=2)
    assert model.fit(IMAGES[:64], LABELS[:64], num_epochs=2, weight_updates_per_epoch=3).step == 6  # 64 images fill 4
    logits = model.logits(IMAGES[:37], weights="raw")
    direct, _ = compute(model.network, model.params, model.stats, IMAGES[:37], Ctx(train=False))
    np.testing.assert_allclose(logits, direct, rtol=1e-5, atol=1e-6)
    report = model.evaluate(IMAGES[:37], LABELS[:37])
    exponents = np.exp(logits.astype(np.float64))
    losses = -np.log(exponents[np.arange(37), LABELS[:37]] / exponents.sum(1))
    assert report["num_samples"] == 37
    assert model.evaluate(IMAGES[:37], LABELS[:37], steps=2)["num_samples"] == 16  # 2 replicas x 4 images each
    assert np.sum(report["confusion_matrix"]) == 37
    assert report["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert report["top1"] == (logits.argmax(1) == LABELS[:37]).mean()


def test_bytes_are_preprocessed_and_floats_are_not(make):
    network = custom_network(
        [("pool", GlobalAveragePool()), ("head", Dense(features=4, logits=True))], input_shape=(8, 8, 3), num_classes=4
    )
    bytes_ = RNG.integers(0, 256, (64, 8, 8, 3), np.uint8)
    model = make(network, normalization="per-channel", class_names=["a", "b", "c", "d"])
    result = model.fit(bytes_, LABELS[:64], num_epochs=1, validation_data=(bytes_[:9], LABELS[:9]))
    assert result.validation["raw"].num_samples == 9
    scaled = bytes_ / 255
    normal = (scaled - scaled.mean((0, 1, 2))) / scaled.std((0, 1, 2))
    kernel, bias = model.params["head"]["kernel"], model.params["head"]["bias"]
    logits = model.logits(bytes_[:5], weights="raw")
    np.testing.assert_allclose(logits, normal[:5].mean((1, 2)) @ kernel + bias, rtol=1e-4, atol=1e-5)
    with pytest.raises(DataError, match="trained on were uint8"):
        model.logits(IMAGES)
    again = make(network).load_weights(result.directory)
    np.testing.assert_array_equal(again.logits(bytes_[:5]), model.logits(bytes_[:5]))
    assert [row["name"] for row in again.evaluate(bytes_, LABELS[:64])["classes"]] == ["a", "b", "c", "d"]


def test_an_interrupted_fit_goes_on_to_the_same_bits(make, capsys):
    options = {**LEARNING, "gradient_accumulation_count": 4}
    whole = make(**options, run_name="whole").fit(IMAGES, LABELS, num_epochs=2)
    half = make(**options, run_name="half").fit(IMAGES, LABELS, num_epochs=1)
    goes_on = make(**options, num_replicas=1)
    result = goes_on.fit(IMAGES, LABELS, num_epochs=2, resume=half.directory)
    assert result.step == 12
    assert_same_bits(final_state(half.directory), final_state(whole.directory))
    config = json.loads((half.directory / "config.json").read_text())
    assert config["custom"]["network"] == "custom_network"
    assert not {"dataset", "model_name"} & config["values"].keys()
    for command in (lambda: resume(half.directory), lambda: list(validate(half.directory))):
        with pytest.raises(CheckpointError, match=r"headrace\.Model"):
            command()


def test_weights_are_saved_loaded_and_trained_further(make, tmp_path):
    model = make(FLAX, ema_decay=0.9, gradient_accumulation_count=4)
    with pytest.raises(ConfigError, match="nothing to save"):
        model.save(tmp_path / "too_early")
    before = model.logits(IMAGES[:5], weights="raw")
    model.fit(IMAGES, LABELS)
    path = model.save(tmp_path / "mine")
    assert not verify(path)
    for weights in ("raw", "ema"):
        again = make(FLAX, micro_batch_size=8, num_replicas=2).load_weights(path)
        np.testing.assert_allclose(
            again.logits(IMAGES, weights=weights), model.logits(IMAGES, weights=weights), rtol=1e-5, atol=1e-6
        )
    assert np.abs(model.logits(IMAGES[:5], weights="raw") - before).max() > 1e-3
    still = make(FLAX, lr_schedule_params={"initial_learning_rate": 0.0}, bn_momentum=1).load_weights(path)
    still.fit(IMAGES, LABELS)
    assert_close(still.params, model.params, 0)
    with pytest.raises(CheckpointError, match="does not fit"):
        make(TRIPLES).load_weights(path)
    (tmp_path / "notes").mkdir()
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        model.save(tmp_path / "notes")
    with pytest.raises(CheckpointError, match="not a run directory"):
        model.load_weights(tmp_path / "notes")


def test_batch_norms_bring_their_momentum(make):
    assert make(FLAX).config.model.bn_momentum == 0.8
    assert make(FLAX, bn_decay=0.5).config.model.bn_momentum == 0.5
    assert make(TRIPLES).config.model.bn_momentum == 0.97
    with pytest.raises(ConfigError, match=r"several momentums: 0\.8, 0\.9"):
        make([*FLAX[:1], ("bn", linen.BatchNorm(momentum=0.9)), *FLAX[2:]])
    with pytest.raises(ConfigError, match="stable_norm is given"):
        make(FLAX, stable_norm=True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"micro_batchsize": 8}, "no option micro_batchsize.*micro_batch_size"),
        ({"model": "resnet50"}, "model has no meaning here"),
        ({"training": False}, "fit trains"),
        ({"optimizer": "sgdd"}, "Did you mean sgd"),
        ({"pipeline_splits": ["conv3"]}, "conv3.*Did you mean conv2"),
        ({"num_pipeline_stages": 9}, "cannot be cut into 9 stages"),
        ({"num_pipeline_stages": 2, "device_mapping": [0, 2]}, "device"),
        ({"normalization": "zeroone1"}, "normalization is"),
        ({"class_names": ["a"]}, "1 names"),
        ({"input_shape": None}, "needs input_shape"),
        ({"num_classes": 5}, "not one number for each of 5 classes"),
        ({"input_shape": (8, 8, 3, 1)}, "input_shape is"),
    ],
)
def test_what_cannot_work_is_refused_when_the_model_is_made(make, options, told):
    with pytest.raises((ConfigError, DataError), match=told):
        make(**options)


def test_bad_data_is_refused_before_anything_starts(make, tmp_path):
    model = make()
    calls = [
        (lambda: model.fit(IMAGES.astype(np.float64), LABELS), "float64"),
        (lambda: model.fit(IMAGES[:, :4], LABELS), "4x8x3, the network takes 8x8x3"),
        (lambda: model.fit(IMAGES, LABELS + 1), "Label 4 of image"),
        (lambda: model.fit(IMAGES, LABELS, validation_data=(IMAGES, LABELS - 1)), "Label -1 of validation image"),
        (lambda: model.fit(IMAGES, LABELS, validation_data=IMAGES), "not a pair"),
        (lambda: model.fit(IMAGES[:3], LABELS[:3]), "One step takes 4 samples"),
        (lambda: model.evaluate(IMAGES, LABELS[:5]), "96 images, but 5 labels"),
        (lambda: model.evaluate(IMAGES, LABELS, weights="mean"), "weights is 'mean'"),
        (lambda: model.logits(IMAGES, weights="ema"), "weights is 'ema'"),
        (lambda: make(validation=True).fit(IMAGES, LABELS), "no validation_data"),
        (lambda: make(Conv(channels=3)), "list of blocks|needs input_shape"),
    ]
    for call, told in calls:
        with pytest.raises((ConfigError, DataError), match=told):
            call()
    assert not Path(tmp_path / "runs").exists()


def test_the_plan_prints(make):
    text = str(make(FLAX, num_pipeline_stages=2, gradient_accumulation_count=4).plan(num_samples=960))
    assert "steps per epoch" in text
    assert "60" in text
    assert "first" in text
