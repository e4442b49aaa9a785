"""Publish a trained network: weights that were checked, config.json and a model card, in a folder or on the hub."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.files import write_atomic
from headrace.core.hub import HubRepo
from headrace.core.json_text import parse_json
from headrace.report.model_card import CARD_FILE, MARK, Card, card_text
from headrace.report.run_files import read_files
from headrace.run.exports.values import ExportOptions
from headrace.run.exports.write import export_model
from headrace.weights.hub_upload import Pushed, refuse_unable, upload
from headrace.weights.named import CONFIG_FILE, WEIGHTS_FILE, path_of
from headrace.weights.repository import repository_config, timm_architecture
from headrace.weights.weights import Weights, flat_weights


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Where a network is published, and what is said of it."""

    repo: HubRepo
    license: str = ""
    message: str = "Push a network trained with Headrace"
    private: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Written:
    """The files of a repository: timm's name of the network, where timm loads them, and what their check said."""

    folder: Path
    architecture: str
    remark: str

    @property
    def names(self) -> list[str]:
        """The names of the files."""
        return sorted(path.name for path in self.folder.iterdir())


def push(weights: Weights, run: Path | None, options: PushOptions) -> tuple[Written, Pushed]:
    """Write the files of a repository and send them; `run` is the directory of the run that made the weights."""
    refuse_unable()
    with tempfile.TemporaryDirectory(prefix="headrace-push-") as place:
        written = write_repository(weights, run, options, Path(place))
        marks = {CARD_FILE: MARK}
        return written, upload(Path(place), options.repo, options.message, options.private, marks)


def write_repository(weights: Weights, run: Path | None, options: PushOptions, folder: Path) -> Written:
    """Write the files of a repository into an empty folder."""
    _refuse_files(folder)
    architecture = timm_architecture(weights)
    own, theirs = ExportOptions(format="safetensors"), ExportOptions(format="torch-names", names="timm")
    exported = export_model(weights, folder / WEIGHTS_FILE, theirs if architecture else own)
    described = parse_json(exported.description.read_bytes())
    exported.description.unlink()  # its content is part of config.json
    config = repository_config(weights, described, architecture)
    card = Card(
        repository=options.repo.name,
        described=described,
        num_parameters=sum(array.size for name, array in flat_weights(*weights.raw).items() if name[:6] == "params"),
        architecture=architecture,
        license=options.license,
        files=read_files(run, others=()) if run is not None else None,
    )
    write_atomic(folder / CONFIG_FILE, (json.dumps(config, indent=1, ensure_ascii=False) + "\n").encode())
    write_atomic(folder / CARD_FILE, card_text(card).encode())
    return Written(folder=folder, architecture=architecture, remark=exported.remark)


def run_of(name: str, weights: Weights) -> Path | None:
    """Return the directory of the run that made the weights, None where there is none."""
    places = [path_of(name), *([weights.path.parent.parent] if weights.path else [])]
    return next((place for place in places if (place / "config.json").is_file()), None)


def _refuse_files(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already, and not an empty folder.", remedy="Choose another --out.")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"Cannot make {folder}: {error.strerror}.", remedy="Choose another --out.") from None
