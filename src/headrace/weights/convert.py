"""Convert weights between names and dim orders: load a file into a network, and export a network for torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.tree import PyTree, flatten_named, unflatten_named
from headrace.core.units import format_list
from headrace.model.network import Network
from headrace.weights.name_schemes import AS_IS, DimOrder, NamePair, NameScheme, pair_names
from headrace.weights.name_tables import SCHEMES
from headrace.weights.weight_file import ForeignWeights
from headrace.weights.weights import Loading, TensorStatus, Weights, flat_weights

HEADRACE_NAMES = "headrace"
_MAX_LISTED = 6
_MAX_PREFIX = 4  # parts of a name, such as module.model.backbone.
# Torch's counters of batches and of averaged weights.
_IGNORED = re.compile(r"num_batches_tracked$|^n_averaged$")
_ANY_DIMS = DimOrder(dims=-1, read=AS_IS.read, write=AS_IS.write)


Shapes = Mapping[str, tuple[int, ...]]  # of a file's tensors, by name


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How a file names a network's tensors: by which scheme, and after which prefixes."""

    scheme: str
    prefixes: tuple[str, ...]
    pairs: Mapping[str, NamePair]  # by our name
    found: int  # of the network's numbers, those whose tensors are in the file
    total: int


def load_into(
    network: Network, initial: tuple[PyTree, PyTree], foreign: ForeignWeights, min_share: float = 0.9
) -> Weights:
    """Return the initial weights (params, stats), replaced by those of a file wherever they fit.

    Less than `min_share` of the network's or of the file's numbers is an error: it is then most likely another network.
    """
    like = {"params": initial[0], "stats": initial[1]}
    ours = flatten_named(like)
    naming = find_naming(ours, {name: array.shape for name, array in foreign.arrays.items()})
    pairs = naming.pairs
    folded = _with_biases_folded(naming.scheme, pairs, foreign.arrays)
    head = network.block_names[-1]
    values, statuses = {}, []
    for name, array in ours.items():
        pair = pairs.get(name)
        found = folded.get(pair.theirs) if pair else None
        values[name], tensor = _load_tensor(name, array, pair, found, name.split("/")[1] == head)
        statuses.append(tensor)
    loading = _summary(foreign, naming, statuses, head)
    _refuse_too_little(network, loading, foreign, min_share)
    tree = unflatten_named(like, values)
    return Weights(network=network, params=tree["params"], stats=tree["stats"], origin=foreign.source, loading=loading)


def find_naming(ours: Mapping[str, np.ndarray], theirs: Shapes) -> Naming:
    """Return the scheme under which most of the network's numbers are found in a file, and after which prefixes."""
    total = sum(map(np.size, ours.values()))
    unchanged = {name: NamePair(ours=name, theirs=name, dim_order=_ANY_DIMS) for name in ours}
    schemes: list[tuple[str, dict[str, NamePair]]] = [(HEADRACE_NAMES, unchanged)]
    schemes += [(scheme.name, pair_names(scheme, ours)) for scheme in SCHEMES]

    def found(choice: tuple[dict[str, str], tuple[str, dict[str, NamePair]]]) -> int:
        whole, (_, pairs) = choice
        # By numbers and not by names: a scheme that finds every bias and no kernel has found nothing.
        return sum(np.size(ours[pair.ours]) for pair in pairs.values() if pair.theirs in whole)

    whole, (scheme, pairs) = best = max(product(_without_first_parts(theirs), schemes), key=found)
    used = ((whole[pair.theirs], pair.theirs) for pair in pairs.values() if pair.theirs in whole)
    return Naming(
        scheme=scheme,
        prefixes=tuple(dict.fromkeys(name.removesuffix(rest) for name, rest in used if name != rest)),
        pairs={name: replace(pair, theirs=whole.get(pair.theirs, pair.theirs)) for name, pair in pairs.items()},
        found=found(best),
        total=total,
    )


def _without_first_parts(theirs: Shapes) -> list[dict[str, str]]:
    """Return {name without its first parts: whole name}, for no part, one part, ...: what modules around a network add.

    `module.`, `model.`, `backbone.` and `head.`. Two networks in a file, as of a student and a teacher, stay apart.
    """
    choices = []
    for count in range(_MAX_PREFIX + 1):
        parts = {name: name.split(".") for name in theirs}
        whole = {".".join(each[count:] if len(each) > count else each): name for name, each in parts.items()}
        if len(whole) == len(theirs):
            choices.append(whole)
    return choices


