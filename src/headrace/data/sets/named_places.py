"""Datasets by name, as folders of this machine: hf:OWNER/NAME of the Hugging Face hub, tfds:NAME of TFDS, patterns."""

import importlib
import importlib.util
import re
import sys
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from headrace.core.download import terminal_progress
from headrace.core.errors import ConfigError, DataError
from headrace.core.hub import HubRepo, hub_file, hub_listing
from headrace.core.local_path import is_pattern, is_set_name
from headrace.core.units import format_list
from headrace.data.sets.selected import link_folder, selected_files

_CONVERTED = "refs/convert/parquet"  # where the hub keeps tables that it made of other files


@lru_cache(maxsize=16)  # a run describes, checks and opens its set
def named_place(text: str) -> Path | None:
    """Return the folder that holds what a name or a pattern names, fetched if it has to be; None for a path."""
    if is_set_name(text):
        kind, _, name = text.partition(":")
        return _hub_tables(name) if kind == "hf" else _prepared(name)
    return selected_files(text) if is_pattern(text) else None


def _hub_tables(name: str) -> Path:
    """Return a folder with the parquet files of a dataset of the hub: its own, or those that the hub made of it."""
    owner, _, rest = name.partition("/")
    base, at, revision = rest.partition("@")
    base, _, subset = base.partition("/")
    repo = HubRepo.parse(f"{owner}/{base}{at}{revision}", "dataset")
    tables = _tables(repo)
    if not tables and repo.revision == "main":
        repo = HubRepo(name=repo.name, revision=_CONVERTED, kind="dataset")
        tables = _tables(repo)
    if not tables:
        raise DataError(
            f"hf:{name} has no parquet files.",
            rule="Tables of a dataset of the hub are read, its own or those that the hub makes of images in folders.",
            remedy="Download its files and give their folder, or give --dataset-path hf://datasets/OWNER/NAME/FOLDER.",
        )
    chosen = _subset(name, tables, subset)
    files = {}
    for number, table in enumerate(chosen):
        if sys.stderr.isatty():
            partial(terminal_progress(), f"hf:{name}")(number, len(chosen))
        # Names in which the reader finds the split: train/0000.parquet is train-0000.parquet.
        parts = table.split("/")
        files["-".join(parts[1:] if len(parts) > 1 else parts)] = hub_file(repo, (table,))
    return link_folder(f"hf:{name}", files)


def _tables(repo: HubRepo) -> list[str]:
    return sorted(name for name in hub_listing(repo) or () if name.endswith(".parquet"))


def _subset(name: str, tables: list[str], wanted: str) -> list[str]:
    """Return the tables of one subset (a folder); several need to be chosen from."""
    folders = sorted({table.rpartition("/")[0].partition("/")[0] for table in tables})
    if wanted or len(folders) > 1:
        if wanted not in folders:
            shown = format_list([folder or "(none)" for folder in folders], 8)
            raise ConfigError(
                f"hf:{name} has tables in {len(folders)} folders: {shown}."
                if not wanted
                else f"hf:{name} has no folder {wanted}: {shown}.",
                rule="A subset is named behind the dataset: hf:OWNER/NAME/SUBSET.",
                remedy=f"For example hf:{name.partition('@')[0].removesuffix(f'/{wanted}')}/{folders[-1]}.",
            )
        return [table for table in tables if table.startswith(f"{wanted}/")]
    return tables


def _prepared(name: str) -> Path:
    """Return the folder in which TFDS has prepared a dataset, prepared now if it has not."""
    if not re.fullmatch(r"[\w./:+-]+", name):
        raise ConfigError(
            f"tfds:{name} names no dataset.", rule="It is tfds:NAME, tfds:NAME/CONFIG or tfds:NAME:1.0.0."
        )
    if importlib.util.find_spec("tensorflow_datasets") is None:
        raise ConfigError(
            f"tfds:{name} is given, and tensorflow_datasets is not installed.",
            rule="It knows the datasets and prepares them; prepared folders are read without it.",
            remedy="pip install tensorflow_datasets, or give the folder with --dataset-path.",
        )
    library: Any = importlib.import_module("tensorflow_datasets")
    try:
        builder = library.builder(name)
        if not builder.is_prepared():
            print(f"TFDS prepares {name} in {builder.data_path}", file=sys.stderr)
            builder.download_and_prepare()
    except Exception as error:  # the library's errors have no common class
        first = str(error).strip().partition("\n")[0][:300]
        raise DataError(
            f"TFDS cannot prepare {name}: {first or type(error).__name__}.",
            remedy="Some datasets need TensorFlow (pip install tensorflow) to be prepared; then give the folder.",
        ) from None
    return Path(str(builder.data_path))
