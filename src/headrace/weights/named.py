"""Weights by name: published ones, files of the Hugging Face hub and addresses, which are downloaded if necessary.

A name is a path, a row of the table (`timm/...`, `torchvision/...`), a repository of the hub (`hf:OWNER/NAME`) or the
address of a file. What exists as a path is a path.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.config.load import network_options
from headrace.core.addresses import address_digits, whole_address
from headrace.core.download import Remote, download, terminal_progress
from headrace.core.errors import ConfigError, DownloadError, nearest
from headrace.core.files import cache_directory, path_inside
from headrace.core.hub import HubRepo, hub_file, is_file_name
from headrace.core.json_text import parse_json
from headrace.core.local_path import WEB, is_address, scheme_of
from headrace.core.stored_copy import copy_of
from headrace.core.tensor_file import read_note
from headrace.data.sets.catalog import IMAGENET_MEAN, IMAGENET_STD
from headrace.weights.published import (
    IMAGENET_CLASSES,
    LIBRARIES,
    Published,
    WeightFacts,
    imagenet_names,
    network_of,
    published_file,
    published_weights,
)

_HUB = ("hf:", "hf-hub:", "hf_hub:")
_ADDRESS = ("http://", "https://")
CONFIG_FILE, OWN = "config.json", "headrace"  # the description in a repository, and our part of it
WEIGHTS_FILE = "model.safetensors"
_FILES = (WEIGHTS_FILE, "pytorch_model.bin")  # of a repository, the better one first
_MAX_CONFIG_BYTES = 16 << 20
_LIST = "`headrace models --weights` lists the known names; others are a path, hf:OWNER/NAME or an address."


def is_path(name: str) -> bool:
    """Say whether a name is a path, be it of a file that is not there."""
    return is_stored(name) or Path(name).expanduser().exists() or not name.startswith((*_HUB, *_ADDRESS, *LIBRARIES))


def is_stored(name: str) -> bool:
    """Say whether a name is the address of a store: others are downloaded, or are of the hub."""
    return is_address(name) and scheme_of(name) not in WEB[:3]


def path_of(name: str) -> Path:
    """Return a path as it is; of a file, checkpoint or run in a store its copy on this machine."""
    return copy_of(name) if is_stored(name) else Path(name).expanduser()


def find_file(name: str) -> Path:
    """Return the file, checkpoint or run that a name means; it is downloaded if it has to be."""
    if is_path(name):
        return path_of(name)
    row = published_weights().get(name)
    if row is not None and row.file:
        return _download_row(row)
    repo = _repository(row.source if row else name)
    if repo is not None:
        return hub_file(repo, _FILES)
    return _download_address(name)


def facts_of(name: str) -> WeightFacts | None:
    """Return what comes with weights: their network, its input and its classes; None where nothing is known.

    Of a repository of the hub, the description is downloaded. A name that cannot be right is an error.
    """
    if is_path(name):
        path = path_of(name)
        if not path.exists() and path.name == name and not path.suffix:  # a word, such as imagenet
            raise ConfigError(f"There are no weights {name}: no file, and no known name.", remedy=_remedy_for(name))
        return _facts_of_file(path)
    row = published_weights().get(name)
    if row is not None:
        return row.facts
    repo = _repository(name)
    if repo is not None:
        return _facts_of_repository(repo)
    known = published_file(Remote(urls=(name,)).name)
    return known.facts if known else None


def _remedy_for(word: str) -> str:
    """Return what is named instead of a word: the weights of the network that it names, else an example."""
    network = (network_of(word) or {}).get("model_name")
    names = [row.name for row in published_weights().values() if network and row.facts.network["model_name"] == network]
    if names:
        return f"Of {word} there are: {', '.join(names[:4])}. {_LIST}"
    return f"Weights of ImageNet have a name, such as timm/resnet50.a1_in1k. {_LIST}"


def _repository(name: str) -> HubRepo | None:
    """Return the repository that a name means; None for an address of a file."""
    for prefix in _HUB:
        if name.startswith(prefix):
            return _guessed(HubRepo.parse(name.removeprefix(prefix)))
    if name.startswith(_ADDRESS):
        return None
    architecture = name.removeprefix("timm/").partition(".")[0].partition("@")[0]
    if name.startswith("timm/") and network_of(architecture) is not None:
        return _guessed(HubRepo.parse(name))  # newer weights than the table has, of a network that it has
    guess = nearest(name, published_weights())
    remedy = f"Did you mean {guess}? " if guess else ""
    raise ConfigError(f"There are no known weights {name}.", remedy=remedy + _LIST)


def _guessed(repo: HubRepo) -> HubRepo:
    """Return the repository with a guess for messages, where its name looks like one of the table's and is not."""
    known = published_weights()
    guess = nearest(repo.name, known) if repo.name.startswith(LIBRARIES) and repo.name not in known else None
    return replace(repo, guess=f"Did you mean {guess}? ") if guess else repo


def _download_row(row: Published) -> Path:
    """Return the file of a row: from torch's cache, from ours, or downloaded."""
    torch_home = os.environ.get("TORCH_HOME") or cache_directory("torch")
    remote = Remote(urls=(row.source,), checksum=f"sha256:{row.sha256}")
    for place in (Path(torch_home) / "hub" / "checkpoints" / row.file, _cache() / row.file):
        if place.is_file() and remote.is_right(place):
            return place
    return download(remote, _cache() / row.file, partial(terminal_progress(), row.file))


