"""A custom network as a model: fit, evaluate and predict on arrays, with the same machinery as any other run.

    model = PipelineModel(blocks, input_shape=(32, 32, 3), num_classes=10, num_pipeline_stages=4, micro_batch_size=16)
    model.fit(images, labels, num_epochs=5, validation_data=(others, their_labels))

The options are those of the command line, with underscores. A fit is a run: it has a directory with records,
checkpoints and reports, and an interrupted one is resumed with `fit(..., resume=RUN)`.
"""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from headrace.checkpoint.store import checkpoint_name, save
from headrace.config.field import find, spellings
from headrace.config.load import NAMED_OF_DATA, Resolved, network_options
from headrace.config.schema import all_options
from headrace.core.errors import ConfigError, did_you_mean
from headrace.core.tree import flatten_named
from headrace.data.dataset import DataInfo, DataSet
from headrace.data.sets.arrays import ImageSpec, array_dataset, array_source, check_class_names
from headrace.engine.devices import start_devices, use_compilation_cache
from headrace.engine.multiprocess_arrays import readable
from headrace.engine.state import State, evaluated_weights
from headrace.job import current_group
from headrace.model.custom import custom_network
from headrace.model.custom_block import CustomBlock
from headrace.model.network import Network
from headrace.plan.plan import Plan
from headrace.plan.steps import make_batch_plan
from headrace.reference.entrance import known_options, resolve_code
from headrace.run.design import CustomParts, Design, design_run, starting_state, with_replicas
from headrace.run.directory import saved_form
from headrace.run.evaluation import Validator, predict_all
from headrace.run.export_formats import ExportOptions
from headrace.run.export_formats import export as export_model
from headrace.run.fit import resume as resume_run
from headrace.run.fit import train
from headrace.run.recorder import RunResult
from headrace.run.starting_weights import Loaded, load_weights, refuse_replacing
from headrace.run.trained_model import input_form, load_trained_model
from headrace.telemetry.validation_report import validation_report

_PARTS = "The network and the data are given by code, so options cannot name or shape them."
_REFUSED = {
    "training": "fit trains, evaluate and predict do not.",
    "compile_only": "fit compiles and trains.",
    "init_from": "load() takes the weights of a checkpoint.",
}
# options of batch norm that reach only Headrace's layer
_NORM_LAYER_OPTIONS = ("stable_norm", "dbn_replica_group_size")


def check_custom_options(options: Mapping[str, Any], network: Network) -> dict[str, Any]:
    """Return the options under their full names, with the momentum that the network's batch norms ask for."""
    known, named = spellings(known_options()), network_options() | NAMED_OF_DATA
    for written in options:
        name = find(written, known).name
        if name in named or name in _REFUSED:
            raise ConfigError(f"The option {written} has no meaning here.", rule=_REFUSED.get(name, _PARTS))
    resolved = resolve_code(options)
    given = {name: option.value for name, option in resolved.given().items()}
    custom = [block for _, block in network.blocks if isinstance(block, CustomBlock)]
    if any(block.has_stats for block in custom):
        for name in _NORM_LAYER_OPTIONS:
            if given.get(name, default := all_options()[name].default) != default:
                raise ConfigError(
                    f"{name} is given, but a block of {network.name} has another batch norm.",
                    rule=f"{name} affects only Headrace's norm layer.",
                    remedy="Leave it out, or use that layer.",
                )
    momentums = {value for block in custom for value in block.functions.momentums if value < 1}
    if not momentums or "bn_momentum" in given:
        return given
    if len(momentums) > 1:
        values = ", ".join(f"{value:g}" for value in sorted(momentums))
        raise ConfigError(
            f"The batch norms of {network.name} have several momentums: {values}.",
            rule="Headrace updates all running statistics alike, once per step.",
            remedy="Give the one to use: bn_momentum=...",
        )
    return given | {"bn_momentum": momentums.pop()}


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """The weights of a model that was fitted or loaded."""

    weights: State  # params, stats and, when it is kept, ema; in host memory
    step: int
    epoch: float


