"""Weights that are known by name: rows of a table with the network, the file, and how images become its input.

The rows are what timm and torchvision list of the networks that Headrace has; tools/list_weights.py writes them, and
checks each against the library's own network.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from headrace.data.sets.catalog import IMAGENET_MEAN, IMAGENET_STD

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
    num_channels: int = 3


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


@cache  # each of the 300 published weights has them
def imagenet_names() -> tuple[str, ...]:
    """Return the names of ImageNet's 1000 classes, in the order of their labels."""
    return tuple(name for _, name in _imagenet_lines())


@cache
def imagenet_numbers() -> tuple[str, ...]:
    """Return WordNet's numbers of the classes (n01440764), which name ImageNet's folders."""
    return tuple(number for number, _ in _imagenet_lines())


LIBRARIES = ("timm/", "torchvision/")
