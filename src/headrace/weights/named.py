"""Weights by name: published ones, files of the Hugging Face hub and addresses, which are downloaded if necessary."""

import csv
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.config.load import network_options
from headrace.core.addresses import address_digits, whole_address
from headrace.core.download import Head, Remote, ask, download, terminal_progress
from headrace.core.errors import ConfigError, DownloadError, nearest
from headrace.core.files import cache_directory, parse_json, path_inside, write_atomic
from headrace.core.tensor_file import read_note
from headrace.data.sets.catalog import IMAGENET_MEAN, IMAGENET_STD

# Weights that are known by name: rows of a table with the network, the file, and how images become its input.
#
# The rows are what timm and torchvision list of the networks that Headrace has; tools/list_weights.py writes them, and
# checks each against the library's own network.


FILES = Path(__file__).parent / "files"
IMAGENET_CLASSES = 1000
_PIXELS: Mapping[str, Mapping[str, Any]] = {
    "imagenet": {"pixel_mean": IMAGENET_MEAN, "pixel_std": IMAGENET_STD},
    "half": {"pixel_mean": (0.5, 0.5, 0.5), "pixel_std": (0.5, 0.5, 0.5)},
    "clip": {
        "pixel_mean": (0.48145466, 0.4578275, 0.40821073),
        "pixel_std": (0.26862954, 0.26130258, 0.27577711),
    },
    "zero-one": {"normalization": "zero-one"},
}


@dataclass(frozen=True, kw_only=True)
class WeightFacts:
    """What comes with weights: options of the network and of its input, and the classes where they are known."""

    network: Mapping[str, Any]  # options of the section model
    data: Mapping[str, Any] = field(default_factory=dict)  # image_size, eval_resize_size, pixel_mean, ...
    num_classes: int = 0  # 0: not known
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the table."""

    name: str
    facts: WeightFacts
    source: str  # hf:OWNER/NAME, or the address of a file
    sha256: str  # its first digits; empty where the server says it

    @property
    def file(self) -> str:
        """Return the name of the file, where the source is one."""
        return "" if self.source.startswith("hf:") else self.source.rpartition("/")[2]

    @property
    def architecture(self) -> str:
        """Return the library's name of the network, of timm's rows."""
        library, _, rest = self.name.partition("/")
        return rest.partition(".")[0] if library == "timm" else ""


@cache
def published_weights() -> Mapping[str, Published]:
    """Return the table, by name."""
    with (FILES / "published.csv").open(newline="") as file:
        return {row["name"]: _row(row) for row in csv.DictReader(file)}


def _row(row: Mapping[str, str]) -> Published:
    options = dict(option.split("=") for option in row["options"].split())
    classes = int(row["classes"])
    data = {
        "image_size": int(row["image"]),
        "eval_resize_size": int(row["resize"]),
        "eval_interpolation": row["interpolation"],
        **_PIXELS[row["pixels"]],
    }
    facts = WeightFacts(
        network={"model_name": row["network"], **options},
        data=data,
        num_classes=classes,
        class_names=imagenet_names() if classes == IMAGENET_CLASSES else (),
    )
    return Published(name=row["name"], facts=facts, source=row["source"], sha256=row["sha256"])


@cache
def published_file(name: str) -> Published | None:
    """Return the row whose file has this name."""
    return next((row for row in published_weights().values() if row.file == name), None) if name else None


@cache
def network_of(architecture: str) -> Mapping[str, Any] | None:
    """Return our network, as options, for an architecture of timm."""
    rows = (row for row in published_weights().values() if row.architecture == architecture)
    return next((row.facts.network for row in rows), None)


@cache
def _imagenet_lines() -> tuple[tuple[str, str], ...]:
    lines = (FILES / "imagenet_classes.txt").read_text().splitlines()
    return tuple((line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines)


def imagenet_names() -> tuple[str, ...]:
    """Return the names of ImageNet's 1000 classes, in the order of their labels."""
    return tuple(name for _, name in _imagenet_lines())