class PipelineModel:
    """A network with its options and its current weights."""

    def __init__(
        self,
        network: Network | Sequence[Any],
        *,
        input_shape: Sequence[int] | None = None,
        num_classes: int | None = None,
        name: str = "custom_network",
        class_names: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        """Take a Network, or the blocks of one with its input shape and classes; the rest are ordinary options.

        No device is used. What cannot work is refused here, except what depends on the data.
        """
        self.network = _network(network, input_shape, num_classes, name)
        self._options = check_custom_options(options, self.network)
        self.config = resolve_code(self._options).config
        self.network = self.network.refined(self.config.pipeline.pipeline_splits)  # cut inside blocks, if asked to
        classes = self.network.num_classes
        self._spec = ImageSpec(
            image_hwc=self.network.input_hwc,
            num_classes=classes,
            class_names=check_class_names(class_names, classes) if class_names is not None else (),
        )
        self._trained: _Trained | None = None
        self._num_samples = (0, 0)  # of the last fit: training, validation
        self.plan()

    @property
    def params(self) -> dict[str, Any] | None:
        """The weights as {block: tree}, None before the first fit or load. A Flax block keeps Flax's tree."""
        return self._trained.weights["params"] if self._trained else None

    @property
    def stats(self) -> dict[str, Any] | None:
        """The running statistics as {block: tree}, None before the first fit or load."""
        return self._trained.weights["stats"] if self._trained else None

    def fit(
        self,
        images: Any,
        labels: Any,
        *,
        num_epochs: int | None = None,
        validation_data: tuple[Any, Any] | None = None,
        resume: str | Path | None = None,
    ) -> RunResult:
        """Train on images [N, H, W, C] (uint8 or float32) and labels [N]; return the result of the run.

        It starts from the model's weights: drawn with the seed at first, then as the last fit or load left them.
        With `resume` it continues an interrupted run, exactly, on the same data.
        """
        spec = replace(self._spec, image_dtype="", normalization="", channel_mean=(), channel_std=())
        sources = [array_source(images, labels, spec)]
        if validation_data is not None:
            sources.append(array_source(*_pair(validation_data), spec, "validation "))
        options = self._options | _validation(self._options, validation_data is not None)
        options |= {"num_epochs": num_epochs} if num_epochs is not None else {}
        resolved = resolve_code(options)
        dataset = array_dataset(resolved.config.data, spec, sources[0], sources[1] if validation_data else None)
        custom = CustomParts(network=self.network, dataset=dataset, weights=self._float32_weights())
        if resume is not None:
            result = resume_run(Path(resume), options, replace(custom, weights=None))
        else:
            resolved = with_replicas(resolved, custom)
            result = train(resolved, custom)
        self._num_samples = (dataset.info.num_train, dataset.info.num_validation)
        self._remember(dataset.info)
        if result.state is not None:
            epoch = result.step / design_run(resolved.config, custom).plan.steps.updates_per_epoch
            self._trained = _Trained(weights=_kept(result.state), step=result.step, epoch=epoch)
        return result

    def evaluate(self, images: Any, labels: Any, *, weights: str = "raw") -> dict[str, Any]:
        """Return the report on these images, each counted once: num_samples, loss, top1, top5, classes, confusions."""
        design, dataset = self._design(images, labels)
        state = self._state(design, weights)
        with closing(Validator(design, dataset, _devices(design))) as validator:
            validator.compile(state)
            sums, _ = validator.finish(validator.start(state))[weights]
        return validation_report(sums, dataset.info.class_names)

    def predict(self, images: Any, *, weights: str = "raw") -> np.ndarray:
        """Return the logits of these images, float32 [N, num_classes]."""
        design, dataset = self._design(images, np.zeros(len(images), np.int32))
        state = self._state(design, weights)
        return predict_all(design, dataset, _devices(design), evaluated_weights(state)[weights])

    def plan(self, num_samples: int | None = None, num_validation: int | None = None) -> Plan:
        """Return the plan of a run over so many images, printable; no device is used.

        Without numbers they are those of the last fit, or one step's images.
        """
        step = make_batch_plan(self.config.batch).global_batch_size
        train_count = num_samples or self._num_samples[0] or step
        held_out = self._num_samples[1] if num_validation is None else num_validation
        dataset = array_dataset(self.config.data, self._planned_spec(), None, None)
        info = replace(dataset.info, num_train=train_count, num_validation=held_out)
        custom = CustomParts(network=self.network, dataset=replace(dataset, info=info))
        return design_run(resolve_code(self._options | {"validation": held_out > 0}).config, custom).plan

    def save(self, path: str | Path) -> Path:
        """Write the weights as a checkpoint directory of the ordinary format (process 0 does), and return its path."""
        trained, path = self._need_weights("save"), Path(path)
        if not current_group().is_first:
            return path
        refuse_replacing(path)
        dataset = array_dataset(self.config.data, self._spec, None, None)
        custom = CustomParts(network=self.network, dataset=dataset)
        resolved: Resolved = resolve_code(self._options)
        manifest = {
            "step": trained.step,
            "epoch": trained.epoch,
            "seed": self.config.run.seed,
            "config": saved_form(resolved, custom.record()),
            "class_names": list(dataset.info.class_names),
            "input": input_form(dataset.info, self.config),
            "elapsed_seconds": 0.0,
        }
        return save(path.parent, path.name, flatten_named(trained.weights), manifest)

    def export(self, path: str | Path, *, format: str = "stablehlo", weights: str = "raw") -> Path:
        """Write the network for other programs (stablehlo, onnx, safetensors), checked, and return the file's path.

        It takes images as `fit` did: bytes to be normalised, or float32 numbers.
        """
        trained = self._need_weights("export")
        if not current_group().is_first:
            return Path(path)
        start_devices(self.config.run.platform, self.plan().num_devices)
        pixels = self._spec.image_dtype == "uint8"
        with tempfile.TemporaryDirectory() as place:
            checkpoint = self.save(Path(place) / checkpoint_name(trained.step))
            model = load_trained_model(checkpoint, weights, custom=self.network)
            options = ExportOptions(format=format, input="uint8" if pixels else "float")
            return export_model(model, Path(path), options).path

    def load(self, path: str | Path) -> "PipelineModel":
        """Take the weights of a checkpoint, or of a run's newest good one, made under any plan; return the model."""
        loaded: Loaded = load_weights(Path(path), self.network, self.config)
        self._trained = _Trained(weights=loaded.weights, step=loaded.step, epoch=loaded.epoch)
        self._spec = replace(
            self._spec,
            class_names=self._spec.class_names or loaded.class_names,
            image_dtype=loaded.custom.get("image_dtype", ""),
            normalization=loaded.custom.get("normalization", ""),
            channel_mean=tuple(loaded.custom.get("channel_mean", ())),
            channel_std=tuple(loaded.custom.get("channel_std", ())),
        )
        return self

    def _design(self, images: Any, labels: Any) -> tuple[Design, DataSet]:
        """Return a run that only validates these images."""
        source = array_source(images, labels, self._spec)
        resolved = resolve_code(self._options | {"training": False, "validation": True})
        dataset = array_dataset(resolved.config.data, self._spec, None, source)
        custom = CustomParts(network=self.network, dataset=dataset)
        return design_run(resolved.config, custom, current_group().num_processes), dataset

    def _state(self, design: Design, weights: str) -> State:
        """Return the state to evaluate; refuse weights that the model does not have."""
        possible = ("raw", "ema") if self.config.learning.ema_decay > 0 else ("raw",)
        if self._trained:
            possible = tuple(evaluated_weights(self._trained.weights))
        if weights not in possible:
            raise ConfigError(
                f"weights is {weights!r}.",
                rule="raw are the weights themselves, ema their moving average, which ema_decay turns on.",
                remedy=did_you_mean(str(weights), possible),
            )
        if self._trained:
            return self._trained.weights
        _devices(design)  # before anything else uses JAX: virtual devices may have to be created
        return starting_state(design)

    def _remember(self, info: DataInfo) -> None:
        self._spec = replace(
            self._spec,
            image_dtype=info.image_dtype,
            normalization=info.normalization,
            channel_mean=info.channel_mean,
            channel_std=info.channel_std,
        )

    def _planned_spec(self) -> ImageSpec:
        """Return what is known of the images, with placeholders for what only the data can say."""
        wanted = self.config.data.wanted_normalization
        dtype = self._spec.image_dtype or ("uint8" if wanted not in ("auto", "none") else "float32")
        channels = self.network.input_hwc[2]
        mean, std = self._spec.channel_mean, self._spec.channel_std
        return replace(
            self._spec, image_dtype=dtype, channel_mean=mean or (0.5,) * channels, channel_std=std or (1.0,) * channels
        )

    def _float32_weights(self) -> tuple[Any, Any] | None:
        if self._trained is None:
            return None
        return jax.tree.map(lambda a: np.asarray(a, np.float32), (self.params, self.stats))

    def _need_weights(self, verb: str) -> _Trained:
        if self._trained is None:
            raise ConfigError(f"There is nothing to {verb} yet.", remedy="Call fit or load first.")
        return self._trained


def _network(network: Any, input_shape: Any, num_classes: int | None, name: str) -> Network:
    if isinstance(network, Network):
        if input_shape is not None or num_classes is not None:
            raise ConfigError(
                "input_shape and num_classes are given beside a Network, which has both.", remedy="Leave them out."
            )
        return network
    if input_shape is None or num_classes is None:
        raise ConfigError(
            "A list of blocks needs input_shape and num_classes.",
            remedy="Give one image's shape and the number of classes: input_shape=(32, 32, 3), num_classes=10.",
        )
    return custom_network(network, input_shape=input_shape, num_classes=num_classes, name=name)


def _devices(design: Design) -> list[Any]:
    use_compilation_cache(design.config.run.compilation_cache_dir)
    return start_devices(design.config.run.platform, design.plan.num_devices, design.plan.num_processes)


def _kept(state: State) -> State:
    """Return the weights of a state, copied to host memory."""
    kept = {key: state[key] for key in ("params", "stats", "ema") if key in state}
    return jax.device_get(jax.tree.map(lambda leaf: readable(leaf) if isinstance(leaf, jax.Array) else leaf, kept))


def _pair(data: Any) -> tuple[Any, Any]:
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise ConfigError("validation_data is not a pair.", rule="It is (images, labels).")
    return data[0], data[1]


def _validation(options: dict[str, Any], has_data: bool) -> dict[str, Any]:
    if options.get("validation") is True and not has_data:
        raise ConfigError(
            "validation is on, but there is no validation_data.", remedy="Give fit some, or leave it out."
        )
    return {} if has_data else {"validation": False}
