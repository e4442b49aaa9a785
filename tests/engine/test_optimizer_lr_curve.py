"""Learning-rate curves against closed forms in Python floats, and the reference's anchors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config.schema import Learning
from headrace.core.errors import ConfigError
from headrace.engine.lr_curve import make_lr_curve, rate_table

U = 100  # updates per epoch


def curve_of(name, params, *, warmup=None, staircase=False, batch=8, epochs=10):
    section = Learning(lr_schedule=name, lr_schedule_params=params, lr_warmup_params=warmup, lr_staircase=staircase)
    return make_lr_curve(section, global_batch_size=batch, updates_per_epoch=U, num_epochs=epochs)


def cosine(t, rate, last):
    return rate * 0.5 * (1 + math.cos(math.pi * min(t, last) / last))


def test_const_is_per_sample_times_global_batch():
    curve = curve_of("const", {"initial_learning_rate": 1e-4}, batch=256)
    assert float(curve(0)) == pytest.approx(0.0256, rel=1e-6)
    assert float(curve(123456)) == float(curve(0))
    assert curve(0).dtype == jnp.float32


def test_an_absolute_rate_does_not_depend_on_the_batch():
    for name, params in (("const", {}), ("cosine", {}), ("drops", {"drops": []}), ("exponential", {})):
        assert float(curve_of(name, {"absolute_learning_rate": 4.588, **params}, batch=2304)(0)) == pytest.approx(4.588)


def test_cosine_matches_closed_form():
    curve = curve_of("cosine", {"initial_learning_rate": 0.01, "epochs_to_total_decay": 5}, batch=10)
    for t in (0, 1, 17, 250, 499, 500, 501, 10_000):
        assert float(curve(t)) == pytest.approx(cosine(t, 0.1, 500), abs=1e-7)


@pytest.mark.parametrize(("mode", "last"), [(None, 1000), ("mask", 1000), ("shift", 800)])
def test_decay_without_length_ends_with_the_run(mode, last):
    warmup = {"warmup_mode": mode, "warmup_epochs": 2} if mode else None
    params = {"initial_learning_rate": 0.125}
    curve = curve_of("cosine", params, warmup=warmup)
    assert float(curve(1000)) == pytest.approx(0, abs=0)
    t = 700
    assert float(curve(t)) == pytest.approx(cosine(t - 200 if mode == "shift" else t, 1.0, last), rel=1e-5)
    poly = curve_of("polynomial", params | {"end_learning_rate_ratio": 0.0, "power": 1.0}, warmup=warmup)
    assert float(poly(t)) == pytest.approx(1 - (t - 200 if mode == "shift" else t) / last, rel=1e-6)


def test_boundaries_a_step_earlier_are_those_of_torch():
    """MultiStepLR has factor^(milestones that the step has reached); the sentence in docs/explanation/numerics.md."""
    milestones = [3, 7]
    curve = curve_of("stepped", {"boundaries": [m - 1 / U for m in milestones], "values": [1.0, 0.1, 0.01]})
    steps = np.arange(10 * U)
    wanted = 0.1 ** np.sum(steps[:, None] >= np.array(milestones) * U, 1)
    np.testing.assert_allclose(jax.vmap(curve)(jnp.asarray(steps)), wanted, rtol=1e-6)
    late = curve_of("stepped", {"boundaries": milestones, "values": [1.0, 0.1, 0.01]})
    np.testing.assert_allclose(jax.vmap(late)(jnp.asarray(steps[1:])), wanted[:-1], rtol=1e-6)


def test_stepped_values_are_absolute_and_change_after_the_boundary():
    curve = curve_of("stepped", {"boundaries": [1, 2.5], "values": [1.0, 0.1, 0.01]}, batch=1024)
    points = {0: 1.0, 100: 1.0, 101: 0.1, 250: 0.1, 251: 0.01, 9999: 0.01}
    assert {t: pytest.approx(float(curve(t)), rel=1e-6) for t in points} == points


def test_drops_are_shares_of_the_run_and_factors():
    """CIFAR ResNet-20 at micro batch 32 and 2^-6 per image, as the reference's test has it: 0.5, at last 0.0005."""
    params = {"initial_learning_rate": 2.0**-6, "drops": [0.25, 0.5, 0.75], "factor": 0.1}
    curve = curve_of("drops", params, batch=32, epochs=10)
    points = {0: 0.5, 250: 0.5, 251: 0.05, 500: 0.05, 501: 0.005, 750: 0.005, 751: 0.0005, 999: 0.0005}
    assert {t: pytest.approx(float(curve(t)), rel=1e-6) for t in points} == points


