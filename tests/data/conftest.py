"""What the data tests share: a plain `put`, and small sets in place of the large ones of the catalogue."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from headrace.data.sets import catalog

from .small_sets import SmallSet, make_small


@pytest.fixture
def put() -> Callable[[Any, str], Any]:
    """Return the simplest `put`: everything on the default device."""
    return lambda tree, kind: jax.device_put(tree)


@pytest.fixture
def small_cifar10(monkeypatch: pytest.MonkeyPatch) -> SmallSet:
    """Make the catalogue's CIFAR-10 a small set: 5 files of 6 records and one of 7."""
    small = make_small("cifar10", 30, 7)
    monkeypatch.setitem(catalog.KNOWN_SETS, "cifar10", small.row)
    return small


@pytest.fixture
def small_cifar100(monkeypatch: pytest.MonkeyPatch) -> SmallSet:
    """Make the catalogue's CIFAR-100 a small set."""
    small = make_small("cifar100", 120, 100)
    monkeypatch.setitem(catalog.KNOWN_SETS, "cifar100", small.row)
    return small


@pytest.fixture
def small_mnist(monkeypatch: pytest.MonkeyPatch) -> SmallSet:
    """Make the catalogue's MNIST a small set."""
    small = make_small("mnist", 25, 11)
    monkeypatch.setitem(catalog.KNOWN_SETS, "mnist", small.row)
    return small
