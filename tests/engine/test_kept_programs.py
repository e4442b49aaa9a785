"""Programs kept for the next run: what counts as equal, what is never kept, and what a second run says."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import headrace
from headrace.config.load import config_from
from headrace.core.last_used import LastUsed
from headrace.core.session import session
from headrace.data.augmentation.preprocess import Preprocess
from headrace.data.feeding.fetch import FetchSamples
from headrace.engine.devices import CompileCounts, count_compilations, replica_mesh
from headrace.engine.forward import EvalSpec, make_forward
from headrace.engine.kept_programs import NoKeyError, kept, key
from headrace.engine.lr_curve import make_lr_curve
from headrace.engine.optimizer import make_optimizer
from headrace.engine.packing import make_packing
from headrace.engine.trainable import EVERYTHING, Trainable
from headrace.model.zoo import build_network
from headrace.ops.tracing import portable


def network(model_name="cifar_resnet8"):
    return build_network(config_from({"model_name": model_name}).model, 10, (32, 32, 3))


def optimizer(trained=EVERYTHING, **options):
    learning = config_from({"optimizer": "momentum", "optimizer_params": {"momentum": 0.9}} | options).learning
    curve = make_lr_curve(learning, global_batch_size=8, updates_per_epoch=10, num_epochs=2)
    return make_optimizer(learning, curve, 8, trained)


def packing(width):
    """Return how a step's state is packed on a GPU."""
    norm = {"gamma": np.zeros(width, np.float32), "beta": np.zeros(width, np.float32)}
    return make_packing({"params": {"norm": norm}, "stats": {"norm": norm}}, len, bool)


def sharding(count=1):
    return NamedSharding(replica_mesh(jax.devices()[:count]), PartitionSpec())


PLAIN = Preprocess(augmentation="none", normalization="zero-one", mean=(), std=(), seed=0, image_hwc=(32, 32, 3))
FETCH = FetchSamples(PLAIN, train=False)
SAME = {
    "an optimizer": optimizer,
    "frozen weights": lambda freeze="conv1": optimizer(Trainable(freeze=(freeze,))),
    "a network": network,
    "an array": lambda seed=0: np.full(3, seed, np.float32),
    "a packing": lambda width=3: packing(width),
    "a sharding": sharding,
    "a tree": lambda count=1: jax.tree.structure({"a": [0] * count}),
}
OTHER: dict[str, dict[str, Any]] = {
    "an optimizer": {"optimizer_params": {"momentum": 0.5}},
    "frozen weights": {"freeze": "conv2"},
    "a network": {"model_name": "cifar_resnet20"},
    "an array": {"seed": 1},
    "a packing": {"width": 4},
    "a sharding": {"count": 2},
    "a tree": {"count": 2},
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_made_twice_is_equal_and_what_differs_is_not(name):
    make = SAME[name]
    assert key(make()) == key(make())
    assert key(make(**OTHER[name])) != key(make())


PAIRS = [
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    ((1,), [1]),
    ((1, (2,)), ((1, 2),)),
    ("1", 1),
    (("a", "b"), ("a','b",)),
    (np.float32(1), np.float64(1)),
    (np.zeros(2), np.zeros((2, 1))),
    (np.dtype("int32"), np.dtype("int64")),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (make_forward, kept),
    (jax.ShapeDtypeStruct((1,), np.float32), jax.ShapeDtypeStruct((1,), np.int32)),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_values_that_are_not_the_same_are_told_apart(one, other):
    assert key(one) != key(other)
    assert key(one) == key(one)


def test_every_network_has_a_key_of_its_own():
    keys = [
        key(build_network(config_from({"model_name": name}).model, 10, (64, 64, 3))) for name in headrace.model_names()
    ]
    assert len(set(keys)) == len(keys) > 100


@dataclass(frozen=True)
class Theirs:
    number: int = 1


def closed_over(number):
    return lambda x: number * x


def replaced():
    """Say that it is one of the package's functions, which it is not."""


replaced.__module__, replaced.__qualname__ = "headrace.engine.forward", "make_forward"
ALIENS = [lambda x: x, closed_over(1), partial(optimizer), object(), np.array([None]), Theirs(), optimizer, replaced]


@pytest.mark.parametrize("value", ALIENS)
def test_what_a_user_wrote_has_no_key(value):
    """A function of theirs may read variables that change, which its code does not tell."""
    with pytest.raises(NoKeyError):
        key((1, {"loss": value}))
    mesh, made = replica_mesh(jax.devices()[:1]), []
    for _ in range(2):
        kept(lambda _spec, _mesh: made.append(1) or made, 1, mesh)
    assert len(made) == 2


def test_the_last_ones_are_kept_and_those_for_any_backend_apart(monkeypatch):
    monkeypatch.setattr(session(), "programs", LastUsed(2))
    mesh = replica_mesh(jax.devices()[:1])

    def make(on=mesh, **options):
        spec = EvalSpec(network=network(), fetch=FETCH, compute_dtype=np.float32, num_replicas=1, **options)
        return kept(make_forward, spec, on)

    first = make()
    assert make() is first
    assert make(replica_mesh(jax.devices()[:1])) is first
    assert make(replica_mesh(jax.devices()[1:2])) is not first
    assert make() is first
    with portable():
        assert make() is not first
    assert make() is first
    make(flip=True)
    make(stable_norm=True)
    assert len(session().programs) == 2
    assert make() is not first


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
