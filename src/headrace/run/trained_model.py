"""A trained network with what it takes to use it (weights, input, classes), and the result of the run that made it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.checkpoint.saver import BestCheckpoints
from headrace.checkpoint.store import (
    MANIFEST_FILE,
    checkpoint_name,
    list_checkpoints,
    load,
    newest_good,
    parse_manifest,
    restore_tree,
    step_of,
)
from headrace.config.load import network_changes
from headrace.config.schema import Config
from headrace.core.errors import CheckpointError, DataError
from headrace.core.tree import PyTree
from headrace.core.units import format_duration, format_list, format_percent
from headrace.data.augmentation.preprocess import Preprocess
from headrace.data.dataset import DataInfo, describe_dataset
from headrace.data.decoding.crop import uncropped_side, usual_shorter_side
from headrace.engine.state import State
from headrace.model.context import Ctx
from headrace.model.custom_block import weights_like
from headrace.model.network import Network
from headrace.model.zoo import build_network
from headrace.report.curve_svg import draw_run
from headrace.report.curves import Curves
from headrace.report.run_files import best_report
from headrace.report.run_summary import read_summary
from headrace.run.directory import checkpoints_of, custom_parts, from_saved, parts_of
from headrace.telemetry.model_verdict import never_recognized
from headrace.telemetry.records import (
    Record,
    RunEnd,
    TrainRecord,
    ValidationRecord,
    best_validation,
    monitor_of,
    number_fields,
    read_records,
)
from headrace.weights.published import IMAGENET_CLASSES, imagenet_names, imagenet_numbers

# Everything comes from a checkpoint. The dataset is not needed: its form was saved with the weights.


RAW, EMA, AUTO = "raw", "ema", "auto"
_LISTED = 5  # names of classes in a message


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A network, ready for evaluation."""

    checkpoint: Path
    weights: str  # raw, ema, or the label of an average
    step: int
    epoch: float
    config: Config
    network: Network
    params: PyTree  # float32
    stats: PyTree
    class_names: tuple[str, ...]
    preprocess: Preprocess
    shorter_side: int | None  # of a resized image, before the centre is cropped; None: the size x 256 / 224
    antialias: bool
    interpolation: str = "bilinear"
    names_dataset: bool = True  # the options name the run's dataset; False: code gave its images

    def context(self, compute_dtype: jax.typing.DTypeLike = jnp.float32) -> Ctx:
        """Return the conditions under which the network is applied outside of a run."""
        config = self.config
        return Ctx(
            train=False,
            compute_dtype=compute_dtype,
            stable_norm=config.model.stable_norm,
            matmul_precision=config.numerics.matmul_precision if compute_dtype == jnp.float32 else "default",
        )

    def describe(self) -> dict[str, Any]:
        """Return the description that is exported with the weights, as plain values."""
        spec = self.preprocess
        return {
            "model": self.network.name,
            "dialect": self.config.model.model_dialect,
            "options": network_changes(self.config.model),
            "image_hwc": list(self.network.input_hwc),
            "normalization": spec.normalization,
            **({"mean": list(spec.mean), "std": list(spec.std)} if spec.normalization == "per-channel" else {}),
            "resize_shorter_side": self.shorter_side or usual_shorter_side(self.network.input_hwc[0]),
            "interpolation": self.interpolation,
            "class_names": list(self.class_names),
            "output": "softmax of the logits",
            "checkpoint": self.checkpoint.name,
            "weights": self.weights,
            "step": self.step,
            "epoch": self.epoch,
        }


def input_form(info: DataInfo, config: Config) -> dict[str, Any]:
    """Return how images become the network's input, for a checkpoint's manifest."""
    size = info.image_hwc[0]
    return {
        "image_hwc": list(info.image_hwc),
        "normalization": info.normalization,
        "mean": list(info.channel_mean),
        "std": list(info.channel_std),
        "shorter_side": config.data.eval_resize_size or uncropped_side(size),
        "antialias": config.data.resize_antialias,
        "interpolation": config.data.eval_interpolation,
    }


def refuse_other_classes(info: DataInfo, num_classes: int, class_names: Sequence[str]) -> None:
    """Refuse data for a network that was trained on other classes, as far as their names are known."""
    rule = "Labels mean the same classes in training and evaluation."
    if info.num_classes != num_classes:
        raise DataError(
            f"{info.place or info.name} has {info.num_classes} classes, the network {num_classes}.", rule=rule
        )
    both = {tuple(class_names), info.class_names}
    # `class 3` is made up for a class without a name, and can be any class.
    if not all(any(not name.startswith("class ") for name in names) for names in both) or len(both) == 1:
        return
    # Folders of ImageNet have WordNet's numbers as names.
    if num_classes == IMAGENET_CLASSES and both == {imagenet_names(), imagenet_numbers()}:
        return
    raise DataError(
        f"The classes {format_list(info.class_names, _LISTED)} ({info.place or info.name}) are not those that the "
        f"model was trained on: {format_list(class_names, _LISTED)}.",
        rule=rule,
    )