def imagenet_numbers() -> tuple[str, ...]:
    """Return WordNet's numbers of the classes (n01440764), which name ImageNet's folders."""
    return tuple(number for number, _ in _imagenet_lines())


# Files of model repositories on the Hugging Face hub, by plain HTTP, kept in the hub's own cache.
#
# The package huggingface_hub is not needed (24 MB with what it installs, 0.4 s to import), but a file that it, timm or
# transformers downloaded is found, and they find ours: CACHE/models--OWNER--NAME with blobs, refs and snapshots. The
# variables that it reads mean the same here: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN,
# HF_TOKEN_PATH. A cached file is used without asking the server.


_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REPO = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class HubRepo:
    """A model repository at a revision: a branch, a tag or a commit."""

    name: str  # OWNER/NAME
    revision: str = "main"

    @staticmethod
    def parse(text: str) -> "HubRepo":
        """Return the repository that `OWNER/NAME` or `OWNER/NAME@REVISION` means."""
        name, _, revision = text.partition("@")
        try:
            if not _REPO.fullmatch(name) or ".." in text or not re.fullmatch(r"[\w./-]*", revision):
                raise ValueError
            # Both become paths in the cache.
            path_inside(Path(), name)
            path_inside(Path(), revision or "main")
            path_inside(Path(), _folder_of(name))
        except ValueError:
            raise DownloadError(
                f"hf:{text[:200]} names no repository.", rule="It is hf:OWNER/NAME, or hf:OWNER/NAME@REVISION."
            ) from None
        return HubRepo(name=name, revision=revision or "main")

    def __str__(self) -> str:
        return self.name if self.revision == "main" else f"{self.name}@{self.revision}"

    @property
    def folder(self) -> Path:
        """Return where the cache keeps it."""
        return hub_cache() / _folder_of(self.name)


def _folder_of(name: str) -> str:
    return f"models--{name.replace('/', '--')}"


def hub_cache() -> Path:
    """Return the directory of the hub's cache."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named).expanduser() if named else _home() / "hub"


def _home() -> Path:
    named = os.environ.get("HF_HOME")
    return Path(named).expanduser() if named else cache_directory("huggingface")


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _authorization() -> tuple[tuple[str, str], ...]:
    """Return the header with the user's token, if there is one: in the environment, or stored by `hf auth login`."""
    token = os.environ.get("HF_TOKEN", "")
    if not token:
        with suppress(OSError, UnicodeDecodeError):
            token = Path(os.environ.get("HF_TOKEN_PATH") or _home() / "token").expanduser().read_text()
    return (("Authorization", f"Bearer {token.strip()}"),) if token.strip() else ()


def hub_file(repo: HubRepo, names: Sequence[str]) -> Path:
    """Return the path of the first of these files that the repository has; download it unless it is cached."""
    for name in names:
        if (cached := _cached(repo, name)) is not None:
            return cached
    if _is_offline():
        raise DownloadError(
            f"{' or '.join(names)} of hf:{repo} is not in {hub_cache()}, and HF_HUB_OFFLINE is set.",
            remedy=_guess(repo) + "Unset it for one command, or copy the cache of a machine that has the file.",
        )
    for name in names:
        # In one part, as the hub expects it: a revision such as refs/pr/1 has slashes.
        url = f"{_endpoint()}/{repo.name}/resolve/{quote(repo.revision, safe='')}/{name}"
        try:
            head = ask(url, _authorization())
        except DownloadError as error:
            raise DownloadError(error.problem, rule=error.rule, remedy=_guess(repo) + error.remedy) from None
        if head.status == 404 and head.headers.get("X-Error-Code") == "EntryNotFound":
            continue
        _refuse(repo, name, head)
        return _fetch(repo, name, url, head)
    raise DownloadError(
        f"hf:{repo} has no {' or '.join(names)}.", remedy="Give the address of its file of weights instead."
    )