@pytest.mark.parametrize("mode", ["mask", "shift"])
def test_a_warm_up_from_zero(mode):
    """The first application's: t / W of the rate, 0 at the first step, the whole rate at step W."""
    warmup = {"warmup_mode": mode, "warmup_epochs": 2, "from_zero": True}
    curve = curve_of("cosine", {"initial_learning_rate": 0.125}, warmup=warmup)
    for t in (0, 1, 50, 199, 200, 700):
        under = cosine(max(t - 200, 0), 1.0, 800) if mode == "shift" else cosine(t, 1.0, 1000)
        assert float(curve(t)) == pytest.approx(under * min(t / 200, 1), abs=1e-6)
    none = curve_of("const", {"initial_learning_rate": 0.125}, warmup=warmup | {"warmup_epochs": 0})
    assert float(none(1)) == pytest.approx(1.0)


def test_the_last_step_has_a_rate_also_after_a_warm_up_of_no_whole_steps():
    warmup = {"warmup_mode": "shift", "warmup_epochs": 0.125}
    curve = curve_of("cosine", {"initial_learning_rate": 0.125}, warmup=warmup, epochs=2)
    for t in (12, 100, 198, 199, 200):
        assert float(curve(t)) == pytest.approx(cosine(t - 12, 1.0, 188), abs=1e-6)
    assert float(curve(199)) > 0
    assert float(curve(200)) == 0


def test_epochs_that_binary_fractions_put_just_under_a_step():
    assert int(0.29 * U) == 28  # the trap
    curve = curve_of("stepped", {"boundaries": [0.29], "values": [1.0, 2.0]})
    assert (float(curve(29)), float(curve(30))) == (1.0, 2.0)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_polynomial_matches_closed_form(power):
    params = {"initial_learning_rate": 0.25, "epochs_to_total_decay": 4.5}
    curve = curve_of("polynomial", params | {"end_learning_rate_ratio": 0.1, "power": power}, batch=4)
    for t in (0, 1, 225, 449, 450, 800):
        assert float(curve(t)) == pytest.approx((1 - 0.1) * (1 - min(t, 450) / 450) ** power + 0.1, rel=1e-5)


def test_linear_falls_in_a_line_to_zero_or_to_a_share():
    params = {"initial_learning_rate": 0.25, "epochs_to_total_decay": 4.5}
    for t in (0, 1, 225, 449, 450, 800):
        left = 1 - min(t, 450) / 450
        assert float(curve_of("linear", params, batch=4)(t)) == pytest.approx(left, rel=1e-5)
        ended = curve_of("linear", params | {"end_learning_rate_ratio": 0.2}, batch=4)
        assert float(ended(t)) == pytest.approx(0.2 + 0.8 * left, rel=1e-5)


