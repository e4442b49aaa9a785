"""The shards of the reference's first application: their splits must be named, and a missing name gets the list."""

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
    wanted = f"{shards - 1} split{'s' * (shards != 2)}" if shards > 1 else "at least one split"
    given = f"--pipeline-splits {' '.join(splits)}" if splits else "no --pipeline-splits"
    raise ConfigError(
        f"--pipeline with --shards {shards} and {given}.",
        rule=f"{shards} shard{'s' * (shards != 1)} need {wanted}: each names the block that starts a new stage.",
        remedy=f"Possible splits of {network.name}: {', '.join(_names(network))}.",
    )


def _names(network: Network) -> list[str]:
    """Return the places as that application names them: of a ResNet the relus after its units."""
    relus = [alias for alias, _ in network.aliases if alias.startswith("b") and alias.endswith("/relu")]
    return relus or list(network.block_names[1:])
