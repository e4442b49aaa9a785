"""Joined vectors: the same training as with every tensor on its own, and the same state outside of the call."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.config.schema import Config
from headrace.engine.call_loop import make_call
from headrace.engine.devices import replica_mesh
from headrace.engine.optimizer import Update, make_optimizer, update_kinds
from headrace.engine.packing import make_packing
from headrace.engine.step import is_moved, make_step, with_packing
from headrace.engine.trainable import EVERYTHING, Trainable
from headrace.model.norm import NormSpec

from ..harness import (
    OPTIONS,
    assert_close,
    first_state,
    make_block,
    make_samples,
    make_spec,
    small_residual,
    train_steps,
)

NETWORK = small_residual(NormSpec())
LARS = config_from(
    OPTIONS
    | {"optimizer": "lars", "optimizer_params": {"momentum": 0.9, "weight_decay": 0, "eeta": 0.001, "epsilon": 0}}
)
FACTORS = {"conv1/norm/gamma": 0.5, "unit/norm/gamma": 0.0, "unit/norm/beta": 0.0}


def rule(config: Config, trained: Trainable = EVERYTHING) -> Update:
    return make_optimizer(config.learning, lambda step: jnp.float32(0.1), 16, trained)


def spec_and_packing(config, **given):
    spec = make_spec(config, NETWORK, 16, replicas=1, count=1, **given)
    kind = update_kinds(rule(config))
    assert kind is not None
    return spec, make_packing(first_state(spec), kind, partial(is_moved, spec))


def test_weights_of_one_kind_are_joined_and_come_back():
    config = config_from(OPTIONS)
    spec, packing = spec_and_packing(config)
    state = first_state(spec)
    packed = jax.device_get(packing.pack(state))
    # biases, gammas and betas are not decayed; the four statistics move together
    assert sorted(packed["params"]) == ["conv1/conv/kernel", "conv1/norm/beta"]
    assert packed["params"]["conv1/norm/beta"].shape == (8 + 8 + 8 + 8 + 10,)
    assert list(packed["stats"]) == ["conv1/norm/mean"]
    assert packed["opt"]["velocity"].keys() == packed["params"].keys()
    back = jax.device_get(packing.unpack(packed))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_large_weights_stay_apart(monkeypatch):
    monkeypatch.setattr("headrace.engine.packing.LARGEST_JOINED", 8 * 10)
    _, packing = spec_and_packing(config_from(OPTIONS))
    assert [group[0] for group in packing.params.groups] == ["conv1/norm/beta"]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": "adamw", "optimizer_params": {}, "weight_decay_exclude": ("beta",)}, {"ema_decay": 0.0}],
    ids=["momentum", "adamw, gammas decayed", "no averages"],
)
def test_training_is_the_same(options, count):
    config = config_from(OPTIONS | options)
    images, labels = make_samples()
    _, packing = spec_and_packing(config)
    plain = train_steps(config, NETWORK, images, labels, replicas=1, count=count)
    joined = train_steps(config, NETWORK, images, labels, replicas=1, count=count, packing=packing)
    assert_close(joined, plain)


@pytest.mark.parametrize("count", [1, 2])
def test_replicas_train_the_same(count):
    config = config_from(OPTIONS)
    images, labels = make_samples()
    _, packing = spec_and_packing(config)
    plain = train_steps(config, NETWORK, images, labels, replicas=2, count=count)
    joined = train_steps(config, NETWORK, images, labels, replicas=2, count=count, packing=packing)
    assert_close(joined, plain)


def test_gradients_are_exchanged_before_they_are_joined():
    config = config_from(OPTIONS)
    images, labels = make_samples()
    _, packing = spec_and_packing(config)
    sums = {}
    for count in (1, 2):
        spec = make_spec(config, NETWORK, images.shape[1], replicas=2, count=count, packing=packing)
        mesh = replica_mesh(jax.devices()[:2])
        block = make_block(images, labels, count)
        call = make_call(make_step(spec), mesh, block, packing)
        lowered = call.lower(first_state(spec), None, block, np.array([0, 1], np.int32))
        # Of what is as large as a gradient: shapes with more than one number.
        sums[count] = len(re.findall(r"stablehlo.all_reduce.*?\(tensor<\d+x[^)]*\) ->", lowered.as_text(), re.DOTALL))
    # Each as the backward pass makes it; after a loop over micro batches all of them are there, joined.
    assert sums[1] > sums[2] > 0


def test_frozen_norms_and_rates_of_their_own_stay_apart():
    config = config_from(OPTIONS)
    optimizer = rule(config, Trainable(factors=tuple(FACTORS.items())))
    spec = make_spec(config, NETWORK, 16, replicas=1, count=1, optimizer=optimizer)
    kind = update_kinds(optimizer)
    assert kind is not None
    packing = make_packing(first_state(spec), kind, partial(is_moved, spec))
    assert ("unit/norm/beta", "unit/norm/gamma") in packing.params.groups
    assert not any("conv1/norm/gamma" in group for group in packing.params.groups)
    first, second = packing.stats.groups
    assert (first[0], second[0]) == ("conv1/norm/mean", "unit/norm/mean")
    images, labels = make_samples()
    found, _ = train_steps(config, NETWORK, images, labels, replicas=1, count=1, optimizer=optimizer, packing=packing)
    np.testing.assert_array_equal(found["stats"]["unit"]["norm"]["mean"], np.zeros(8))
    assert np.abs(found["stats"]["conv1"]["norm"]["mean"]).max() > 0


def test_optimizers_that_look_at_whole_tensors_are_not_packed():
    assert update_kinds(rule(LARS)) is None
    lamb = config_from({"optimizer": "lamb", "weight_decay": 0.02})
    assert update_kinds(rule(lamb)) is None, "its trust ratio is that of a tensor"


def test_only_gpus_and_float32_weights_are_packed(monkeypatch):
    config = config_from(OPTIONS)
    spec = make_spec(config, NETWORK, 16, replicas=1, count=1)
    assert with_packing(spec, first_state(spec)).packing is None
    monkeypatch.setattr("headrace.engine.step.on_gpu", lambda: True)
    assert with_packing(spec, first_state(spec)).packing is not None
    config = config_from(OPTIONS | {"precision": "16.16"})
    spec = make_spec(config, NETWORK, 16, replicas=1, count=1)
    assert with_packing(spec, first_state(spec)).packing is None
