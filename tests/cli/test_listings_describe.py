"""Configurations in writing: what is printed reads back as the same configuration."""

from pathlib import Path

import pytest

from headrace.cli.options_text import blocks_text, options_markdown, params_markdown, resolved_text
from headrace.config.load import resolve
from headrace.config.params import TABLES
from headrace.config.schema import all_options
from headrace.config.yaml_blocks import listed, shipped_blocks


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("name", [block.name for block in listed(shipped_blocks())])
def test_a_printed_configuration_reads_back(tmp_path: Path, name, everything):
    options = {"run_name": "null", "weight-decay-exclude": ["a b", "c.*"], "num-epochs": "30", "log-dir": "a: b"}
    first = resolve(options, name, environ={})
    path = tmp_path / "again.yml"
    path.write_text(resolved_text(first, everything=everything))
    assert resolve({}, name, str(path), environ={}).config == first.config


def test_origins_are_in_the_comments():
    text = resolved_text(resolve({"seed": 3}, "default", environ={"DATA_DIR": "/d"}))
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()[1:]}
    assert lines["seed"].endswith("# command line")
    assert lines["dataset_path"].endswith("# environment $DATA_DIR")
    assert "# recipe default.yml:" in lines["dataset"]
    assert "shuffle" not in lines
    assert resolved_text(resolve({}, "none", environ={})) == "none: {}  # every option has its default"


def test_the_list_has_name_sentence_and_result():
    lines = blocks_text(listed(shipped_blocks()), 80).splitlines()
    assert lines[0].startswith("default ")
    assert "result: 99." in " ".join(lines[:4])
    assert max(map(len, lines)) <= 80
    names = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    last = names.index("without")  # "without a measured result:"
    assert names.index("cifar10_resnet20") < last < names.index("cifar10_resnet8")


def test_the_options_table_has_a_row_per_option():
    rows = [line for line in options_markdown().splitlines() if line.startswith("| `--")]
    assert len(rows) == len(all_options())
    assert len(params_markdown().splitlines()) == 2 + sum(len(table.rows) for table in TABLES.values())
    assert (
        "| `optimizer_params` | adamw | `beta1` (`0.9`), `beta2` (`0.999`), `epsilon` (`1e-08`) |" in params_markdown()
    )
