"""The description of a network in a repository of the Hugging Face hub: config.json, for Headrace and for timm.

Its part `headrace` is what an export says of its input and classes. Where timm has the network too, the rest is what
timm writes, and the weights have timm's names: `timm.create_model("hf_hub:OWNER/NAME", pretrained=True)` loads it.
"""

from collections.abc import Mapping
from typing import Any

from headrace.config.load import NO_RECIPE, network_changes, resolve_code
from headrace.config.schema import ModelSection
from headrace.weights.input_form import InputForm
from headrace.weights.named import OWN
from headrace.weights.published import published_weights
from headrace.weights.weights import Weights

# What a network computes after training does not depend on these.
_OF_TRAINING = ("block_survival_prob", "dropout_rate", "zero_init_residual")
_NO_STATISTICS = ([0.0], [1.0])  # of pixels from 0 to 1, which is normalization zero-one


def timm_architecture(weights: Weights) -> str:
    """Return timm's name of the network where timm computes the same of the same input, else an empty text."""
    form, model = weights.form, weights.config.model
    height, width, channels = form.image_hwc
    if height != width or channels != 3 or form.normalization not in ("per-channel", "zero-one"):
        return ""
    if "network" in weights.by_code or not form.antialias:
        return ""
    wanted = _shape_of(model)
    rows = (row for row in published_weights().values() if row.architecture)
    return next((row.architecture for row in rows if _shape_of(_model_of(row.facts.network)) == wanted), "")


def repository_config(weights: Weights, described: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the content of config.json; `described` is what the export of the weights said of them."""
    own = {OWN: dict(described)}
    if not architecture:
        return {"library_name": OWN, **own}
    form, names = weights.form, list(weights.class_names)
    mean, std = (form.mean, form.std) if form.normalization == "per-channel" else _NO_STATISTICS
    size = form.image_hwc[0]
    return {
        "architecture": architecture,
        "num_classes": len(names),
        "label_names": names,
        "pretrained_cfg": {
            "input_size": [3, size, size],
            "fixed_input_size": False,
            "interpolation": form.interpolation,
            "crop_pct": crop_share(form),
            "crop_mode": "center",
            "mean": [*mean] * (3 // len(mean)),
            "std": [*std] * (3 // len(std)),
            "num_classes": len(names),
        },
        **own,
    }


def crop_share(form: InputForm) -> float:
    """Return the share of the resized image that is cropped, from which timm gets the shorter side, rounded down."""
    size, shorter = form.image_hwc[0], form.resized_side
    share = size / shorter
    return share if int(size / share) == shorter else size / (shorter + 0.5)


def _model_of(network: Mapping[str, Any]) -> ModelSection:
    return resolve_code({"dataset": "auto", **network}, NO_RECIPE).config.model


def _shape_of(model: ModelSection) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return what tells a network from others: its name and the options that change what it computes."""
    changes = network_changes(model)
    return model.model_name, tuple((name, repr(changes[name])) for name in sorted(changes) if name not in _OF_TRAINING)
