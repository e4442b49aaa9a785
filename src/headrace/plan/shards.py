"""The shards of the reference's first application: their splits must be named, and a missing name gets the list."""

import re

from headrace.config.schema import Config
from headrace.core.errors import ConfigError
from headrace.model.network import Network


def refuse_missing_splits(config: Config, network: Network) -> None:
    """Refuse `--pipeline` without as many splits as its shards need, and print those that the network has."""
    legacy, splits = config.legacy, config.pipeline.pipeline_splits
    if not legacy.pipeline:
        return
    shards = legacy.shards or 1
    if splits and (shards == 1 or len(splits) == shards - 1):
        return
    counted = (
        f"{shards} shards need {shards - 1} split{'s' * (shards != 2)}" if shards > 1 else "One shard needs a split"
    )
    given = f"--pipeline-splits {' '.join(splits)}" if splits else "no --pipeline-splits"
    raise ConfigError(
        f"--pipeline with --shards {shards} and {given}.",
        rule=f"{counted}: each names the block that starts a new stage.",
        remedy=f"Possible splits of {network.name}: {', '.join(_names(network))}.",
    )


def _names(network: Network) -> list[str]:
    """Return the places as that application names them, in order.

    Of a ResNet these are the relus after its units, of an EfficientNet its blocks and the parts of those that change
    the shape; of others our own blocks.
    """
    points = network.split_points()
    wanted = re.compile(r"b\d+/\d+/relu|block\d+[a-z]|block\d+a/(b|SE|c)|Top")
    theirs = [name for name in points if wanted.fullmatch(name) and points[name] > (0, 0)]
    return sorted(theirs, key=lambda name: points[name]) or list(network.block_names[1:])
