"""Write src/headrace/weights/files: the table of weights that are known by name, and the names of ImageNet's classes.

    PYTHONPATH=src python tools/list_weights.py

Needs torch, torchvision and timm beside Headrace. The names, addresses, checksums and preprocessing are what those
libraries list. A row enters the table only if every tensor of their network has a place of the same shape in ours, and
none is left over; tests/weights/test_torch_parity.py compares what the networks compute. Weights without a classifier
are left out. For those that were evaluated on squashed images, the table says a centre crop of the same share.
"""

import csv
import math
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import timm  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import torchvision  # pyright: ignore[reportMissingImports]
from timm.models import get_pretrained_cfg, list_pretrained  # pyright: ignore[reportMissingImports]

from headrace.config.load import config_from
from headrace.config.networks import find_variant
from headrace.core.errors import ConfigError
from headrace.core.tree import flatten_named
from headrace.model.custom_block import weights_like
from headrace.model.network import Network
from headrace.model.zoo import build_network
from headrace.rows.networks import OPTION_FAMILIES
from headrace.weights.name_schemes import pair_names
from headrace.weights.name_tables import SCHEMES

FILES = Path(__file__).parents[1] / "src" / "headrace" / "weights" / "files"
COLUMNS = ("name", "network", "options", "source", "sha256", "image", "resize", "interpolation", "pixels", "classes")
PIXELS = {
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)): "imagenet",
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)): "half",
    ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)): "zero-one",
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)): "clip",
}
BOTH = ("timm", "torchvision")
# libraries, their architecture (a regular expression), our network (with the expression's groups), our other options;
# the dialect is the library's, except for timm's tf_ networks, which are defined as the reference's and Keras' are
NETWORKS = (
    (BOTH, r"resnet(18|26|34|50|101|152)(d?)", r"resnet\1\2", ""),
    (BOTH, r"(se)?resnext(50|101)_32x4d", r"\1resnext\2", ""),
    (BOTH, r"(se)?resnext(50|101)_32x(\d+)d", r"\1resnext\2", r"group_dim=\3"),
    (BOTH, r"(se)?resnext(101)_64x4d", r"\1resnext\2", "convolution_groups=64"),
    (BOTH, r"seresnet(18|34|50|101|152)", r"seresnet\1", ""),
    (BOTH, r"(?:tf_)?efficientnet_(b\d|lite\d|v2_[sml])", r"efficientnet_\1", ""),
    (("timm",), r"(?:tf_)?efficientnetv2_(s|m|l|b\d)", r"efficientnet_v2_\1", ""),
    (BOTH, r"mobilenet_?v2(?:_100)?", "mobilenet_v2", ""),
    (BOTH, r"mobilenet_?v3_(small|large)(?:_100)?", r"mobilenet_v3_\1", ""),
    (("torchvision",), r"squeezenet1_0", "squeezenet", ""),
    (BOTH, r"convnext_(tiny|small|base|large)", r"convnext_\1", ""),
    (("timm",), r"regnet([xy])_(\d{3})", r"regnet\1_\2", ""),
    (("torchvision",), r"regnet_([xy])_(\w+)", r"regnet_\1_\2", ""),
    (BOTH, r"densenet(121|169|201)", r"densenet\1", ""),
    (BOTH, r"vgg(11|13|16|19)_bn", r"vgg\1_bn", ""),
)


def ours(library: str, architecture: str) -> tuple[str, str] | None:
    """Return (network, options) of ours for an architecture of a library; None where there is none."""
    for libraries, pattern, network, options in NETWORKS:
        match = re.fullmatch(pattern, architecture)
        if library in libraries and match:
            try:
                variant = find_variant(match.expand(network))
            except ConfigError:
                return None
            has_dialect = variant.family in OPTION_FAMILIES["model_dialect"] and not architecture.startswith("tf_")
            dialect = f"model_dialect={library} " if has_dialect else ""
            return variant.name, (dialect + match.expand(options)).strip()
    return None


def build(network: str, options: str, image: int, classes: int) -> Network:
    """Return our network."""
    given = dict(option.split("=") for option in options.split())
    return build_network(config_from({"model_name": network, **given}).model, classes, (image, image, 3))


def theirs(library: str, architecture: str, classes: int) -> Any:
    """Return their network in evaluation mode."""
    if library == "timm":
        return timm.create_model(architecture, num_classes=classes).eval()
    return torchvision.models.get_model(architecture, num_classes=classes).eval()