def best_validated(run: Path) -> dict[str, Any] | None:
    """Return {path, step, weights} of a run's checkpoint with the best validation, None where none is kept."""
    place = checkpoints_of(run)
    best = BestCheckpoints(place).first_good()
    return best and {"path": str(place / best.name), "step": step_of(place / best.name), "weights": best.weights}


def find_weights(path: Path) -> tuple[Path, str]:
    """Return (checkpoint, which weights of it are best) for a checkpoint, a directory of them, or a run's directory."""
    if (path / MANIFEST_FILE).exists():
        manifest, _ = parse_manifest((path / MANIFEST_FILE).read_bytes())  # whatever is wrong is reported on loading
        return path, EMA if manifest and manifest.get("better") == EMA else RAW
    place = path if list_checkpoints(path) else checkpoints_of(path)
    best = BestCheckpoints(place).first_good()
    if best is not None:
        return place / best.name, best.weights
    found, damaged = newest_good(place)
    if found is None:
        problems = "; ".join(f"{bad.name}: {problem}" for bad, problem in damaged)
        raise CheckpointError(
            f"{place} holds no good checkpoint{': ' + problems if problems else ''}.",
            remedy="Name another run or checkpoint.",
        )
    return found, RAW


def origin_of(checkpoint: Path) -> str:
    """Return where weights come from, in short: the run and the checkpoint."""
    run = checkpoint.parent.parent
    return f"{run.name}/{checkpoint.name}" if (run / "config.json").is_file() else checkpoint.name


def load_trained_model(path: Path, weights: str = AUTO, custom: Network | None = None) -> TrainedModel:
    """Return the network of a checkpoint, or of a run's best one; `weights` is raw, ema, or auto for the better.

    `custom` is the network of a run whose network was given by code.
    """
    checkpoint, better = find_weights(path)
    arrays, manifest = load(checkpoint)
    config = from_saved(manifest["config"], given=("network",) if custom else (), needed=("network",)).config
    # Only for those is the dataset itself needed.
    form = manifest.get("input") or input_form(describe_dataset(config.data), config)  # not in older ones
    height, width, channels = form["image_hwc"]
    network = custom or build_network(config.model, len(manifest["class_names"]), (height, width, channels))
    # Better by the run's own validation, which was stored with the checkpoint.
    chosen = better if weights == AUTO else weights
    params, stats = _tensors(network, arrays, chosen, checkpoint)
    return TrainedModel(
        checkpoint=checkpoint,
        weights=manifest.get("weights", chosen),
        step=manifest["step"],
        epoch=manifest["epoch"],
        config=config,
        network=network,
        params=params,
        stats=stats,
        class_names=tuple(manifest["class_names"]),
        preprocess=preprocess_of(form, config.run.seed, network.input_hwc),
        **resizing_of(form),
        names_dataset="dataset" not in parts_of(custom_parts(manifest["config"]) or {}),
    )


def preprocess_of(form: Mapping[str, Any], seed: int, image_hwc: tuple[int, int, int]) -> Preprocess:
    """Return how images of that form become the network's input in evaluation."""
    return Preprocess(
        augmentation="none",
        normalization=form["normalization"],
        mean=tuple(form["mean"]),
        std=tuple(form["std"]),
        seed=seed,
        image_hwc=image_hwc,
    )


def resizing_of(form: Mapping[str, object]) -> dict[str, Any]:
    """Return how images of that form are resized in evaluation, as fields of a TrainedModel."""
    return {
        "shorter_side": form["shorter_side"],
        "antialias": form["antialias"],
        "interpolation": form.get("interpolation", "bilinear"),  # not in older ones
    }


def _tensors(network: Network, arrays: Mapping[str, Any], weights: str, checkpoint: Path) -> tuple[Any, Any]:
    start = "ema/" if weights == EMA else ""
    if start and not any(name.startswith(start) for name in arrays):
        raise CheckpointError(f"{checkpoint} holds no averaged weights (ema).", remedy="Leave --use out.")
    # NumPy knows bfloat16 from ml_dtypes as kind V.
    floats = {name: array.astype(np.float32) for name, array in arrays.items() if array.dtype.kind in "fV"}
    params, stats = weights_like(network)
    return restore_tree(floats, params, f"{start}params"), restore_tree(floats, stats, f"{start}stats")


# The result of a run: how it ended and, read from its directory when asked for, its metrics, checkpoint and plot.


Arrays = dict[str, np.ndarray]


