"""A network from weights that no run of ours made: by name, from the hub, from an address or a file.

The network, its input and its classes come with the weights where they are known; otherwise options name the network,
and the file says how many classes it has.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.checkpoint.store import refuse_replacing, save
from headrace.config.derived import PIXEL_OPTIONS
from headrace.config.load import NO_RECIPE, resolve_code
from headrace.config.networks import find_variant
from headrace.config.schema import Config
from headrace.core.addresses import hide_addresses
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.local_path import WEB, local_text
from headrace.core.units import format_list
from headrace.data.sets.catalog import numbered_classes, usual_statistics
from headrace.model.network import Network
from headrace.model.zoo import build_network
from headrace.run.choices import definition_remarks, with_definition
from headrace.run.directory import saved_form
from headrace.weights.convert import load_into
from headrace.weights.input_form import InputForm
from headrace.weights.named import facts_of, find_file, is_path, path_of
from headrace.weights.published import WeightFacts
from headrace.weights.weight_file import ForeignWeights, read_file
from headrace.weights.weights import Weights, flat_weights

_LISTED = 4  # names of tensors in a message
_NOTHING_KNOWN = WeightFacts(network={})


def load_named(name: str, options: Mapping[str, Any] | None = None, num_classes: int = 0) -> Weights:
    """Return weights with the network that they are of, with these options over what is known of it.

    `num_classes` asks for a head of that many; the weights' own may then be left out.
    """
    name = hide_addresses(local_text(name, "The file of weights", WEB))
    if is_path(name) and path_of(name).is_dir():
        raise ConfigError(
            f"{name} is a run or a checkpoint, not weights from elsewhere.", remedy="It can be used as it is."
        )
    if is_path(name) and not path_of(name).exists():
        raise ConfigError(
            f"There is no {name}.",
            rule="A run, a checkpoint, a file of weights or a known name is needed.",
            remedy="`headrace runs` lists the runs, `headrace models --weights` the names.",
        )
    facts = facts_of(name) or _NOTHING_KNOWN
    channels = {"num_channels": 1} if facts.num_channels == 1 else {}
    given = {"dataset": "auto", "weights": name, **channels, **(options or {})}
    resolved = resolve_code(given, NO_RECIPE)
    config = resolved.config
    if not facts.network and not resolved.origins["model_name"].is_given:
        raise ConfigError(
            f"The network of {name} is not known.",
            rule="It comes with weights of a known name, with repositories of timm's and with Headrace's own files.",
            remedy=f"Name it: headrace convert {name} --model NAME --out DIRECTORY, and use the result.",
        )
    settled = with_definition(resolved)
    config = settled.config
    foreign = read_file(find_file(name), config.weights.init_ema)
    wanted = num_classes or facts.num_classes or find_variant(config.model.model_name).num_classes
    found = _load(config, foreign, wanted)
    own = _classes_of(found, foreign)
    # Only the file knows how many classes it has; it is loaded once to find out, and then into a network that fits.
    if not num_classes and own and own != wanted:
        found = _load(config, foreign, own)
    network = found.network
    names = facts.class_names if len(facts.class_names) == network.num_classes else ()
    return replace(
        found,
        origin=name,
        class_names=names or numbered_classes(network.num_classes),
        input_form=_input_form(config, network),
        resolved=settled,
        remarks=(*definition_remarks(resolved, settled), *_drawn(found, name)),
    )


def _drawn(found: Weights, name: str) -> tuple[str, ...]:
    """Return a warning where a part of the network, such as its head, has no weights of the file."""
    names = [tensor.name.partition("/")[2] for tensor in found.loading.not_loaded]
    if not names:
        return ()
    listed = format_list(names, _LISTED)
    return (
        f"warning: {len(names)} tensors of the network are not in {name}, and are as before any training: {listed}",
    )


def load_file(name: str, network: Network, config: Config) -> Weights:
    """Return a network's weights from a file, a name or an address."""
    return _load_into(network, read_file(find_file(name), config.weights.init_ema), config)


def pixels_of_weights(facts: WeightFacts | None, images: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that normalise arrays of bytes as the weights expect, unless options say how."""
    found = {name: facts.data[name] for name in PIXEL_OPTIONS if name in facts.data} if facts else {}
    if not found or any(name in options for name in PIXEL_OPTIONS):
        return {}
    first = np.asarray(images[0])
    fits = first.dtype == np.uint8 and len(found.get("pixel_mean", ())) in (0, first.shape[-1])
    return found if fits else {}


def _load(config: Config, foreign: ForeignWeights, num_classes: int) -> Weights:
    variant = find_variant(config.model.model_name)
    size = config.data.image_size or variant.image_size
    network = build_network(config.model, num_classes, (size, size, config.data.num_channels))
    return _load_into(network, foreign, config)


def _load_into(network: Network, foreign: ForeignWeights, config: Config) -> Weights:
    return load_into(network, network.init(config.run.seed), foreign, config.weights.init_min_loaded)


def _classes_of(found: Weights, foreign: ForeignWeights) -> int:
    """Return the number of classes of the file's head, where it is another than the network's; else 0."""
    head = found.network.block_names[-1]
    for tensor in found.loading.not_loaded:
        inside = tensor.name.split("/")
        if tensor.status == "replaced" and inside[1] == head and inside[-1] == "bias":
            return foreign.arrays[tensor.theirs].size
    return 0


def _input_form(config: Config, network: Network) -> InputForm:
    """Return how images become the input, as `InputForm.of_data` does for a dataset."""
    data = config.data
    mean, std = usual_statistics(network.input_hwc[2])
    return InputForm(
        image_hwc=network.input_hwc,
        normalization="per-channel" if data.normalization == "auto" else data.normalization,
        mean=tuple(data.pixel_mean or mean),
        std=tuple(data.pixel_std or std),
        shorter_side=data.eval_resize_size,
        antialias=data.resize_antialias,
        interpolation=data.eval_interpolation,
    )


def convert(weights: Weights, out: Path) -> Path:
    """Write weights from elsewhere as a checkpoint, which predicts, is validated and exported like that of a run."""
    refuse_replacing(out)
    if not out.absolute().parent.is_dir():
        raise CheckpointError(f"There is no directory {out.parent}.", remedy="Make it, or choose another --out.")
    assert weights.resolved is not None
    manifest = {
        "step": 0,
        "epoch": 0.0,
        "seed": weights.config.run.seed,
        "config": saved_form(weights.resolved),
        "class_names": list(weights.class_names),
        "input": weights.form.saved(),
        "elapsed_seconds": 0.0,
    }
    return save(out.absolute().parent, out.name, flat_weights(*weights.raw), manifest)
