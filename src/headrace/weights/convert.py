"""Put foreign weights into a network: by name, turned as its dims lie here, with a table of what became of each."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.tree import flatten_named, unflatten_named
from headrace.model.network import Network
from headrace.weights.name_rules import AS_IS, Pair, Scheme, Turn, pair_names
from headrace.weights.name_tables import SCHEMES
from headrace.weights.weight_file import Foreign

OWN_NAMES = "headrace"
_SHOWN = 6
# Of no use here: torch's counter of batches, which neither training nor evaluation reads.
_IGNORED = re.compile(r"num_batches_tracked$|^n_averaged$")
_ANY_DIMS = Turn(dims=-1, read=AS_IS.read, write=AS_IS.write)


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What became of one tensor of the network."""

    name: str
    status: Literal["loaded", "replaced", "fresh"]
    size: int
    theirs: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """Weights with foreign ones in their place, and the table of them."""

    params: Any
    stats: Any
    source: str
    scheme: str
    fates: tuple[Fate, ...]
    unused: tuple[str, ...]  # names in the file that found no place
    share: float  # of the network's numbers that were loaded, a head for other classes left out
    used_share: float  # of the file's numbers

    def count(self, status: str) -> tuple[int, int]:
        """Return (tensors, numbers) of a status."""
        sizes = [fate.size for fate in self.fates if fate.status == status]
        return len(sizes), sum(sizes)


def flat_weights(params: Any, stats: Any) -> dict[str, np.ndarray]:
    """Return {`params/...` or `stats/...`: array}, the names that checkpoints use."""
    return flatten_named({"params": params, "stats": stats})


def adopt(network: Network, initial: tuple[Any, Any], foreign: Foreign, min_share: float = 0.9) -> Adopted:
    """Return the initial weights (params, stats) with those of a file in the place of all that fit.

    Less than `min_share` of the network's or of the file's numbers is an error: it is then most likely another network.
    """
    like = {"params": initial[0], "stats": initial[1]}
    ours = flatten_named(like)
    scheme, pairs = _best_scheme(ours, foreign.arrays)
    folded = _with_biases_folded(scheme, pairs, foreign.arrays)
    head = network.block_names[-1]
    values, fates = {}, []
    for name, array in ours.items():
        pair = pairs.get(name)
        found = folded.get(pair.theirs) if pair else None
        values[name], fate = _place(name, array, pair, found, name.split("/")[1] == head)
        fates.append(fate)
    adopted = _summary(unflatten_named(like, values), foreign, scheme, fates, head)
    _refuse_too_little(network, adopted, min_share)
    return adopted


def _best_scheme(ours: Mapping[str, Any], arrays: Mapping[str, Any]) -> tuple[str, dict[str, Pair]]:
    """Return the scheme under which most of the network's numbers are found in the file."""
    own = {name: Pair(ours=name, theirs=name, turn=_ANY_DIMS) for name in ours}
    choices: list[tuple[str, dict[str, Pair]]] = [(OWN_NAMES, own)]
    choices += [(scheme.name, pair_names(scheme, ours)) for scheme in SCHEMES]

    def found(choice: tuple[str, dict[str, Pair]]) -> int:
        return sum(np.size(ours[pair.ours]) for pair in choice[1].values() if pair.theirs in arrays)

    return max(choices, key=found)


