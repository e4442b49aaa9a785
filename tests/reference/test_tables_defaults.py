"""The defaults that documents 000 and 001 state (tests/seeds/options.yml) are those of tf2 and tf1."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config.field import find_option, option_names
from headrace.config.load import Resolved, resolve
from headrace.config.section_model import norm_choice
from headrace.config.translations import known_options

STATED = yaml.safe_load((Path(__file__).parents[1] / "seeds" / "options.yml").read_text())
APPLICATIONS = {"000": "tf2", "001": "tf1"}
# The number of shards is translated; momentum and warm-up are keys of mappings; a norm is said in several ways.
ELSEWHERE = {
    "shards": lambda resolved: resolved.config.pipeline.num_stages,
    "momentum": lambda resolved: resolved.config.learning.optimizer_params,
    "warmup_epochs": lambda resolved: (resolved.config.learning.lr_warmup_params or {}).get("warmup_epochs"),
    "group_norm": lambda resolved: norm_choice(resolved.config.model)["name"],
    "batch_norm": lambda resolved: norm_choice(resolved.config.model)["name"],
    "groups": lambda resolved: norm_choice(resolved.config.model)["num_groups"],
    "normalise_input": lambda resolved: resolved.config.data.normalization == "per-channel",
    "model_size": lambda resolved: resolved.config.model.model_name,
    "hostside_norm": lambda resolved: resolved.config.data.accelerator_side_preprocess,
}
ROWS: list[tuple[str, dict[str, Any]]] = [
    (document, row)
    for document, headings in STATED.items()
    for rows in headings.values()
    for row in rows
    if "value" in row
]


def value_of(resolved: Resolved, written: str) -> Any:
    """Return the value of an option, under any of its names."""
    name = find_option(written, option_names(known_options())).name
    if name in ELSEWHERE:
        return ELSEWHERE[name](resolved)
    value = getattr(getattr(resolved.config, known_options()[name].section), name)
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(("document", "row"), ROWS, ids=[f"{doc}-{row['option']}-{row['value']}" for doc, row in ROWS])
def test_a_default_is_the_documents(document: str, row: dict[str, Any]) -> None:
    given = {"application": APPLICATIONS[document], **row.get("given", {})}
    resolved = resolve(given, environ={})
    assert value_of(resolved, row["option"]) == row["value"]
    name = find_option(row["option"], option_names(known_options())).name
    assert name in ELSEWHERE or not resolved.origins[name].is_given


def test_ours_are_not_touched() -> None:
    ours = resolve({}, "none", environ={}).config
    assert (ours.run.seed, ours.checkpoint.clean_dir, ours.learning.weight_decay) == (0, False, 0)
    assert (ours.data.accelerator_side_preprocess, ours.numerics.stochastic_rounding) == (True, True)
    assert ours.numerics.half_type == "bfloat16"


@pytest.mark.parametrize("application", ["tf1", "tf2"])
@pytest.mark.parametrize(
    ("given", "offloaded"),
    [
        ({}, False),
        ({"gradient_accumulation_count": 4}, False),  # plain SGD has no state
        ({"optimizer": "momentum"}, False),  # nothing to wait for
        ({"optimizer": "momentum", "gradient_accumulation_count": 4}, True),
        ({"optimizer": "momentum", "global_batch_size": 64}, True),
        ({"optimizer": "momentum", "gradient_accumulation_count": 4, "optimizer_state_offloading": False}, False),
    ],
)
def test_state_is_offloaded_where_it_is_idle(application: str, given: dict[str, Any], offloaded: bool) -> None:
    config = resolve({"application": application, "dataset": "cifar10", **given}, environ={}).config
    assert config.pipeline.optimizer_state_offloading is offloaded


def test_a_momentum_of_its_own_option_is_a_state_too() -> None:
    given = {"application": "tf2", "momentum": 0.9, "gradient_accumulation_count": 4}
    assert resolve(given, environ={}).config.pipeline.optimizer_state_offloading


@pytest.mark.parametrize(
    ("given", "download"),
    [
        ({}, True),
        ({"dataset": "mnist"}, True),
        ({"dataset": "imagenet"}, False),
        ({"generated_data": True}, False),
        ({"synthetic_data": "device"}, False),
        ({"download": False}, False),
    ],
)
def test_datasets_are_downloaded_by_themselves_as_document_000_says(given: dict[str, Any], download: bool) -> None:
    assert resolve({"application": "tf2", **given}, environ={}).config.data.download is download


@pytest.mark.parametrize("application", ["tf1", "tf2"])
def test_images_that_cross_as_bytes_are_preprocessed_by_the_device(application: str) -> None:
    data = resolve({"application": application, "eight_bit_transfer": True}, environ={}).config.data
    assert (data.accelerator_side_preprocess, data.eight_bit_transfer) == (True, True)


def test_a_decay_that_leaves_nothing_to_learn_is_warned_of() -> None:
    warnings = resolve({"application": "tf2"}, environ={}).warnings
    assert any(text.startswith("weight_decay 1 (translated from tf2's defaults) takes") for text in warnings)
    assert not any("weight_decay" in text for text in resolve({"weight_decay": 0.05}, "none").warnings)


@pytest.mark.parametrize(
    ("folders", "dataset"),
    [
        (["cifar-10-batches-bin"], "cifar10"),
        (["cifar-100-binary", "other"], "cifar100"),
        (["imagenet-data"], "imagenet"),
        (["cifar-10-batches-bin", "imagenet-data"], "auto"),
        ([], "auto"),
    ],
)
def test_a_parent_directory_names_the_dataset_by_its_folders(folders: list[str], dataset: str, tmp_path: Path) -> None:
    parent = tmp_path / "data"
    for folder in folders:
        (parent / folder).mkdir(parents=True)
    assert resolve({"application": "tf1", "data_dir": str(parent)}, environ={}).config.data.dataset == dataset
