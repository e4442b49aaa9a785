"""Values that follow from other options once all are known: the network's full name, its image size, ..."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.config.field import DEFAULT, Origin
from headrace.config.layers import Given
from headrace.config.networks import Variant, find_variant
from headrace.config.section_data import IMAGE_DATASETS, IMAGE_SIZES, SYNTHETIC_DATASETS
from headrace.core.errors import ConfigError

ALL_CHECKPOINTS = 1_000_000  # more than any run saves
_ANY_SIZE = (*SYNTHETIC_DATASETS, "imagenet")


def derive(found: Mapping[str, Given]) -> dict[str, Given]:
    """Return all options with those filled in that follow from others."""
    settled = _output(_checkpoints_for_averages(dict(found)))
    name, size = found["model_name"], found["model_size"].value
    image_size = found["image_size"].value or IMAGE_SIZES.get(found["dataset"].value)
    try:
        variant = find_variant(name.value, size, image_size)
    except ConfigError:
        if size is not None:
            raise
        return _momentum(settled)  # not a network of the table: refused, or found elsewhere, when it is built
    settled["model_name"] = Given(value=variant.name, origin=name.origin)
    if image_size is None and _takes_own_size(found["dataset"].value, variant):
        origin = Origin(kind="default", where=f"of {variant.name}")
        settled["image_size"] = Given(value=variant.image_size, origin=origin)
    return _momentum(settled)


def detected_dataset(found: Mapping[str, Given]) -> Mapping[str, Given]:
    """Detect the dataset in a path that was given: training on the embedded digits would ignore the path in silence.

    A path in the environment is a place to search for datasets by name, and asks for none of them.
    """
    named = [name for name in ("dataset_path", "labels") if found[name].origin.kind not in ("default", "environment")]
    if found["dataset"].origin.is_given or not named:
        return found
    return {**found, "dataset": Given(value="auto", origin=Origin(kind="default", where=f"of {named[0]}"))}


def _takes_own_size(dataset: str, variant: Variant) -> bool:
    """Say whether images get the network's own size: synthetic ones do, and all image files for an EfficientNet."""
    return dataset in _ANY_SIZE or (dataset in IMAGE_DATASETS and variant.family == "efficientnet")


def _momentum(found: dict[str, Given]) -> dict[str, Given]:
    """Take bn_momentum from norm_layer where that says it."""
    norm: Any = found["norm_layer"]
    momentum = norm.value.get("momentum")
    if momentum is None or not isinstance(momentum, int | float):
        return found
    own = found["bn_momentum"]
    if own.origin.is_given and own.value != momentum:
        raise ConfigError(
            f"norm_layer says momentum {momentum}, bn_momentum says {own.value}.", remedy="Leave one of them out."
        )
    return found | {"bn_momentum": Given(value=float(momentum), origin=norm.origin)}


def _output(found: dict[str, Given]) -> dict[str, Given]:
    """Divide the run's directory into where it is and its name."""
    output = found["output"]
    if output.value is None:
        return found
    for name in ("log_dir", "run_name"):
        if found[name].origin.kind == output.origin.kind:
            raise ConfigError(
                f"Both are given: output {output.value} and {name} {found[name].value} ({output.origin}).",
                rule="output is the directory of the run: log_dir/run_name.",
                remedy="Leave one of them out.",
            )
    path = Path(output.value)
    return found | {
        "log_dir": Given(value=str(path.parent), origin=output.origin),
        "run_name": Given(value=path.name, origin=output.origin),
        "output": Given(value=None, origin=DEFAULT),
    }


def _checkpoints_for_averages(found: dict[str, Given]) -> dict[str, Given]:
    """Keep all checkpoints where averages of them are asked for."""
    asked = found["average_last_epochs"].value or found["average_decays"].value
    if not asked or found["max_ckpts_to_keep"].origin.is_given:
        return found
    origin = Origin(kind="default", where="with averages of checkpoints")
    return found | {"max_ckpts_to_keep": Given(value=ALL_CHECKPOINTS, origin=origin)}