def misfit(library: str, architecture: str, row: dict[str, Any]) -> str:
    """Return what does not fit between their tensors and ours, empty where all do."""
    net = build(row["network"], row["options"], row["image"], row["classes"])
    # torchvision's RegNets compute their widths with tensors, which have no numbers there.
    with nullcontext() if architecture.startswith("regnet_") else torch.device("meta"):
        state = theirs(library, architecture, row["classes"]).state_dict()
    wanted = {name: tuple(t.shape) for name, t in state.items() if not name.endswith("num_batches_tracked")}
    params, stats = weights_like(net)
    shapes = {name: tuple(t.shape) for name, t in flatten_named({"params": params, "stats": stats}).items()}
    best = "no scheme of this library"
    for scheme in (scheme for scheme in SCHEMES if scheme.name == library):
        pairs = pair_names(scheme, shapes)
        found = {p.theirs: p.dim_order.write(np.broadcast_to(0.0, shapes[p.ours])).shape for p in pairs.values()}
        if len(pairs) == len(shapes) and found == wanted:
            return ""
        wrong = [name for name in wanted if found.get(name) != wanted[name]]
        best = f"{len(shapes) - len(pairs)} of ours have no name, {len(wrong)} of theirs differ: {wrong[:3]}"
    return best


def timm_rows() -> Iterator[dict[str, Any]]:
    """Yield what timm lists."""
    for name in list_pretrained():
        cfg, architecture = get_pretrained_cfg(name), name.partition(".")[0]
        found = ours("timm", architecture)
        is_embedding = "clip" in name and "_ft_" not in name  # its last layer has no classes
        if found is None or not cfg.num_classes or is_embedding or cfg.hf_hub_filename or not cfg.hf_hub_id:
            continue
        if (cfg.mean, cfg.std) not in PIXELS:
            print(f"left out: timm/{name}: {cfg.mean} {cfg.std}", file=sys.stderr)
            continue
        image = cfg.input_size[1]
        yield {
            "name": f"timm/{name}",
            "architecture": architecture,
            "network": found[0],
            "options": found[1],
            "source": f"hf:{cfg.hf_hub_id if '/' in cfg.hf_hub_id.strip('/') else f'timm/{name}'}",
            "sha256": "",  # the hub says it
            "image": image,
            "resize": math.floor(image / cfg.crop_pct),
            "interpolation": cfg.interpolation,
            "pixels": PIXELS[cfg.mean, cfg.std],
            "classes": cfg.num_classes,
        }


def torchvision_rows() -> Iterator[dict[str, Any]]:
    """Yield what torchvision lists."""
    for architecture in torchvision.models.list_models(module=torchvision.models):
        found = ours("torchvision", architecture)
        for weights in torchvision.models.get_model_weights(architecture) if found else ():
            form = weights.transforms()
            assert found is not None
            (digits,) = re.findall(r"-([0-9a-f]{8,})\.pth$", weights.url)  # as torch.hub checks them
            yield {
                "name": f"torchvision/{weights}",
                "architecture": architecture,
                "network": found[0],
                "options": found[1],
                "source": weights.url,
                "sha256": digits,
                "image": form.crop_size[0],
                "resize": form.resize_size[0],
                "interpolation": form.interpolation.value,
                "pixels": PIXELS[tuple(form.mean), tuple(form.std)],
                "classes": len(weights.meta["categories"]),
            }


def write_table() -> None:
    """Write the table, with the rows that fit."""
    checked: dict[tuple[str, str, int], str] = {}
    rows = []
    for row in (*torchvision_rows(), *timm_rows()):
        library, architecture = row["name"].partition("/")[0], row.pop("architecture")
        key = library, architecture, row["classes"]
        if key not in checked:
            checked[key] = misfit(library, architecture, row)
            if checked[key]:
                print(f"left out: {library} {architecture}: {checked[key]}", file=sys.stderr)
        if not checked[key]:
            rows.append(row)
    with (FILES / "published.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} rows of {len({row['network'] + row['options'] for row in rows})} networks")


def write_classes() -> None:
    """Write WordNet's number and a short name of each class of ImageNet; names that two share are lengthened."""
    info = timm.data.ImageNetInfo("imagenet-1k")
    lemmas = [info.index_to_description(label, detailed=False).split(", ") for label in range(1000)]
    firsts = [lemma[0] for lemma in lemmas]
    names = [", ".join(lemma) if firsts.count(lemma[0]) > 1 and len(lemma) > 1 else lemma[0] for lemma in lemmas]
    numbers = [info.index_to_label_name(label) for label in range(1000)]
    pairs = list(zip(numbers, names, strict=True))
    lines = [f"{number} {name if names.count(name) == 1 else f'{name} ({number})'}\n" for number, name in pairs]
    (FILES / "imagenet_classes.txt").write_text("".join(lines))


if __name__ == "__main__":
    write_table()
    write_classes()
