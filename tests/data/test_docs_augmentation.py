"""docs/howto/augmentation.md: its commands are understood, and its tables name what there is."""

import re
import shlex
from pathlib import Path

import pytest

import headrace
from headrace.cli.options import parse
from headrace.config.schema import SECTIONS, all_options
from headrace.config.section_augment import RAND_AUGMENT_OPERATIONS

PAGE = Path(headrace.__file__).parents[2] / "docs" / "howto" / "augmentation.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="not run from the repository")


def test_the_commands_are_understood():
    commands = re.findall(r"^headrace train .*$", PAGE.read_text(), re.M)
    assert len(commands) >= 5
    for command in commands:
        words = shlex.split(command)
        resolved, _ = parse(words[2:], "headrace train")
        assert resolved.warnings == ()


def test_every_option_and_operation_is_on_the_page():
    text = PAGE.read_text()
    for option in all_options().values():
        if SECTIONS[option.section].__name__ == "Augment":
            assert option.flag in text, option.flag
    for name in RAND_AUGMENT_OPERATIONS:
        assert f"`{name}`" in text, name
    assert (PAGE.parents[1] / "plots" / "augmentation.png").is_file()
