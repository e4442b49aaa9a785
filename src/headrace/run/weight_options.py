"""The options that come with weights: of the network that they are of, and of the images that it expects."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.checkpoint.store import MANIFEST_FILE, list_checkpoints, parse_manifest
from headrace.config.load import from_saved, network_changes
from headrace.core.errors import ConfigError
from headrace.core.json_text import parse_json
from headrace.data.decoding.crop import usual_shorter_side
from headrace.weights.named import facts_of, is_path, path_of, pixel_options
from headrace.weights.published import WeightFacts


def weight_options(name: str) -> Mapping[str, Any]:
    """Return the options that come with weights of a name; those of a run are in its newest checkpoint."""
    path = path_of(name) if is_path(name) else Path(name).expanduser()
    if path.is_file() and (path.parent / MANIFEST_FILE).is_file():  # the tensors of a checkpoint, named as a file
        path = path.parent
    facts = _facts_of_run(path) if path.is_dir() else facts_of(name)
    return {**facts.network, **facts.data} if facts else {}


def _facts_of_run(path: Path) -> WeightFacts | None:
    places = [path, *reversed(list_checkpoints(path)), *reversed(list_checkpoints(_checkpoints_of(path)))]
    file = next((place / MANIFEST_FILE for place in places if (place / MANIFEST_FILE).is_file()), None)
    manifest = parse_manifest(file.read_bytes())[0] if file else None
    try:
        saved, form = (manifest or {})["config"], (manifest or {})["input"]
        model = from_saved(saved).config.model
    except (KeyError, ConfigError):  # too old, or given by code
        return None
    size, shorter = form["image_hwc"][0], form["shorter_side"]
    data = {"image_size": size, "eval_resize_size": shorter or usual_shorter_side(size)}
    data |= {"eval_interpolation": form.get("interpolation", "bilinear")}
    network = {"model_name": model.model_name, **network_changes(model)}
    return WeightFacts(network=network, data=data | pixel_options(form))


def _checkpoints_of(run: Path) -> Path:
    """Return the directory of a run's checkpoints, read as plain JSON: reading options should not load JAX."""
    try:
        chosen = parse_json((run / "config.json").read_bytes())["values"]["checkpoint_dir"]
    except (OSError, ValueError, LookupError, TypeError):
        chosen = None
    return Path(chosen) if isinstance(chosen, str) else run / "checkpoints"