def is_ignored(name: str) -> bool:
    """Say whether a tensor of a file is of no use here: torch's counters, which nothing reads."""
    return _IGNORED.search(name) is not None


def _with_biases_folded(
    scheme: str, pairs: Mapping[str, NamePair], arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Subtract the bias of a Keras convolution from the mean of the batch norm after it: the same function."""
    if scheme != "keras":
        return arrays
    known = {pair.theirs for pair in pairs.values()}
    folded = dict(arrays)
    for name, bias in arrays.items():
        mean = re.sub(r"conv/bias$", "bn/moving_mean", name)
        if name not in known and mean != name and mean in known and mean in arrays:
            if arrays[mean].shape != bias.shape:
                raise CheckpointError(f"{name} has {_dims(bias)} numbers, but {mean} {_dims(arrays[mean])}.")
            folded[mean] = arrays[mean] - bias
            del folded[name]
    return folded


def _load_tensor(
    name: str, initial: np.ndarray, pair: NamePair | None, found: np.ndarray | None, in_head: bool
) -> tuple[np.ndarray, TensorStatus]:
    """Return the value of one tensor and its status."""
    if pair is None or found is None:
        return initial, TensorStatus(name=name, status="fresh", size=initial.size, theirs=pair.theirs if pair else "")
    fits = pair.dim_order.dims in (-1, found.ndim)
    reordered = pair.dim_order.read(found) if fits else found
    if not fits or reordered.shape != initial.shape:
        why = f"{_dims(found)} there, {_dims(initial)} here" + (" (another number of classes)" if in_head else "")
        return initial, TensorStatus(name=name, status="replaced", size=initial.size, theirs=pair.theirs, note=why)
    value = np.ascontiguousarray(reordered).astype(initial.dtype).reshape(initial.shape)
    return value, TensorStatus(name=name, status="loaded", size=initial.size, theirs=pair.theirs)


def _summary(foreign: ForeignWeights, naming: Naming, statuses: list[TensorStatus], head: str) -> Loading:
    scheme = naming.scheme
    taken = {tensor.theirs for tensor in statuses if tensor.status != "fresh"}
    unused = [name for name in foreign.arrays if name not in taken and not is_ignored(name)]
    if scheme == HEADRACE_NAMES and taken:  # a checkpoint also holds what belongs to the training alone
        unused = [name for name in unused if name.startswith(("params/", "stats/"))]
    if scheme == "keras":
        unused = [name for name in unused if not name.endswith("/bias")]
    # A head for other classes is meant to be left out, so it does not count against what was loaded.
    counted = [tensor for tensor in statuses if not (tensor.status == "replaced" and tensor.name.split("/")[1] == head)]
    loaded = sum(tensor.size for tensor in counted if tensor.status == "loaded")
    useless = sum(foreign.arrays[name].size for name in unused)
    return Loading(
        scheme=scheme,
        prefixes=naming.prefixes,
        statuses=tuple(statuses),
        unused=tuple(unused),
        share=loaded / max(sum(tensor.size for tensor in counted), 1),
        used_share=loaded / max(loaded + useless, 1),
    )


def _refuse_too_little(network: Network, loading: Loading, foreign: ForeignWeights, min_share: float) -> None:
    if loading.share >= min_share and loading.used_share >= min_share:
        return
    if loading.share < min_share:
        problem = f"Only {100 * loading.share:.1f} % of {network.name}'s weights are in {foreign.source}"
    else:
        problem = f"{network.name} takes only {100 * loading.used_share:.1f} % of the weights in {foreign.source}"
    raise CheckpointError(
        f"{problem} (names read as {loading.scheme}).{_names_beside(loading, foreign)}",
        rule=f"At least {100 * min_share:g} % of the network and of the file must be used.",
        remedy="Name the network that the file was made with, or lower --init-min-loaded.",
    )


def _names_beside(loading: Loading, foreign: ForeignWeights) -> str:
    """Return lines with what the network lacks: our name, the name that was looked for, and a name in the file.

    The last is one that was not used, if possible of a tensor with as many numbers. If hardly anything was found, the
    names that were looked for come from the scheme that covers most of the network.
    """
    ours = [tensor.name for tensor in loading.statuses]
    names = max((pair_names(scheme, ours) for scheme in SCHEMES), key=len) if loading.share < 0.5 else {}
    left, rows = list(loading.unused), [("the network's", "looked for", "in the file")]
    lacking = loading.not_loaded
    for tensor in lacking[:_MAX_LISTED]:
        same = next((name for name in left if foreign.arrays[name].size == tensor.size), left[0] if left else "")
        left = [name for name in left if name != same]
        found = tensor.theirs if tensor.status == "replaced" else same
        theirs = f"{found} {_dims(foreign.arrays[found])}" if found in foreign.arrays else "-"
        looked_for = names[tensor.name].theirs if tensor.name in names else tensor.theirs
        rows.append((tensor.name.partition("/")[2], looked_for or "-", theirs))
    for name in left[: max(0, _MAX_LISTED - len(lacking))]:
        rows.append(("-", "-", f"{name} {_dims(foreign.arrays[name])}"))
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {ours:{wide[0]}}  {theirs:{wide[1]}}  {found}" for ours, theirs, found in rows]
    lines.append(f"  {len(lacking):,} of the network's are not found, {len(loading.unused):,} of the file's not used")
    return "\n" + "\n".join(lines)


def table_lines(weights: Weights) -> list[str]:
    """Return the table for people: a line for each status, with the names where they are few."""
    loading = weights.loading
    before = f", each after {' or '.join(loading.prefixes)}" if loading.prefixes else ""
    lines = [f"weights from {weights.origin}, names as in {loading.scheme}{before}:"]
    for status, words in (("loaded", ""), ("replaced", "initial instead of the file's"), ("fresh", "not in the file")):
        tensors, numbers = loading.count(status)
        line = f"  {status:9}{tensors:5d} tensors {numbers:13,d} numbers"
        if tensors and status != "loaded":
            chosen = (tensor for tensor in loading.statuses if tensor.status == status)
            names = (f"{tensor.name} ({tensor.note})" if tensor.note else tensor.name for tensor in chosen)
            line += f"  {words}: {format_list(names, _MAX_LISTED)}"
        lines.append(line)
    if loading.unused:
        names = format_list(loading.unused, _MAX_LISTED)
        lines.append(f"  left over{len(loading.unused):5d} tensors of the file: {names}")
    return lines


def _dims(array: np.ndarray) -> str:
    return "x".join(map(str, array.shape)) or "a number"


# Export: the name tables read from left to right.
_NOT_TORCH = ("keras",)
_COUNTER = "num_batches_tracked"


def export_names(
    params: PyTree, stats: PyTree, names: str = "", step: int = 0, dialect: str = ""
) -> tuple[str, dict[str, np.ndarray]]:
    """Return (scheme, state dict) of a network, ready for `load_state_dict(strict=True)` there.

    `names` asks for a scheme by name; '' takes that of the dialect, or the first that has a name for every tensor.
    """
    ours = {name: np.asarray(array, np.float32) for name, array in flat_weights(params, stats).items()}
    scheme = _find(names, dialect, ours)
    pairs = pair_names(scheme, ours)
    found: dict[str, np.ndarray] = {}
    for name, pair in pairs.items():
        found[pair.theirs] = np.ascontiguousarray(pair.dim_order.write(ours[name]))
        if pair.theirs.endswith(".running_var"):  # torch counts batches beside its statistics, and asks for the count
            found[pair.theirs.replace("running_var", _COUNTER)] = np.array(step, np.int64)
    return scheme.name, dict(sorted(found.items()))


def _find(names: str, dialect: str, ours: dict[str, np.ndarray]) -> NameScheme:
    torch = [scheme for scheme in SCHEMES if scheme.name not in _NOT_TORCH]
    fitting = [scheme for scheme in torch if len(pair_names(scheme, ours)) == len(ours)]
    allowed = [scheme for scheme in fitting if names in ("", scheme.name)]
    if allowed:
        return next((scheme for scheme in allowed if scheme.name == dialect), allowed[0])
    if fitting:
        known = ", ".join(dict.fromkeys(scheme.name for scheme in fitting))
        raise ConfigError(f"This network has no names of {names}.", remedy=f"It has those of {known}.")
    best, pairs = max(((scheme, pair_names(scheme, ours)) for scheme in torch), key=lambda found: len(found[1]))
    without = [name for name in ours if name not in pairs]
    raise ConfigError(
        f"No torch library names the weights of this network: {best.name} has none for {', '.join(without[:4])}.",
        rule="Every weight needs a name there.",
        remedy="Export with --format safetensors, under our names.",
    )
