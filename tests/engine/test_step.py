"""The training step: which running statistics move when weights are frozen."""

import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.model.layers import Dense, GlobalAveragePool
from headrace.model.network import Network
from headrace.model.norm import Norm, NormSpec

from ..harness import OPTIONS, make_samples, train_steps

# The norm is applied to the images themselves, so that its batch statistics are plain means of them.
NETWORK = Network(
    name="norm_first",
    blocks=(("norm", Norm(spec=NormSpec())), ("pool", GlobalAveragePool()), ("fc", Dense(features=10, logits=True))),
    input_hwc=(16, 16, 3),
    num_classes=10,
)


@pytest.mark.parametrize(
    ("frozen", "moves"),
    [((), True), (("gamma",), True), (("beta",), True), (("gamma", "beta"), False)],
    ids=["nothing", "gamma alone", "beta alone", "both"],
)
def test_statistics_stop_only_where_gamma_and_beta_are_both_frozen(frozen, moves):
    images, labels = (array[:1] for array in make_samples())
    names = {f"norm/{tensor}" for tensor in frozen}
    given = {"frozen": lambda name: name in names} if frozen else {}
    state, _ = train_steps(config_from(OPTIONS), NETWORK, images, labels, replicas=1, count=1, **given)
    mean, variance = state["stats"]["norm"]["mean"], state["stats"]["norm"]["variance"]
    if not moves:
        np.testing.assert_array_equal(mean, np.zeros(3))
        np.testing.assert_array_equal(variance, np.ones(3))
        return
    pixels = images[0].reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(mean, 0.1 * pixels.mean(0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(variance, 0.9 + 0.1 * pixels.var(0, ddof=1), rtol=1e-5)


@pytest.mark.parametrize("count", [1, 4])
def test_python_traces_a_step_once_however_many_loops_are_around_it(count, monkeypatch):
    """Tracing is Python, which no compilation cache saves: a ResNet-50's step takes seconds each time."""
    traced, apply = [], Network.apply_range
    monkeypatch.setattr(Network, "apply_range", lambda *given: traced.append(1) or apply(*given))
    images, labels = (array[:1] for array in make_samples())
    train_steps(config_from(OPTIONS), NETWORK, images, labels, replicas=1, count=count)
    assert len(traced) == 1
