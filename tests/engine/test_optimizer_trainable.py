"""Frozen weights and layer-wise learning rates, against steps worked out by hand."""

from typing import Any

import numpy as np
import pytest

from headrace.config.load import config_from, resolve
from headrace.core.errors import ConfigError
from headrace.core.tree import flatten_named
from headrace.engine.lr_curve import make_lr_curve
from headrace.engine.optimizer import make_optimizer
from headrace.engine.trainable import decayed_by_layer, make_trainable
from headrace.model.network import weights_like
from headrace.run.design import design_run

NAMES = ("a/kernel", "a/bias", "b/bn/gamma", "b/bn/beta", "c/kernel")


def trainable(shapes=None, **options):
    shapes = {name: (2, 2) if name.endswith("kernel") else (2,) for name in NAMES} | (shapes or {})
    arrays = {name: np.zeros(shape) for name, shape in shapes.items()}
    return make_trainable(config_from(options).weights, lambda: arrays, lambda names: "c", ("a", "b", "relu", "c"))


def test_names_decide():
    found = trainable(freeze=("^a/", "gamma"), layer_lr={"bn": 0.5, "b": 0.1})
    assert [found.rate_factor(name) for name in NAMES] == [0, 0, 0, 0.5, 1]
    found = trainable(variable_filter=("kernel",))
    assert [found.frozen(name) for name in NAMES] == [False, True, True, True, False]
    found = trainable(freeze=("backbone",))
    assert [found.frozen(name) for name in NAMES] == [True] * 4 + [False]
    found = trainable(layer_lr={"gamma": 0.5, "backbone": 0.1})
    assert [found.rate_factor(name) for name in NAMES] == [0.1, 0.1, 0.5, 0.1, 1]
    assert trainable().everything
    assert not trainable(layer_lr={"a": 0.5}).any_frozen
    assert trainable(layer_lr={"a": 0}).any_frozen


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"freeze": ("^con",)}, "freeze '.con' matches no weight"),
        ({"variable_filter": ("kernels",)}, "variable_filter 'kernels' matches no weight"),
        ({"layer_lr": {"x9": 2}}, "layer_lr 'x9' matches no weight"),
        ({"freeze": (".",)}, "Every weight is frozen"),
        ({"freeze": ("[",)}, "not one"),
        ({"layer_lr": {"a": -1}}, "0 or more"),
        ({"layer_lr": {"a": "fast"}}, "0 or more"),
        ({"layer_lr": {"(": 1}}, "regular expressions"),
    ],
)
def test_what_would_do_nothing_is_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        trainable(**options)


def test_rates_decay_from_layer_to_layer_however_the_network_is_cut():
    # As timm groups a ResNet: the stem, each unit, the head.
    design = design_run(
        config_from({"model_name": "resnet18", "layer_decay": 0.5, "dataset": "cifar10", "micro_batch_size": 8}),
        absent_ok=True,
    )
    units = [f"conv{group}_block{unit}" for group in (2, 3, 4, 5) for unit in (1, 2)]
    expected = dict(zip(["conv1", *units, "predictions"], 0.5 ** np.arange(9, -1, -1), strict=True))
    names = flatten_named(weights_like(design.network)[0])
    assert {name.split("/")[0] for name in names} == set(expected)
    for name in names:
        assert design.trainable.rate_factor(name) == expected[name.split("/")[0]]
    cut = design.network.refined(["conv2_block1/2_conv", "conv4_block2/1_conv"])
    assert len(cut.block_names) > len(design.network.block_names)
    again = decayed_by_layer(0.5, cut.block_names, names)
    assert dict(again) == expected
    # A norm alone is of the layer before it; factors by name multiply.
    found = trainable(layer_decay=0.5, layer_lr={"kernel": 0.1}, shapes={"b/bn/gamma": (2,), "b/bn/beta": (2,)})
    assert [found.rate_factor(name) for name in NAMES] == pytest.approx([0.05, 0.5, 0.5, 0.5, 0.1])
    with pytest.raises(ConfigError, match=r"layer_decay is 0\.5, and the network has one block with weights"):
        decayed_by_layer(0.5, ("network",), {"network/a/kernel": np.zeros((2, 2))})
    for wrong in (0, -1, 1.5):
        with pytest.raises(ConfigError, match="more than 0 and at most 1"):
            trainable(layer_decay=wrong)


LARS = {"momentum": 0.9, "weight_decay": 0.01, "eeta": 0.1, "epsilon": 0}
RULES = {
    "sgd": {"momentum": 0.9},
    "lars": LARS,
    "rmsprop": {"momentum": 0.9, "decay": 0.9, "epsilon": 0.001},
    "adamw": {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
}


def test_options_about_a_file_are_remarked_on_without_one():
    notes = resolve({"init_ema": True, "init_min_loaded": 0.5}, "none", environ={}).notes
    assert [note for note in notes if "without weights" in note] == [
        "init_ema on (command line) has no effect without weights.",
        "init_min_loaded 0.5 (command line) has no effect without weights.",
    ]


@pytest.mark.parametrize("optimizer", RULES)
def test_a_factor_is_another_learning_rate_and_frozen_weights_stay_whatever_decays(optimizer):
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(3, 2)).astype(np.float32) for name in ("slow", "still", "plain")}
    grads = [{name: rng.normal(size=(3, 2)).astype(np.float32) for name in params} for _ in range(3)]
    decays = {"weight_decay": 0.01, "l2_regularization": 0.02}

    def final(rate, **options):
        learning = {"optimizer": optimizer, "optimizer_params": RULES[optimizer], **decays, **options}
        config = config_from({**learning, "lr_schedule_params": {"initial_learning_rate": rate}})
        curve = make_lr_curve(config.learning, global_batch_size=1, updates_per_epoch=1, num_epochs=9)
        weights = make_trainable(config.weights, lambda: params, lambda names: "")
        rule = make_optimizer(config.learning, curve, 1, weights)
        state, now = rule.init(params), params
        updates: Any
        for step, grad in enumerate(grads):
            updates, state = rule.update(grad, state, now, step=step)
            now = {name: np.asarray(now[name] + updates[name]) for name in now}
        return now

    found = final(0.1, freeze=("still",), layer_lr={"slow": 0.25})
    np.testing.assert_array_equal(found["still"], params["still"])
    np.testing.assert_allclose(found["slow"], final(0.025)["slow"], rtol=1e-5)
    np.testing.assert_array_equal(found["plain"], final(0.1)["plain"])
