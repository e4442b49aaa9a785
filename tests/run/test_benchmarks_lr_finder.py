"""The learning-rate finder: its rates are those of the formula, its suggestion that of a curve known by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace import Model
from headrace.core.errors import ConfigError, RunStopped
from headrace.run.lr_find import FoundRates, find_learning_rate, growing_rates, smoothed, suggest
from tests.run.conftest import QUICK

BY_CODE = ("dataset", "model_name")


def test_rates_grow_in_equal_ratios_and_the_middle_of_the_fall_is_suggested():
    rates = growing_rates(101, 1e-5, 1.0)
    np.testing.assert_allclose(rates[[0, 50, 100]], [1e-5, 10**-2.5, 1.0])
    logs = np.log10(rates)
    # half-way at 1e-2, lowest at 10**-0.5
    losses = 2 - np.tanh(3 * (logs + 2)) + np.where(logs > -0.5, 9 * (logs + 0.5), 0)
    assert suggest(rates, losses).suggested == pytest.approx(10**-1.25, rel=0.13)
    exploding = np.append(losses, 1e8)
    assert len(suggest(np.append(rates, 2.0), exploding).losses) < len(exploding)
    with pytest.raises(RunStopped, match="did not fall"):
        suggest(rates, 1 + rates)
    np.testing.assert_allclose(smoothed(np.full(7, 3.0)), np.full(7, 3.0))
    assert len(smoothed(np.array([1.0, 2.0, np.inf, 1.0]))) == 2


def test_the_suggestion_is_compared_with_the_rate_of_a_run():
    rates, losses = growing_rates(100, 1e-4, 1.0), np.concatenate([np.linspace(2, 1, 80), np.linspace(1, 3, 20)])
    found = FoundRates(rates=rates, losses=losses, suggested=0.03)
    assert found.lowest_at == rates[79]
    assert found.compared() == ""
    assert replace(found, peak=0.05, was_chosen=True).compared().startswith("0.05, chosen: within a factor of 3")
    assert replace(found, peak=0.005).compared().startswith("0.005, given: 6 times lower. The search sees")
    higher = replace(found, peak=0.3).compared()
    assert higher.startswith(f"0.3, given: 10 times higher. In the search the loss rises from {rates[79]:.2g};")


def test_a_real_search_writes_nothing_and_suggests_a_rate_that_lowers_the_loss(quick, tmp_path):
    batch = {"micro_batch_size": 64, "global_batch_size": 64, "num_epochs": 1}  # of 20 steps: the search is longer
    found = find_learning_rate(quick(**batch), num_steps=60)
    assert 20 < len(found.rates) == len(found.losses) <= 60
    assert 1e-5 < found.suggested < 10
    assert found.losses.min() < found.losses[0]
    assert not (tmp_path / "runs").exists()
    assert f"suggested {found.suggested:.2g}" in repr(found)
    assert found.peak == 0.002 * 64
    assert not found.was_chosen
    assert "0.13, given: " in found.compared()
    options: dict[str, Any] = {name: value for name, value in (QUICK | batch).items() if name not in BY_CODE}
    model = Model("toy_model_bn", config="none", log_dir=str(tmp_path / "runs"), **options)  # the same program
    found = model.find_learning_rate("digits", num_steps=60)
    assert len(found.rates) == len(found.losses) > 10
    assert model.params is None
    with pytest.raises(ConfigError, match="at least 10 steps"):
        find_learning_rate(quick(), num_steps=3)
