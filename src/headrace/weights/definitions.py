"""Which definition of a network a file of weights holds, by the names of its tensors.

Libraries define a network of one name with other padding, epsilons and shortcuts (`--model-dialect`, `--shortcut`), and
name its tensors in their own way. So the names prove whose network it is, unless a library has two networks of the same
names: those are told apart by who gives the weights.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.config.schema import ModelSection
from headrace.config.section_model import DIALECTS, variant_of
from headrace.core.errors import ConfigError
from headrace.model.network import Network, weights_like
from headrace.model.zoo import build_network
from headrace.rows.networks import OPTION_FAMILIES
from headrace.weights.convert import HEADRACE_NAMES, Naming, Shapes, find_naming, flat_weights, is_ignored

OPTIONS = ("model_dialect", "shortcut")  # that say whose definition it is


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Options under which a network is a library's, and which of the networks with its names it is."""

    options: Mapping[str, str]
    which: str = ""

    @property
    def flags(self) -> str:
        """Return the options as they are typed."""
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.options.items())


def _dialect(name: str, which: str = "") -> Definition:
    return Definition(options={"model_dialect": name}, which=which)


_TIMM = _dialect("timm", "timm's network without tf_ in its name")
_TIMM_TF = "the one that timm calls tf_..., padded as in TensorFlow"
_CIFAR = (
    _dialect("torchvision", "with zero channels on both sides"),
    Definition(options={"model_dialect": "torchvision", "shortcut": "pad-end"}, which="with zero channels at the end"),
    Definition(options={"model_dialect": "torchvision", "shortcut": "projection"}),
)
# scheme -> (beginning of the network's name, definitions that its library has under these names); the longest counts
_DEFINITIONS: Mapping[str, Sequence[tuple[str, Sequence[Definition]]]] = {
    HEADRACE_NAMES: (("", tuple(map(_dialect, DIALECTS))),),  # of all networks alike
    "torchvision": (("", (_dialect("torchvision"),)),),
    "timm": (
        ("", (_TIMM,)),
        ("efficientnet_", (_TIMM, _dialect("reference", _TIMM_TF))),
        ("efficientnet_v2_b", (_dialect("reference"),)),  # there as tf_... alone
        ("mobilenet_v3_", (_TIMM, _dialect("keras", _TIMM_TF))),
    ),
    "common": (("", _CIFAR),),
    "common-fc": (("", _CIFAR),),
    "keras": (("", (_dialect("keras"),)),),
    "efficientnet_pytorch": (("", (_dialect("reference"),)),),  # TensorFlow's weights, padded as there
}


def has_definitions(model: ModelSection) -> bool:
    """Say whether libraries define the network in more than one way, as far as their weights can be read."""
    variant = variant_of(model)
    return variant is not None and variant.family in OPTION_FAMILIES["model_dialect"]


def find_definition(model: ModelSection, given: Collection[str], shapes: Shapes, source: str) -> Mapping[str, str]:
    """Return the options that make the network the one in a file, by the names and shapes of its tensors.

    Nothing where the network is that one already, or where the file is of quite another: loading it says what does not
    fit. `given` are those of OPTIONS that somebody asked for. Refused is what the names do not tell apart, and what
    they contradict.
    """
    asked = _network(model)
    naming, misfit = _fit(asked, shapes)
    variant = variant_of(model)
    rows = _DEFINITIONS.get(naming.scheme if 2 * naming.found > naming.total else "", ())
    if not rows or variant is None:
        return {}
    _, definitions = max((row for row in rows if variant.name.startswith(row[0])), key=lambda row: len(row[0]))
    networks = [(each, network) for each in definitions if (network := _network_if_any(replace(model, **each.options)))]
    misfits = [_fit(network, shapes)[1] for _, network in networks]
    least = min(misfit, *misfits)
    fitting = [pair for pair, count in zip(networks, misfits, strict=True) if count == least]
    # Where no library's network fits as well, as for a file of our own that has lost its description, it stays.
    if not fitting or (given and any(network == asked for _, network in fitting)):
        return {}
    agreeing = [
        (each, network)
        for each, network in fitting
        if all(getattr(model, name) == value for name, value in each.options.items() if name in given)
    ]
    if not agreeing:
        raise contradiction(model, given, fitting[0][0], f"the names in {source} are those of {naming.scheme}")
    different: list[tuple[Definition, Network]] = []
    for each, network in agreeing:
        if all(network != other for _, other in different):
            different.append((each, network))
    if len(different) > 1:
        raise _undecided(asked.name, [each for each, _ in different], naming, source)
    ((found, network),) = different
    return {} if network == asked else {name: value for name, value in found.options.items() if name not in given}


def refuse_another(model: ModelSection, given: Collection[str], known: Mapping[str, str], source: str) -> None:
    """Refuse options by which the network computes something else than the one that weights are known to be of."""
    if _network(model) != _network(replace(model, **known)):
        raise contradiction(model, given, Definition(options=known), f"{source} is of a network with another one")


def contradiction(model: ModelSection, given: Collection[str], known: Definition, why: str) -> ConfigError:
    """Return the error for options that contradict what is known of weights."""
    said = " and ".join(f"{name} {getattr(model, name)}" for name in OPTIONS if name in given)
    return ConfigError(
        f"{said} is asked for, but {why}.",
        rule=f"Weights compute what they were trained for only in their own definition of the network: {known.flags}.",
        remedy=f"Leave --{' and --'.join(sorted(given)).replace('_', '-')} out. (A file of headrace export needs its "
        ".json beside it. --init-min-loaded 0 starts from the weights all the same.)",
    )


def _undecided(network: str, definitions: Sequence[Definition], naming: Naming, source: str) -> ConfigError:
    kinds = "; ".join(each.flags + (f" ({each.which})" if each.which else "") for each in definitions)
    return ConfigError(
        f"{source} holds one of {len(definitions)} networks {network}, and its names, those of {naming.scheme}, do not "
        "say which.",
        rule=f"They differ in what they compute: {kinds}.",
        remedy="Give the options of the one that the weights were trained with.",
    )


def _network(model: ModelSection) -> Network:
    variant = variant_of(model)
    assert variant is not None
    return build_network(model, variant.num_classes, (variant.image_size, variant.image_size, 3))


def _network_if_any(model: ModelSection) -> Network | None:
    """Return the network, or None where the options do not go with it: units of another kind have no such shortcut."""
    try:
        return _network(model)
    except ConfigError:
        return None


def _fit(network: Network, shapes: Shapes) -> tuple[Naming, int]:
    """Return how a file names a network's tensors, and how many tensors only one of the two has."""
    ours = flat_weights(*weights_like(network))
    naming = find_naming(ours, shapes)
    head = network.block_names[-1]
    # A head for other classes has other sizes in every definition.
    found = {
        pair.theirs
        for name, pair in naming.pairs.items()
        if pair.theirs in shapes and (name.split("/")[1] == head or math.prod(shapes[pair.theirs]) == ours[name].size)
    }
    counted = sum(not is_ignored(name) for name in shapes)
    return naming, len(ours) + counted - 2 * len(found)