def _cached(repo: HubRepo, name: str) -> Path | None:
    commit = repo.revision
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (repo.folder / "refs" / repo.revision).read_text().strip()
        except OSError:
            return None
    path = repo.folder / "snapshots" / commit / name
    return path if _COMMIT.fullmatch(commit) and path.is_file() else None


def _guess(repo: HubRepo) -> str:
    """Return 'Did you mean X? ' for a name that looks like one of the table's and is not, else nothing."""
    known = published_weights()
    guess = nearest(repo.name, known) if repo.name.startswith(_LIBRARIES) and repo.name not in known else None
    return f"Did you mean {guess}? " if guess else ""


def _refuse(repo: HubRepo, name: str, head: Head) -> None:
    """Refuse an answer that is not about this file."""
    said = head.headers.get("X-Error-Message", "").rstrip(".")
    if head.status in (401, 403, 404):
        has_token = bool(_authorization())
        raise DownloadError(
            f"{_endpoint()} does not give {name} of hf:{repo}: it answers {head.status}{f' ({said})' if said else ''}.",
            rule="The repository does not exist, or it is private or gated and the token does not allow it."
            if has_token
            else "The repository does not exist, or it is private or gated and needs a token.",
            remedy=_guess(repo)
            + (
                "Check the name, or accept its conditions on its page."
                if has_token
                else "Check the name, or set HF_TOKEN."
            ),
        )
    commit, etag = head.headers.get("X-Repo-Commit", ""), _etag(head)
    if head.status >= 400 or not _COMMIT.fullmatch(commit) or not _is_file_name(etag):
        raise DownloadError(
            f"{_endpoint()} does not answer as a Hugging Face hub: {head.status}, commit {commit or 'unknown'}.",
            remedy="Check HF_ENDPOINT and the proxy variables.",
        )


def _is_file_name(text: str) -> bool:
    """Say whether what a server sends can be the name of a file in the cache."""
    try:
        path_inside(Path(), text)
    except ValueError:
        return False
    return re.fullmatch(r"[\w.-]+", text) is not None


def _etag(head: Head) -> str:
    """Return what identifies the content: the SHA-256 of a large file, the git hash of a small one."""
    etag = head.headers.get("X-Linked-Etag") or head.headers.get("ETag") or ""
    return etag.removeprefix("W/").strip('"')


def _fetch(repo: HubRepo, name: str, url: str, head: Head) -> Path:
    """Download a file into the cache: first its content, then the names that lead to it."""
    commit, etag = head.headers["X-Repo-Commit"], _etag(head)
    checksum = f"sha256:{etag}" if _SHA256.fullmatch(etag) else f"git:{etag}" if _COMMIT.fullmatch(etag) else ""
    remote = Remote(urls=(url,), checksum=checksum, headers=_authorization())
    blob = download(remote, repo.folder / "blobs" / etag, partial(terminal_progress(), f"{repo.name}/{name}"))
    path = repo.folder / "snapshots" / commit / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        link = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        try:
            link.symlink_to(Path("..", "..", "blobs", etag))
            link.replace(path)  # in one step: another process may be doing the same
        except OSError:  # a file system without symbolic links: huggingface_hub, too, moves the file there then
            blob.replace(path)
        if commit != repo.revision:
            ref = repo.folder / "refs" / repo.revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(ref, commit.encode())
    except OSError as error:
        raise DownloadError(
            f"{path} cannot be written: {error.strerror or error}.", remedy="Choose another directory with HF_HOME."
        ) from None
    return path


# A name is a path, a row of the table (`timm/...`, `torchvision/...`), a repository of the hub (`hf:OWNER/NAME`) or the
# address of a file. What exists as a path is a path.


_HUB = ("hf:", "hf-hub:", "hf_hub:")
_ADDRESS = ("http://", "https://")
_LIBRARIES = ("timm/", "torchvision/")
_FILES = ("model.safetensors", "pytorch_model.bin")  # of a repository, the better one first
_MAX_CONFIG_BYTES = 16 << 20
_LIST = "`headrace models --weights` lists the known names; others are a path, hf:OWNER/NAME or an address."


