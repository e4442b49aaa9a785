"""Options without effect: named with their reasons, by backend."""

import pytest

from headrace.config.load import config_from
from headrace.config.no_effect import ROWS_HERE, describe_without_effect, without_effect
from headrace.config.schema import all_options


def test_nothing_is_said_where_nothing_was_asked():
    for backend in ("cpu", "gpu", "tpu"):
        assert describe_without_effect(config_from({}), backend) == []


@pytest.mark.parametrize(
    ("options", "cpu", "gpu"),
    [
        ({"half_partials": True, "precision": "16.32"}, True, False),
        ({"internal_exchange_optimisation_target": "balanced"}, True, True),
        ({"internal_exchange_optimisation_target": "memory"}, False, False),
        ({"max_cross_replica_buffer_size": 0}, True, False),
        ({"max_reduce_many_buffer_size": 216}, True, False),
        ({"available_memory_proportion": [15]}, True, False),
        ({"gather_conv_output": True}, True, True),
        ({"enable_conv_dithering": True}, True, True),
        ({"on_demand": False}, True, True),
        ({"standard_imagenet": True}, True, True),
        ({"sharding_exclude_filter": ["0/p"]}, True, True),
        ({"select_ipus": ["3"]}, True, False),
        ({"select_ipus": ["AUTO"]}, False, False),
    ],
)
def test_by_backend(options, cpu, gpu):
    config = config_from(options)
    assert (bool(without_effect(config, "cpu")), bool(without_effect(config, "gpu"))) == (cpu, gpu)
    for backend in ("cpu", "gpu"):
        for line in describe_without_effect(config, backend):
            assert line.startswith(f"without effect on {backend}: ")


def test_every_row_has_an_option_and_a_reason():
    for row in ROWS_HERE:
        assert row.option in all_options()
        assert row.reason.endswith(".")
