"""Weights under the names of other libraries, with the dims as they lie there: the name tables read to the right."""

from typing import Any

import numpy as np

from headrace.core.errors import ConfigError
from headrace.weights.adopt import flat_weights
from headrace.weights.name_tables import SCHEMES
from headrace.weights.naming import Scheme, pair_names

_NOT_TORCH = ("keras",)
_COUNTER = "num_batches_tracked"


def torch_names(params: Any, stats: Any, names: str = "", step: int = 0) -> tuple[str, dict[str, np.ndarray]]:
    """Return (scheme, state dict) of a network, ready for `load_state_dict(strict=True)` there.

    `names` asks for a scheme by name; '' takes the first that has a name for every tensor.
    """
    ours = {name: np.asarray(array, np.float32) for name, array in flat_weights(params, stats).items()}
    scheme = _find(names, ours)
    pairs = pair_names(scheme, ours)
    found: dict[str, np.ndarray] = {}
    for name, pair in pairs.items():
        found[pair.theirs] = np.ascontiguousarray(pair.turn.write(ours[name]))
        if pair.theirs.endswith(".running_var"):  # torch counts batches beside its statistics, and asks for the count
            found[pair.theirs.replace("running_var", _COUNTER)] = np.array(step, np.int64)
    return scheme.name, dict(sorted(found.items()))


def _find(names: str, ours: dict[str, np.ndarray]) -> Scheme:
    torch = [scheme for scheme in SCHEMES if scheme.name not in _NOT_TORCH]
    fitting = [scheme for scheme in torch if len(pair_names(scheme, ours)) == len(ours)]
    chosen = next((scheme for scheme in fitting if names in ("", scheme.name)), None)
    if chosen is not None:
        return chosen
    if fitting:
        known = ", ".join(dict.fromkeys(scheme.name for scheme in fitting))
        raise ConfigError(f"This network has no names of {names}.", remedy=f"It has those of {known}.")
    best = max(torch, key=lambda scheme: len(pair_names(scheme, ours)))
    without = [name for name in ours if name not in pair_names(best, ours)]
    raise ConfigError(
        f"No torch library names the weights of this network: {best.name} has none for {', '.join(without[:4])}.",
        rule="Every weight needs a name there.",
        remedy="Export with --format safetensors, under our own names.",
    )