def is_path(name: str) -> bool:
    """Say whether a name is a path, be it of a file that is not there."""
    return Path(name).expanduser().exists() or not name.startswith((*_HUB, *_ADDRESS, *_LIBRARIES))


def find_file(name: str) -> Path:
    """Return the file, checkpoint or run that a name means; it is downloaded if it has to be."""
    if is_path(name):
        return Path(name).expanduser()
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
        return _facts_of_file(Path(name).expanduser())
    row = published_weights().get(name)
    if row is not None:
        return row.facts
    repo = _repository(name)
    if repo is not None:
        return _facts_of_repository(repo)
    known = published_file(Remote(urls=(name,)).name)
    return known.facts if known else None


def _repository(name: str) -> HubRepo | None:
    """Return the repository that a name means; None for an address of a file."""
    for prefix in _HUB:
        if name.startswith(prefix):
            return HubRepo.parse(name.removeprefix(prefix))
    if name.startswith(_ADDRESS):
        return None
    architecture = name.removeprefix("timm/").partition(".")[0].partition("@")[0]
    if name.startswith("timm/") and network_of(architecture) is not None:
        return HubRepo.parse(name)  # newer weights than the table has, of a network that it has
    guess = nearest(name, published_weights())
    remedy = f"Did you mean {guess}? " if guess else ""
    raise ConfigError(f"There are no known weights {name}.", remedy=remedy + _LIST)


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
    return name if _is_file_name(name) and not name.startswith(".") else "file"


def _cache() -> Path:
    return cache_directory() / "weights"


def _facts_of_file(path: Path) -> WeightFacts | None:
    """Return what is known of a file: by its published name, or from what Headrace wrote into it or beside it."""
    known, beside = published_file(path.name), path.with_name(f"{path.name}.json")
    if known is not None or not path.is_file():
        return known.facts if known else None
    try:
        is_safetensors = path.suffix == ".safetensors"
        note: Any = read_note(path) if is_safetensors else parse_json(beside.read_bytes(), _MAX_CONFIG_BYTES)
        height, width, _ = note["image_hwc"]
        data = {"image_size": height, "eval_resize_size": note["resize_shorter_side"]} if height == width else {}
        data |= {"eval_interpolation": note.get("interpolation", "bilinear")}
        names = tuple(map(str, note["class_names"]))
        options = {name: value for name, value in note.get("options", {}).items() if name in network_options()}
        network = {"model_name": note["model"], "model_dialect": note["dialect"], **options}
        return WeightFacts(network=network, data=data | pixel_options(note), num_classes=len(names), class_names=names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # not written by Headrace; what is wrong is said on loading


def pixel_options(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that normalise pixels as a description of a network's input says."""
    if form["normalization"] != "per-channel":
        return {"normalization": form["normalization"]}
    return {"pixel_mean": tuple(form["mean"]), "pixel_std": tuple(form["std"])}


def _facts_of_repository(repo: HubRepo) -> WeightFacts | None:
    """Return what the description in a repository of timm's says."""
    path = hub_file(repo, ("config.json",))
    try:
        config: Any = parse_json(path.read_bytes(), _MAX_CONFIG_BYTES)
        # Older descriptions have no part of that name: everything is on one level.
        form: Any = config.get("pretrained_cfg", config)
        architecture = config.get("architecture")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"config.json of hf:{repo} cannot be read: {error}.") from None
    network = network_of(str(architecture))
    if network is None:
        what = f"the network {architecture}" if architecture else "no network of timm"
        kinds = ", ".join(map(str, config.get("architectures") or ()))
        raise ConfigError(
            f"hf:{repo} describes {what}{f' ({kinds})' if kinds else ''}, which Headrace does not have.",
            rule="Repositories of timm's networks are read; `headrace models --weights` lists those.",
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
