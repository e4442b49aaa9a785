"""The training step: which running statistics move when weights are frozen; what is an argument of its program."""

import jax
import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.config.schema import Augment
from headrace.data.augmentation.mix import Mix
from headrace.data.augmentation.preprocess import Preprocess
from headrace.data.feeding.fetch import FetchSamples
from headrace.engine.call_loop import make_call, put_on
from headrace.engine.devices import replica_mesh
from headrace.engine.lr_curve import rate_table
from headrace.engine.state import put_state
from headrace.engine.step import make_step
from headrace.engine.trainable import Trainable
from headrace.model.layers import Dense, GlobalAveragePool
from headrace.model.network import Network
from headrace.model.norm import Norm, NormSpec

from ..harness import OPTIONS, first_state, make_block, make_samples, make_spec, small_excited, train_steps

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
    trained = Trainable(freeze=tuple(names))
    state, _ = train_steps(config_from(OPTIONS), NETWORK, images, labels, replicas=1, count=1, trained=trained)
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


def _seeded(spec_seed, block_seed):
    """Return (jitted call, its arguments) of steps that draw everywhere; without `block_seed` the block has none."""
    config = config_from(OPTIONS | {"precision": "16.16", "stochastic_rounding": True})
    images, labels = (array[:2] for array in make_samples(size=8))
    block = make_block(images, labels, 2)
    numbers = block["epoch"]
    block |= {} if block_seed is None else {"seed": np.full_like(numbers, block_seed)}
    drawing = Preprocess(
        augmentation="flip-crop",
        normalization="none",
        mean=(),
        std=(),
        seed=spec_seed,
        image_hwc=(8, 8, 3),
        crop_padding=2,
        changes=Augment(random_erasing=0.5),
        mix=Mix(mixup_alpha=0.2, cutmix_lambda=0.8, cutmix_version=1, cutmix_alpha=0, seed=spec_seed, image_hw=(8, 8)),
    )
    spec = make_spec(
        config, small_excited(), 16, replicas=1, count=2, seed=spec_seed, fetch=FetchSamples(drawing, train=True)
    )
    mesh = replica_mesh(jax.devices()[:1])
    arguments = first_state(spec), None, block, np.array([0, 2], np.int32)
    return make_call(make_step(spec), mesh, block), arguments


def test_a_seed_is_an_argument_of_the_program():
    """A run with another seed finds the program in the compilation cache, and draws what a constant seed would."""
    calls = [_seeded(3, 5), _seeded(4, 6), _seeded(5, None)]
    one, other, constant = (call.lower(*arguments) for call, arguments in calls)
    assert one.as_text() == other.as_text()
    assert one.as_text() != constant.as_text()
    program = one.compile()
    found, wanted = program(*calls[0][1]), constant.compile()(*calls[2][1])
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    again = program(*_seeded(3, 6)[1])[1]["loss"]
    assert not np.array_equal(again, wanted[1]["loss"])


def test_another_learning_rate_needs_no_other_program():
    images, labels = (array[:1] for array in make_samples())
    texts, results = [], []
    for rate, sent in ((0.1, True), (0.2, True), (0.2, False)):
        config = config_from(OPTIONS | {"lr_schedule_params": {"absolute_learning_rate": rate}})
        spec = make_spec(config, NETWORK, 16, replicas=1, count=1)
        block = make_block(images, labels, 1)
        block |= {"rate": rate_table(spec.lr_curve)(np.arange(1))} if sent else {}
        arguments = first_state(spec), None, block, np.array([0, 1], np.int32)
        lowered = make_call(make_step(spec), replica_mesh(jax.devices()[:1]), block).lower(*arguments)
        texts.append(lowered.as_text())
        results.append(jax.device_get(lowered.compile()(*arguments)))
    assert texts[0] == texts[1] != texts[2]
    jax.tree.map(np.testing.assert_array_equal, results[1], results[2])
    assert results[0][1]["learning_rate"][0] == np.float32(0.1)


def test_calls_of_some_rows_of_a_block_run_the_same_steps_as_one_call():
    images, labels = make_samples()
    spec = make_spec(config_from(OPTIONS), NETWORK, 16, replicas=1, count=1)
    mesh = replica_mesh(jax.devices()[:1])
    block = put_on(mesh, make_block(images, labels, 1), "steps")
    call = make_call(make_step(spec), mesh, block)
    whole, its_metrics = call(put_state(first_state(spec), mesh), None, block, np.array([0, len(images)], np.int32))
    state = put_state(first_state(spec), mesh)
    for first, end in ((0, 1), (1, len(images) - 1), (len(images) - 1, len(images))):
        state, metrics = call(state, None, block, np.array([first, end], np.int32))
        for name, rows in metrics.items():
            np.testing.assert_array_equal(rows[first:end], its_metrics[name][first:end])
            assert not rows[:first].any()
            assert not rows[end:].any()
    jax.tree.map(np.testing.assert_array_equal, state, whole)
