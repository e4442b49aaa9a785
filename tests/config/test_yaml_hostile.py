"""Hostile YAML: one kind of error, at once."""

import time
from pathlib import Path

import pytest

from headrace.config.yaml_blocks import read_blocks
from headrace.core.errors import ConfigError


def laughs(levels: int, form: str) -> str:
    """Return anchors, each made of ten aliases of the one before."""
    lines = ["a0: &a0 {k: v}"]
    for level in range(1, levels):
        aliases = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} " + form % aliases)
    return "\n".join(lines) + "\n"


HOSTILE = {
    "merge bomb": laughs(9, "{<<: [%s]}"),
    "alias bomb": laughs(9, "{x: [%s]}"),
    "merge of itself": "a: &a\n  <<: *a\n",
    "list in itself": "a: {x: &x [*x]}\n",
    "deep lists": "a: {x: " + "[" * 100_000,
    "deep mappings": "a: " + "{x: " * 100_000,
    "deep blocks": "".join(" " * level + "x:\n" for level in range(300)),
    "long": "a: {x: 1}\n" + "# " + "x" * (1 << 20),
    "huge number": "a: {x: {y: " + "9" * 5000 + "}}",
    "wrong tag": "a: {x: {y: !!int cat}}",
    "unknown tag": "a: {x: !!python/object/apply:os.system [true]}",
    "odd key": "a: {x: {{}: 1}}",
    "list as key": "? [a, b]\n: {x: 1}\n",
    "not UTF-8": "a: \udcff",
    "zero byte": "a: \x00",
    "two documents": "a: {}\n---\nb: {}\n",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused_at_once(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    before = time.monotonic()
    with pytest.raises(ConfigError, match=r"c\.yml"):
        read_blocks(file)
    assert time.monotonic() - before < 5


def test_ordinary_merges_and_aliases_are_read(tmp_path: Path) -> None:
    file = tmp_path / "c.yml"
    file.write_text("base: &base {seed: 3}\nother:\n  <<: *base\n  lr: 0.1\nlist: {x: [1, 2]}\n")
    blocks = read_blocks(file)
    assert [(entry.key, entry.value) for entry in blocks["other"].merged] == [("seed", "3")]
    assert [(entry.key, entry.value) for entry in blocks["other"].own] == [("lr", "0.1")]
    assert blocks["list"].own[0].value == ["1", "2"]