def _download_address(name: str) -> Path:
    """Download the file at an address; `#sha256=DIGITS` after it says its checksum."""
    address, _, fragment = name.partition("#")
    digits = fragment.removeprefix("sha256=").lower()
    if fragment and not re.fullmatch(r"[0-9a-f]{8,64}", digits):
        raise ConfigError(f"{name} ends in #{fragment}.", rule="It is #sha256= and 8 to 64 digits, or nothing.")
    remote = Remote(urls=(address,))
    known = published_file(remote.name)
    checksum = digits or (known.sha256 if known else "")
    place = path_inside(_cache() / address_digits(address), _file_name(remote.name))
    url = whole_address(address)
    if url is None and not place.is_file():
        raise DownloadError(
            f"{name} was given with a query or a password, which is not stored, and its file is not in the cache.",
            remedy="Give the whole address again with --weights, or the file itself.",
        )
    remote = Remote(urls=(url or address,), checksum=f"sha256:{checksum}" if checksum else "")
    return download(remote, place, partial(terminal_progress(), remote.name))


def _file_name(name: str) -> str:
    """Return the last part of an address as the name of a file; one that cannot be one is `file`."""
    return name if is_file_name(name) and not name.startswith(".") else "file"


def _cache() -> Path:
    return cache_directory() / "weights"


def _facts_of_file(path: Path) -> WeightFacts | None:
    """Return what is known of a file: by its published name, or from what Headrace wrote into it or beside it."""
    known, beside = published_file(path.name), path.with_name(f"{path.name}.json")
    if known is not None or not path.is_file():
        return known.facts if known else None
    try:
        is_safetensors = path.suffix == ".safetensors"
        return _facts_of_note(read_note(path) if is_safetensors else parse_json(beside.read_bytes(), _MAX_CONFIG_BYTES))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # not written by Headrace; what is wrong is said on loading


def _facts_of_note(note: Any) -> WeightFacts:
    """Return what a description says that Headrace wrote."""
    height, width, channels = note["image_hwc"]
    data = {"image_size": height, "eval_resize_size": note["resize_shorter_side"]} if height == width else {}
    data |= {"eval_interpolation": note.get("interpolation", "bilinear")}
    data |= {} if note.get("antialias", True) else {"resize_antialias": False}
    names = tuple(map(str, note["class_names"]))
    options = {name: value for name, value in note.get("options", {}).items() if name in network_options()}
    return WeightFacts(
        network={"model_name": note["model"], "model_dialect": note["dialect"], **options},
        data=data | pixel_options(note),
        num_classes=len(names),
        class_names=names,
        num_channels=int(channels),
    )


def pixel_options(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that normalise pixels as a description of a network's input says."""
    if form["normalization"] != "per-channel":
        return {"normalization": form["normalization"]}
    return {"pixel_mean": tuple(form["mean"]), "pixel_std": tuple(form["std"])}


def _facts_of_repository(repo: HubRepo) -> WeightFacts | None:
    """Return what the description in a repository says: one that Headrace pushed, or one of timm's."""
    path = hub_file(repo, (CONFIG_FILE,))
    try:
        config: Any = parse_json(path.read_bytes(), _MAX_CONFIG_BYTES)
        # Older descriptions have no part of that name: everything is on one level.
        form: Any = config.get("pretrained_cfg", config)
        architecture, own = config.get("architecture"), config.get(OWN)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"config.json of hf:{repo} cannot be read: {error}.") from None
    if own is not None:
        try:
            return _facts_of_note(own)
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"config.json of hf:{repo} is not as Headrace writes it: {error!r}.") from None
    network = network_of(str(architecture))
    if network is None:
        what = f"the network {architecture}" if architecture else "no network of timm"
        kinds = ", ".join(map(str, config.get("architectures") or ()))
        raise ConfigError(
            f"hf:{repo} describes {what}{f' ({kinds})' if kinds else ''}, which Headrace does not have.",
            rule="Those of timm's networks (`headrace models --weights`) and those of `headrace push` are read.",
            remedy="If its file fits a network of `headrace models`, download it and give --weights FILE --model NAME.",
        )
    try:
        return _facts_of_description(network, config, form)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"config.json of hf:{repo} is not as timm writes it: {error!r}.") from None


def _facts_of_description(network: Mapping[str, Any], config: Any, form: Any) -> WeightFacts:
    size = int(form.get("input_size", (3, 224, 224))[1])
    count = int(config.get("num_classes", form.get("num_classes", 0)))
    labels = config.get("label_names") or form.get("label_names") or config.get("labels") or ()
    if isinstance(labels, dict):
        labels = [labels[key] for key in sorted(labels, key=int)]
    texts = config.get("label_descriptions") or form.get("label_descriptions") or {}
    names = tuple(str(texts.get(label, label)).partition(",")[0] for label in labels)
    if len(names) != count or len(set(names)) != count:
        names = tuple(map(str, labels)) if len(labels) == count else ()
    if not names and count == IMAGENET_CLASSES:
        names = imagenet_names()
    usual = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    mean, std = ([float(value) for value in form.get(key, default)] for key, default in usual.items())
    data = {
        "image_size": size,
        "eval_resize_size": int(size / float(form.get("crop_pct", 0.875))),
        "eval_interpolation": "bilinear" if form.get("interpolation") == "bilinear" else "bicubic",
    }
    is_plain = not any(mean) and all(value == 1 for value in std)
    pixels = {"normalization": "per-channel" if not is_plain else "zero-one", "mean": mean, "std": std}
    return WeightFacts(network=network, data=data | pixel_options(pixels), num_classes=count, class_names=names)
