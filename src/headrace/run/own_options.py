"""The options of a model whose network and data code gives: which of them mean nothing there, and what follows."""

from collections.abc import Mapping
from typing import Any

from headrace.config.load import named_options, resolve_code, to_flat
from headrace.config.names import find, spellings
from headrace.config.schema import all_options
from headrace.core.errors import ConfigError
from headrace.model.network import Network
from headrace.model.own_block import OwnBlock

_PARTS = "The network and the data are given by code, so options cannot name or shape them."
_REFUSED = {
    "training": "fit trains, evaluate and predict do not.",
    "compile_only": "fit compiles and trains.",
    "init_from": "load() takes the weights of a checkpoint.",
}
# options of batch norm that reach only Headrace's own layer
_OF_OUR_NORM = ("stable_norm", "dbn_replica_group_size")


def check_own_options(options: Mapping[str, Any], network: Network) -> dict[str, Any]:
    """Return the options under their full names, with the momentum that the network's batch norms ask for."""
    known, named = spellings(all_options()), named_options()
    for written in options:
        name = find(written, known).name
        if name in named or name in _REFUSED:
            raise ConfigError(f"The option {written} has no meaning here.", rule=_REFUSED.get(name, _PARTS))
    resolved = resolve_code(options)
    flat = to_flat(resolved.config)
    given = {name: flat[name] for name, origin in resolved.origins.items() if origin.is_given}
    own = [block for _, block in network.blocks if isinstance(block, OwnBlock)]
    if any(block.has_stats for block in own):
        for name in _OF_OUR_NORM:
            if given.get(name, default := all_options()[name].default) != default:
                raise ConfigError(
                    f"{name} is given, but a block of {network.name} has a batch norm of its own.",
                    rule=f"{name} is for the norm layer of Headrace alone.",
                    remedy="Leave it out, or use that layer.",
                )
    momentums = {value for block in own for value in block.functions.momentums if value < 1}
    if not momentums or "bn_momentum" in given:
        return given
    if len(momentums) > 1:
        told = ", ".join(f"{value:g}" for value in sorted(momentums))
        raise ConfigError(
            f"The batch norms of {network.name} have several momentums: {told}.",
            rule="Headrace moves all running statistics alike, once per step.",
            remedy="Give the one to use: bn_momentum=...",
        )
    return given | {"bn_momentum": momentums.pop()}
