"""The splits of a tf1 pipeline: they must be named, and the error for missing names lists the possible ones."""

import re

from headrace.config.derived import derive
from headrace.config.layers import Found
from headrace.config.load import build
from headrace.config.model_table import find_variant
from headrace.config.schema import all_options
from headrace.core.errors import ConfigError


def refuse_missing_splits(found: Found) -> None:
    """Refuse `--pipeline` without as many splits as its shards need, and list those that the network has."""
    if not found["pipeline"].value:
        return
    shards, splits = found["shards"].value or 1, found["pipeline_splits"].value
    if splits and (shards == 1 or len(splits) == shards - 1):
        return
    needed = (
        f"{shards} shards need {shards - 1} split{'s' * (shards != 2)}" if shards > 1 else "One shard needs a split"
    )
    given = f"--pipeline-splits {' '.join(splits)}" if splits else "no --pipeline-splits"
    raise ConfigError(
        f"--pipeline with --shards {shards} and {given}.",
        rule=f"{needed}: each names the block that starts a new stage.",
        remedy=possible_splits(found),
    )


def possible_splits(found: Found) -> str:
    """Return a sentence with the splits of the network, under that application's names.

    For a ResNet these are the ReLUs after its units, for an EfficientNet its blocks and the parts of those that change
    the shape, for other networks the names of our blocks.
    """
    # Here, since importing JAX takes a second that reading options should not.
    from headrace.model.families import build_network

    derived = derive(found)
    config = build({name: derived[name].value for name in all_options()})
    variant = find_variant(config.model.model_name)  # names depend neither on its classes nor on its image size
    network = build_network(config.model, variant.num_classes, (variant.image_size, variant.image_size, 3))
    points = network.split_points()
    theirs = re.compile(r"b\d+/\d+/relu|block\d+[a-z]|block\d+a/(b|SE|c)|Top")
    names = [name for name in points if theirs.fullmatch(name) and points[name] > (0, 0)]
    names = sorted(names, key=lambda name: points[name]) or list(network.block_names[1:])
    return f"Possible splits of {network.name}: {', '.join(names)}."