def _with_biases_folded(scheme: str, pairs: dict[str, Pair], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Take a bias that Keras' convolutions have before a batch norm into the norm's mean: the same function."""
    if scheme != "keras":
        return arrays
    known = {pair.theirs for pair in pairs.values()}
    folded = dict(arrays)
    for name, bias in arrays.items():
        mean = re.sub(r"conv/bias$", "bn/moving_mean", name)
        if name not in known and mean != name and mean in known and mean in arrays:
            folded[mean] = arrays[mean] - bias
            del folded[name]
    return folded


def _place(
    name: str, initial: np.ndarray, pair: Pair | None, found: np.ndarray | None, in_head: bool
) -> tuple[np.ndarray, Fate]:
    """Return the value of one tensor and what became of it."""
    if pair is None or found is None:
        return initial, Fate(name=name, status="fresh", size=initial.size, theirs=pair.theirs if pair else "")
    fits = pair.turn.dims in (-1, found.ndim)
    turned = pair.turn.read(found) if fits else found
    if not fits or turned.shape != initial.shape:
        why = f"{_dims(found)} there, {_dims(initial)} here" + (" (another number of classes)" if in_head else "")
        return initial, Fate(name=name, status="replaced", size=initial.size, theirs=pair.theirs, note=why)
    value = np.ascontiguousarray(turned).astype(initial.dtype).reshape(initial.shape)
    return value, Fate(name=name, status="loaded", size=initial.size, theirs=pair.theirs)


def _summary(tree: dict[str, Any], foreign: Foreign, scheme: str, fates: list[Fate], head: str) -> Adopted:
    taken = {fate.theirs for fate in fates if fate.status != "fresh"}
    unused = [name for name in foreign.arrays if name not in taken and not _IGNORED.search(name)]
    if scheme == OWN_NAMES:  # a checkpoint also holds what belongs to the training alone
        unused = [name for name in unused if name.startswith(("params/", "stats/"))]
    if scheme == "keras":
        unused = [name for name in unused if not name.endswith("/bias")]
    # A head for other classes is meant to be left out, so it does not count against what was loaded.
    counted = [fate for fate in fates if not (fate.status == "replaced" and fate.name.split("/")[1] == head)]
    loaded = sum(fate.size for fate in counted if fate.status == "loaded")
    useless = sum(foreign.arrays[name].size for name in unused)
    return Adopted(
        params=tree["params"],
        stats=tree["stats"],
        source=foreign.source,
        scheme=scheme,
        fates=tuple(fates),
        unused=tuple(unused),
        share=loaded / max(sum(fate.size for fate in counted), 1),
        used_share=loaded / max(loaded + useless, 1),
    )


def _refuse_too_little(network: Network, adopted: Adopted, min_share: float) -> None:
    if adopted.share >= min_share and adopted.used_share >= min_share:
        return
    if adopted.share < min_share:
        problem = f"Only {100 * adopted.share:.1f} % of {network.name}'s weights are in {adopted.source}"
        missing = [fate.theirs or fate.name for fate in adopted.fates if fate.status != "loaded"]
    else:
        problem = f"{network.name} takes only {100 * adopted.used_share:.1f} % of the weights in {adopted.source}"
        missing = list(adopted.unused)
    raise CheckpointError(
        f"{problem}; left out are {_listed(missing)} (names read as {adopted.scheme}).",
        rule=f"At least {100 * min_share:g} % of the network and of the file must find their place.",
        remedy="Name the network that the file was made with, or lower --init-min-loaded.",
    )


def table_lines(adopted: Adopted) -> list[str]:
    """Return the table for people: a line for each status, with the names where they are few."""
    lines = [f"weights from {adopted.source}, names as in {adopted.scheme}:"]
    for status, words in (("loaded", ""), ("replaced", "initial instead of the file's"), ("fresh", "not in the file")):
        tensors, numbers = adopted.count(status)
        line = f"  {status:9}{tensors:5d} tensors {numbers:13,d} numbers"
        if tensors and status != "loaded":
            told = [fate.name + (f" ({fate.note})" if fate.note else "") for fate in adopted.fates]
            told = [text for text, fate in zip(told, adopted.fates, strict=True) if fate.status == status]
            line += f"  {words}: {_listed(told)}"
        lines.append(line)
    if adopted.unused:
        names = _listed(list(adopted.unused))
        lines.append(f"  left over{len(adopted.unused):5d} tensors of the file: {names}")
    return lines


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _dims(array: np.ndarray) -> str:
    return "x".join(map(str, array.shape)) or "a number"


def scheme_names() -> list[str]:
    """Return the names of all schemes, each once."""
    return list(dict.fromkeys(scheme.name for scheme in SCHEMES))


def find_scheme(name: str, ours: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a name ('' is the first) that has a name for every tensor, or None."""
    found = (scheme for scheme in SCHEMES if name in ("", scheme.name))
    return next((scheme for scheme in found if len(pair_names(scheme, ours)) == len(ours)), None)


# Weights under the names of other libraries, with the dims as they lie there: the name tables read to the right.


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
