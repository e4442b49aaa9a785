"""Every network is whole: its family, what makes its blocks, and names that mean it alone."""

import importlib
from pathlib import Path

import pytest

from headrace.config.networks import find_variant
from headrace.rows import networks
from headrace.rows.networks import FAMILIES, NETWORKS


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_family_has_what_makes_its_blocks(family):
    module = importlib.import_module(family.module)
    assert callable(module.blocks), f"{family.module} makes no blocks"
    assert {row.family for row in family.rows} == {family.name}
    for small in (False, True):
        assert find_variant(family.name, None, 32 if small else 224) in family.rows


def test_every_file_of_rows_is_in_the_table():
    files = {path.stem for path in Path(networks.__file__).parent.glob("*.py") if path.stem != "__init__"}
    assert files == {family.module.rpartition(".")[2] for family in FAMILIES.values()}


@pytest.mark.parametrize("row", NETWORKS.values(), ids=NETWORKS)
def test_names_mean_their_network(row):
    for name in (row.name, row.name.upper().replace("_", "-"), *row.other_names):
        assert find_variant(name) is row
    for size in (row.size, *row.other_sizes):
        if size:
            assert find_variant(row.family, size, row.image_size) is row


def test_no_name_means_two_networks():
    names = [name for row in NETWORKS.values() for name in (row.name, *row.other_names)]
    assert len(set(names)) == len(names)
    assert sum(len(family.rows) for family in FAMILIES.values()) == len(NETWORKS)
