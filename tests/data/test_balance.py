"""Weights of classes and balanced sampling against counting."""

import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.core.errors import ConfigError
from headrace.data.balance import class_weights


def test_balanced_weights_make_every_class_count_the_same() -> None:
    labels = np.array([0] * 90 + [1] * 9 + [3], np.int32)
    weights = class_weights(("balanced",), labels, 4)
    assert weights is not None
    np.testing.assert_allclose(weights, [100 / 360, 100 / 36, 0, 25], rtol=1e-12)
    assert [weights[label] * count for label, count in ((0, 90), (1, 9), (3, 1))] == [pytest.approx(25)] * 3


def test_given_weights_are_taken_as_they_are() -> None:
    labels = np.zeros(3, np.int32)
    assert class_weights((), labels, 2) is None
    assert class_weights((0.5, 2), labels, 2) == (0.5, 2.0)


@pytest.mark.parametrize(
    ("written", "value"), [("balanced", ("balanced",)), ("1, 2 0.5", (1.0, 2.0, 0.5)), ([3, 1], (3.0, 1.0))]
)
def test_ways_to_write_them(written: object, value: tuple[object, ...]) -> None:
    assert config_from({"class_weights": written}).learning.class_weights == value


@pytest.mark.parametrize("written", ["even", "1 -1", "0 0", ["balanced", 1], "1 nan"])
def test_wrong_weights_are_refused(written: object) -> None:
    with pytest.raises(ConfigError, match="class_weights"):
        config_from({"class_weights": written})