class MetricArrays(dict[str, np.ndarray]):
    """The metrics of a run as arrays by name, with one entry per record."""

    def __repr__(self) -> str:
        records, validations = (len(self.get(name, ())) for name in ("step", "val_step"))
        names = ", ".join(name for name in self if not name.startswith("val_"))
        return f"MetricArrays({records} training records and {validations} validations; {names}, val_..., val_ema_...)"


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """The result of a run.

    `outcome` is finished, stopped (by a callback, early stopping or a target: `reason`), interrupted (resume continues
    from its checkpoint) or compiled.
    """

    outcome: str
    directory: Path
    step: int
    validation: dict[str, ValidationRecord]  # the last one of each set of weights: raw, ema
    images_per_second: float | None
    time_to_train: float
    can_resume: bool  # there is more to train, and resuming loses nothing
    reason: str = ""
    state: State | None = None  # after the last step, on its devices; for code that trains without a Model

    def __repr__(self) -> str:
        last = max((record.top1 for record in self.validation.values()), default=None)
        accuracy = f", top-1 {format_percent(last)} at the end" if last is not None else ""
        return f"RunResult({self.outcome} at step {self.step}{accuracy}, {self.directory})"

    @property
    def records(self) -> list[Record]:
        """All records of the run, oldest first."""
        return read_records(self.directory)

    @property
    def metrics(self) -> MetricArrays:
        """The run's metrics as NumPy arrays.

        `epoch`, `step`, `loss`, `accuracy`, `learning_rate` and so on have one entry per training record; those that
        begin with `val_` one per validation, and with `val_ema_` one per validation of averaged weights.
        """
        curves = Curves(self.directory)
        curves.read_more()
        if curves.num_damaged or not curves.offset:
            read_records(self.directory)  # says what is wrong with the file
        arrays = _arrays(curves, "train", TrainRecord)
        for weights, start in (("raw", "val_"), ("ema", "val_ema_")):
            found = _arrays(curves, f"validation/{weights}", ValidationRecord)
            arrays |= {start + {"top1": "accuracy"}.get(name, name): array for name, array in found.items()}
        return MetricArrays(arrays)

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the best validation, or the newest without one; None when none is kept."""
        try:
            return find_weights(checkpoints_of(self.directory))[0]
        except CheckpointError:
            return None

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest good checkpoint; None when none is kept."""
        return newest_good(checkpoints_of(self.directory))[0]

    @property
    def seconds(self) -> dict[str, float]:
        """Where the wall time of the last process of the run went, by kind; the sum is the wall time."""
        end = self._end
        return dict(end.seconds) if end else {}

    @property
    def verdict(self) -> str:
        """Why the result is useless, if it is; and what limited the run: computing, input, validation or saving."""
        end = self._end
        return "\n".join(text for text in (end.model_verdict, end.verdict) if text) if end else ""

    @property
    def best(self) -> ValidationRecord | None:
        """The best validation of the run, by the metric that it monitored; None without a validation."""
        records = self.records
        return best_validation(records, monitor_of(records))

    @property
    def problems(self) -> tuple[str, ...]:
        """What makes the result doubtful or useless: a loss that diverged, one answer for all, classes never found."""
        summary = read_summary(self.directory)
        if summary.is_trial:
            return ()
        missed = never_recognized(best_report(summary))
        end = self._end
        return tuple(
            text for text in (end.model_verdict if end else "", f"never recognized: {missed}" if missed else "") if text
        )

    @property
    def _end(self) -> RunEnd | None:
        return next((record for record in reversed(self.records) if isinstance(record, RunEnd)), None)

    def _repr_html_(self) -> str:
        """Return the plot, and below it how the run ended and where its time went, for a notebook."""
        spent = ", ".join(f"{kind} {format_duration(value)}" for kind, value in self.seconds.items() if value >= 0.05)
        lines = [repr(self).removeprefix("RunResult(").removesuffix(")"), self.reason, spent]
        lines += [*self.problems, self._end.verdict if self._end else ""]
        try:
            plot = draw_run(self.directory)
        except CheckpointError:  # nothing was recorded
            plot = ""
        return plot + "".join(f"<div>{escape(line)}</div>" for line in lines if line)


def ended_result(directory: Path) -> RunResult:
    """Return the result of a run that an earlier process has finished or stopped, as its records have it."""
    records = read_records(directory)
    end = next(record for record in reversed(records) if isinstance(record, RunEnd))
    stopped = end.outcome == "stopped"
    change = "with another --target-accuracy, --early-stopping or --monitor" if stopped else "--num-epochs N"
    return RunResult(
        outcome=end.outcome,
        directory=directory,
        step=end.step,
        validation={record.weights: record for record in records if isinstance(record, ValidationRecord)},
        images_per_second=end.images_per_second,
        time_to_train=end.time_to_train,
        can_resume=stopped and (checkpoints_of(directory) / checkpoint_name(end.step)).is_dir(),
        reason=f"before this command, which changed nothing{': ' * stopped}{end.reason}; to train longer: "
        f"headrace resume {directory} {change}",
    )


def _arrays(curves: Curves, kind: str, record: type[Record]) -> Arrays:
    """Return the numbers of records of one kind as arrays; None becomes NaN."""
    whole = {name for name, each in number_fields(record).items() if each.is_whole}
    return {name: array.astype(np.int64) if name in whole else array for name, array in curves.columns(kind).items()}
