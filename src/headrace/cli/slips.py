"""What is meant by words of a command line that are neither options nor arguments of the command."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from headrace.config.field import normalise_name, option_names
from headrace.config.other_names import OTHER_NAMES
from headrace.core.errors import ConfigError
from headrace.core.local_path import is_address, is_pattern, is_set_name

_WEIGHTS = (".pth", ".pt", ".bin", ".safetensors", ".h5", ".ckpt", ".keras")


def is_data(word: str) -> bool:
    """Say whether a word is a folder that can be a dataset: a run's is none."""
    if word.startswith("-"):
        return False
    named = is_address(word) or is_set_name(word) or is_pattern(word)
    return named or (Path(word).is_dir() and not is_run(word))


def meant_by(words: Sequence[str], prog: str) -> str:
    """Return what was probably meant by the words, empty where nothing is known."""
    first = words[0]
    if all("=" in word and not word.startswith("-") for word in words):  # as other programs have it: lr=0.1
        pairs = [word.partition("=") for word in words]
        options = " ".join(f"{_flag(name)} {shlex.quote(value)}" for name, _, value in pairs)
        return f"Options begin with two dashes: {options}."
    if first.startswith("-") and not first.startswith("--"):
        flag = _flag(first.lstrip("-"))
        return f"Options begin with two dashes: {flag}." if flag != "--" else ""
    if os.access(first, os.F_OK):
        return _of_path(first)
    return _of_name(first)


def _flag(name: str) -> str:
    """Return the option that a name without dashes is, if there is one, else the name with dashes."""
    from headrace.config.translations import known_options

    known, wanted = option_names(known_options()), normalise_name(name)
    if wanted not in known and wanted in OTHER_NAMES:
        wanted = OTHER_NAMES[wanted].option or wanted
    return "--" + wanted.replace("_", "-")


def _of_path(path: str) -> str:
    if Path(path).is_dir():
        if is_run(path):
            return f"{path} is a run: headrace resume {path} continues it, --weights {path} starts from its weights."
        return f"A folder of images is given as --dataset-path {path}."
    suffix = Path(path).suffix.lower()
    if suffix in _WEIGHTS:
        return f"A file of weights is given as --weights {path}."
    if suffix in (".yml", ".yaml"):
        return f"A file of recipes is given as --config-path {path} --config NAME."
    if suffix == ".csv":
        return f"A list of images is given as --labels {path}."
    return f"A dataset is given as --dataset-path {path}."


def _of_name(word: str) -> str:
    """Return the option for the name of a recipe, a network or a dataset."""
    from headrace.config.networks import find_variant
    from headrace.config.yaml_blocks import shipped_blocks
    from headrace.data.sets.catalog import KNOWN_SETS

    if word in KNOWN_SETS:
        return f"A dataset is named with --dataset {word}."
    if word in shipped_blocks():
        return f"A recipe is named with --config {word}."
    try:
        find_variant(word)
    except ConfigError:
        return f"There is no file or folder {word} here." if "/" in word or "." in word else ""
    return f"A network is named with --model {word}."


def is_run(path: str) -> bool:
    """Say whether a path is the directory of a run."""
    return (Path(path) / "config.json").is_file()