def test_exponential_matches_closed_form():
    params = {"initial_learning_rate": 0.01, "decay_rate": 0.97, "epochs_per_drop": 2.4}
    curve = curve_of("exponential", params, batch=100)
    for t in (0, 1, 239, 240, 241, 479, 480, 35_039, 35_040):
        assert float(curve(t)) == pytest.approx(0.97 ** (t // 240), rel=2e-6)


def test_exponential_drops_do_not_drift():
    """2.4 epochs of 781 updates are 1,874.4 steps: drop number k falls on step ceil(1874.4 k), whatever k."""
    params = {"initial_learning_rate": 1.0, "decay_rate": 0.5, "epochs_per_drop": 2.4}
    section = Learning(lr_schedule="exponential", lr_schedule_params=params)
    curve = make_lr_curve(section, global_batch_size=1, updates_per_epoch=781, num_epochs=350)
    for k in (1, 2, 3, 5, 100):
        at = -(-18744 * k // 10)
        rates = np.log2(np.asarray(curve(np.array([at - 1, at]))))
        np.testing.assert_allclose(rates, [1 - k, -k], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["shift", "mask"])
def test_warm_up_anchors(mode):
    """W = 9: a tenth of the rate at step 0, half at 4, all of it at 9."""
    warmup = {"warmup_mode": mode, "warmup_epochs": 0.09}
    curve = curve_of("const", {"initial_learning_rate": 1.0}, warmup=warmup, batch=1)
    expected = {0: 0.1, 4: 0.5, 8: 0.9, 9: 1.0, 10: 1.0, 500: 1.0}
    assert {t: pytest.approx(float(curve(t)), rel=1e-6) for t in expected} == expected


def test_shift_starts_the_curve_late_and_mask_does_not():
    params = {"initial_learning_rate": 0.1, "epochs_to_total_decay": 3}
    shift = curve_of("cosine", params, warmup={"warmup_mode": "shift", "warmup_epochs": 1}, batch=1)
    mask = curve_of("cosine", params, warmup={"warmup_mode": "mask", "warmup_epochs": 1}, batch=1)
    for t in (0, 37, 99, 100, 101, 250, 350):
        ramp = (t + 1) / 101 if t < 100 else 1
        assert float(shift(t)) == pytest.approx(ramp * cosine(max(t - 100, 0), 0.1, 300), abs=1e-7)
        assert float(mask(t)) == pytest.approx(ramp * cosine(t, 0.1, 300), abs=1e-7)


def test_staircase_holds_the_warmed_up_curve_for_an_epoch():
    warmup, params = {"warmup_mode": "shift", "warmup_epochs": 2}, {"initial_learning_rate": 0.5}
    smooth, stairs = (curve_of("cosine", params, warmup=warmup, staircase=on) for on in (False, True))
    for t in (0, 1, 99, 100, 199, 200, 555, 999):
        assert float(stairs(t)) == float(smooth(t // U * U))


def test_traced_array_and_whole_steps_agree():
    warmup = {"warmup_mode": "mask", "warmup_epochs": 1}
    params = {"initial_learning_rate": 1, "end_learning_rate_ratio": 0, "power": 2}
    curve = curve_of("polynomial", params, warmup=warmup)
    steps = np.arange(0, 1200, 7)
    one_by_one = np.array([float(curve(int(t))) for t in steps[:20]])
    _, scanned = jax.lax.scan(lambda carry, t: (carry, curve(t)), 0, jnp.asarray(steps, jnp.uint32))
    np.testing.assert_allclose(scanned, curve(steps), rtol=1e-6)
    np.testing.assert_allclose(scanned[:20], one_by_one, rtol=1e-6)
    assert jax.jit(curve)(3).dtype == jnp.float32


def test_large_steps_stay_exact():
    """Beyond 2^24 a float32 counter would lose steps; boundaries, shift and staircase must not."""
    section = Learning(lr_schedule="stepped", lr_schedule_params={"boundaries": [20_000_001], "values": [1.0, 2.0]})
    curve = make_lr_curve(section, global_batch_size=1, updates_per_epoch=1, num_epochs=1)
    assert (float(curve(20_000_001)), float(curve(20_000_002))) == (1.0, 2.0)
    warmup = {"warmup_mode": "shift", "warmup_epochs": 20_000_000}
    params = {"initial_learning_rate": 1.0, "epochs_to_total_decay": 10, "end_learning_rate_ratio": 0.0, "power": 1.0}
    section = Learning(lr_schedule="polynomial", lr_schedule_params=params, lr_warmup_params=warmup)
    curve = make_lr_curve(section, global_batch_size=1, updates_per_epoch=1, num_epochs=1)
    assert float(curve(20_000_003)) == pytest.approx(0.7, rel=1e-6)


def test_unknown_curve_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="cosine"):
        curve_of("cosin", {"initial_learning_rate": 1})


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("cosine", {"initial_learning_rate": 0.01}),
        ("exponential", {"initial_learning_rate": 0.01}),
        ("stepped", {"boundaries": [3, 7], "values": [0.1, 0.01, 0.001]}),
    ],
)
def test_a_table_of_rates_is_the_curve_wherever_a_call_begins(name, params):
    warmup = {"warmup_mode": "mask", "warmup_epochs": 3}
    curve = curve_of(name, params, warmup=warmup, epochs=100)
    rates = rate_table(curve)
    whole = rates(np.arange(10_000))
    wanted = np.array([curve(step) for step in range(0, 10_000, 499)])
    np.testing.assert_allclose(whole[::499], wanted, rtol=4e-7, atol=1e-12)
    for first, count in ((0, 1), (7, 1), (4_095, 2), (4_000, 5_000), (9_999, 1)):
        np.testing.assert_array_equal(rates(np.arange(first, first + count)), whole[first : first + count])
