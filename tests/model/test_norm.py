"""The `norm_layer` option and the norm layer's statistics."""

import jax
import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.model.context import Ctx
from headrace.model.norm import Norm, NormSpec, make_norm_spec

from .build import compute

GROUP = {"name": "group_norm"}


@pytest.mark.parametrize(
    ("norm_layer", "words"),
    [
        ({"name": "batchnorm"}, r"no norm named 'batchnorm'.*Did you mean batch_norm"),
        ({}, "no norm named ''"),
        (GROUP, "has no number of groups.*exactly one of num_groups and channels_per_group"),
        (GROUP | {"num_groups": 2, "channels_per_group": 2}, "has both num_groups and channels_per_group"),
        (GROUP | {"num_group": 2}, r"no setting 'num_group'.*Did you mean num_groups"),
        (GROUP | {"num_groups": 0}, "at least 1"),
        (GROUP | {"num_groups": 2.5}, "must be an integer"),
        ({"name": "batch_norm", "num_groups": 2}, "no setting 'num_groups'"),
    ],
)
def test_wrong_options_are_refused(norm_layer, words):
    with pytest.raises(ConfigError, match=words):
        make_norm_spec(norm_layer)


def test_defaults_are_the_references():
    spec = make_norm_spec({"name": "batch_norm"})
    assert (spec.kind, spec.epsilon, spec.suffix) == ("batch", 1.001e-5, "bn")
    assert make_norm_spec({"name": "custom_batch_norm", "momentum": 0.9}).kind == "batch"
    assert make_norm_spec(GROUP | {"num_groups": 4}, epsilon=0.5).epsilon == 0.5


@pytest.mark.parametrize(("spec", "channels"), [(NormSpec(kind="group", num_groups=3), 16),
                                                (NormSpec(kind="group", channels_per_group=5), 16),
                                                (NormSpec(kind="group", num_groups=32), 16)])  # fmt: skip
def test_groups_must_divide_the_channels(spec, channels):
    with pytest.raises(ConfigError, match=r"does not divide 16 channels"):
        Norm(spec=spec).shape((8, 8, channels))


def test_channels_per_group_is_the_other_way_to_say_it():
    x = np.random.default_rng(0).normal(size=(2, 3, 3, 8)).astype(np.float32)
    ones, zeros = np.ones(8, np.float32), np.zeros(8, np.float32)
    params = {"gamma": ones, "beta": zeros}
    four, two_each = (
        compute(Norm(spec=make_norm_spec(GROUP | kind)), params, {}, x, Ctx(train=True))[0]
        for kind in ({"num_groups": 4}, {"channels_per_group": 2})
    )
    np.testing.assert_array_equal(four, two_each)


def test_batch_statistics_are_the_unbiased_ones():
    x = np.random.default_rng(1).normal(3, 2, (2, 3, 3, 4)).astype(np.float32)
    norm = Norm()
    params, stats = norm.init(lambda name: np.random.default_rng(0), (3, 3, 4))
    _, batch = jax.jit(lambda x: norm.apply(params, stats, x, Ctx(train=True, stable_norm=True)))(x)
    assert jax.tree.structure(batch) == jax.tree.structure(stats)
    np.testing.assert_allclose(batch["mean"], x.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(batch["variance"], x.reshape(-1, 4).var(0, ddof=1), rtol=1e-5)


def test_evaluation_uses_the_running_statistics_and_returns_them():
    x = np.random.default_rng(2).normal(size=(2, 3, 3, 4)).astype(np.float32)
    params = {"gamma": np.full(4, 2, np.float32), "beta": np.ones(4, np.float32)}
    stats = {"mean": np.full(4, 0.5, np.float32), "variance": np.full(4, 4, np.float32)}
    y, after = Norm(spec=NormSpec(epsilon=0)).apply(params, stats, jax.device_put(x), Ctx(train=False))
    np.testing.assert_allclose(y, (x - 0.5) / 2 * 2 + 1, rtol=1e-5, atol=1e-6)
    assert after is stats


def test_a_single_value_has_a_finite_variance():
    norm = Norm()
    params, stats = norm.init(lambda name: np.random.default_rng(0), (1, 1, 2))
    _, batch = compute(norm, params, stats, np.ones((1, 1, 1, 2), np.float32), Ctx(train=True))
    np.testing.assert_array_equal(batch["variance"], [0, 0])
