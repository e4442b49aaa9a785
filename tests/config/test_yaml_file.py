"""YAML blocks: lines, anchors, merges, comments, and files that are wrong."""

from pathlib import Path

import pytest

from headrace.config.yaml_blocks import Block, read_blocks
from headrace.core.errors import ConfigError

FILE = """\
# About the file.

_base: &base
  seed: 1
  weight_decay: 1e-4
  optimizer_params: &sgd {momentum: 0.9}

# First sentence. Second one,
# on two lines.
# command: headrace train --config first
# result: 91 %
#   in 3 min
first:
  <<: *base
  seed: 2

second:
  <<: [{num_epochs: 5, seed: 3}, *base]
  optimizer_params: {<<: *sgd, nesterov: yes}
  precision: 16.16
  weight_decay_exclude: [gamma, 10]
  run_name:

third: *base
empty:
"""


@pytest.fixture
def write(tmp_path: Path):
    def to_file(text: str) -> Path:
        path = tmp_path / "mine.yml"
        path.write_text(text)
        return path

    return to_file


def last(block: Block) -> dict[str, tuple[object, int]]:
    return {entry.key: (entry.value, entry.line) for entry in (*block.merged, *block.own)}


def test_values_lines_merges_and_comments(write):
    blocks = read_blocks(write(FILE))
    assert list(blocks) == ["_base", "first", "second", "third", "empty"]
    first = blocks["first"]
    assert last(first) == {"seed": ("2", 15), "weight_decay": ("1e-4", 5), "optimizer_params": ({"momentum": 0.9}, 6)}
    assert [entry.key for entry in first.own] == ["seed"]
    assert first.description == "First sentence. Second one, on two lines."
    assert first.command == "headrace train --config first"
    assert first.result == "91 % in 3 min"
    assert last(blocks["second"]) == {
        "num_epochs": ("5", 18),
        "seed": ("3", 18),  # of two merged blocks the first wins
        "weight_decay": ("1e-4", 5),
        "optimizer_params": ({"momentum": 0.9, "nesterov": True}, 19),
        "precision": ("16.16", 20),
        "weight_decay_exclude": (["gamma", "10"], 21),
        "run_name": (None, 22),
    }
    assert blocks["third"].own == blocks["_base"].own
    assert blocks["empty"].own == ()
    assert blocks["second"].description == ""


def test_numbers_inside_mappings(write):
    text = "a:\n  p: {a: 1e-4, b: 010, c: .5, d: -3, e: 1_000, f: 1:30, g: 2020-01-01, h: ~, i: off, j: 2., k: 1e3, "
    text += "l: '7'}\n"
    (entry,) = read_blocks(write(text))["a"].own
    assert entry.value == {
        "a": 0.0001,
        "b": 10,
        "c": 0.5,
        "d": -3,
        "e": 1000,
        "f": "1:30",
        "g": "2020-01-01",
        "h": None,
        "i": False,
        "j": 2.0,
        "k": 1000.0,
        "l": "7",
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:\n  seed: 1\n  seed: 2\n", "mine.yml:3: seed is given twice (first in line 2)"),
        ("a:\n  p: {x: 1, x: 2}\n", "mine.yml:2: x is given twice"),
        ("a: {seed: 1}\nb: {}\na: {}\n", "mine.yml:3: a is given twice"),
        ("a:\n  <<: *nothing\n", "mine.yml:2: not valid YAML: found undefined alias"),
        ("a:\n  seed: [1\n", "mine.yml:3: not valid YAML"),
        ("a: 3\n", "mine.yml:1: a is not a block of options"),
        ("- a\n- b\n", "mine.yml:1: the file is not a mapping"),
        ("a:\n  ? [x, y]\n  : 1\n", "mine.yml:2: the name of an option is not a plain text"),
        ("a:\n  p: &p {q: *p}\n", "mine.yml:2: an alias that contains itself"),
        ("a: !!python/object:os.system {}\n", "mine.yml:1: "),
        ("a:\n  p: {k: !!python/object/apply:os.getcwd []}\n", "mine.yml:2: not valid YAML"),
        ("\0", "not valid YAML"),
    ],
)
def test_files_that_are_wrong(write, text, problem):
    with pytest.raises(ConfigError) as caught:
        read_blocks(write(text), "mine.yml")
    assert problem in caught.value.problem


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file"):
        read_blocks(tmp_path / "none.yml")
    with pytest.raises(ConfigError, match="directory"):
        read_blocks(tmp_path)
    (tmp_path / "latin.yml").write_bytes(b"\xe9: 1")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_blocks(tmp_path / "latin.yml")


def test_an_empty_file_has_no_blocks(write):
    assert read_blocks(write("# nothing\n")) == {}
