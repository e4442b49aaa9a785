"""Programs kept for the next run: what counts as equal, what is never kept, and what a second run says."""

from functools import partial

import jax
import numpy as np
import optax
import pytest

from headrace.config.load import config_from
from headrace.engine import kept_programs
from headrace.engine.devices import CompileCounts, count_compilations
from headrace.engine.kept_programs import NoValueError, by_value, digest, kept
from headrace.engine.lr_curve import make_lr_curve
from headrace.engine.optimizer import make_optimizer
from headrace.engine.packing import make_packing
from headrace.model.zoo import build_network
from headrace.ops.tracing import portable


def network(model_name="cifar_resnet8"):
    return build_network(config_from({"model_name": model_name}).model, 10, (32, 32, 3))


def optimizer(**options):
    learning = config_from({"optimizer": "momentum", "optimizer_params": {"momentum": 0.9}} | options).learning
    curve = make_lr_curve(learning, global_batch_size=8, updates_per_epoch=10, num_epochs=2)
    return make_optimizer(learning, curve, 8), curve


def packing(width):
    """Return how a step's state is packed on a GPU."""
    norm = {"gamma": np.zeros(width, np.float32), "beta": np.zeros(width, np.float32)}
    return make_packing({"params": {"norm": norm}, "stats": {"norm": norm}}, len, bool)


SAME = {
    "an optimizer": optimizer,
    "a network": network,
    "a partial": lambda seed=0: partial(optax.scale_by_learning_rate, seed, flip_sign=False),
    "an array": lambda seed=0: np.full(3, seed, np.float32),
    "a method": lambda seed=0: optax.sgd(0.1 + seed).update,
    "a packing": lambda width=3: packing(width),
}
OTHER = {
    "an optimizer": {"optimizer_params": {"momentum": 0.5}},
    "a network": {"model_name": "cifar_resnet20"},
    "a partial": {"seed": 1},
    "an array": {"seed": 1},
    "a method": {"seed": 1},
    "a packing": {"width": 4},
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_made_twice_is_equal_and_what_differs_is_not(name):
    make = SAME[name]
    assert make() is not make()
    assert by_value(make()) == by_value(make())
    assert hash(by_value(make())) == hash(by_value(make()))
    assert by_value(make(**OTHER[name])) != by_value(make())
    assert digest(by_value(make(**OTHER[name]))) != digest(by_value(make())) == digest(by_value(make()))


PAIRS = [(1, True), (1, 1.0), (0.0, -0.0), ((1,), [1]), (np.float32(1), np.float64(1)), (jax.numpy.sin, jax.numpy.cos)]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_values_that_python_or_numpy_call_equal_are_told_apart(one, other):
    assert by_value(one) != by_value(other)
    assert by_value(one) == by_value(one)


@pytest.mark.parametrize("value", [lambda x: x, partial(optimizer), object(), np.array([None])])
def test_what_a_user_wrote_has_no_value(value):
    """A function of theirs may read variables that change, which its code does not tell."""
    with pytest.raises(NoValueError):
        by_value((1, {"loss": value}))
    made = []
    kept(lambda: made.append(1) or made)
    kept(lambda: made.append(1) or made)
    assert len(made) == 2


def test_the_last_ones_are_kept_and_those_for_any_backend_apart(monkeypatch):
    monkeypatch.setattr(kept_programs, "_MOST", 2)
    first = kept(optax.sgd, 0.1)
    assert kept(optax.sgd, 0.1) is first
    with portable():
        assert kept(optax.sgd, 0.1) is not first
    assert kept(optax.sgd, 0.1) is first
    kept(optax.sgd, 0.2)
    kept(optax.sgd, 0.3)
    assert len(kept_programs._kept) == 2
    assert kept(optax.sgd, 0.1) is not first


def test_what_was_not_compiled_was_kept():
    double = jax.jit(lambda x: 2 * x)
    given = jax.ShapeDtypeStruct((3,), np.float32)
    said = []
    for _ in range(2):
        with count_compilations() as counts:
            double.lower(given).compile()
        said.append(str(counts))
    assert said[0].startswith("compilation cache: ")
    assert said[1] == "kept from an earlier run"
    assert str(CompileCounts(total=1)) == "compilation cache off"
