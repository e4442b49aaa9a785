"""A network, shipped or custom, as a model: fit, evaluate, predict and export, with the machinery of any other run.

    model = Model("resnet50", weights="weights.pth", num_classes=2)
    run = model.fit("photos/", epochs=5, learning_rate=0.01)
    model.evaluate("photos/val"); model.predict("cat.jpg"); model.export("model.onnx")

The options are those of the command line, with underscores. A fit is a run: it has a directory with records,
checkpoints and reports, and an interrupted one is resumed with `fit(..., resume=RUN)`.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from headrace.checkpoint.best import BestCheckpoints
from headrace.checkpoint.store import Checkpoint, refuse_replacing, save
from headrace.config.field import LOADED
from headrace.config.load import NAMED_OF_DATA, Resolved, network_options, resolve_code
from headrace.config.python_words import in_python, speaks_python
from headrace.config.schema import Config, Data
from headrace.config.section_data import IMAGE_OPTIONS, IMAGE_SIZES
from headrace.config.section_model import norm_choice
from headrace.config.typed_options import FitOptions, ModelOptions, Options
from headrace.core.addresses import hide_addresses
from headrace.core.errors import ConfigError
from headrace.core.local_path import STORES, WEB, local_path, local_text
from headrace.core.process import tuned_interpreter
from headrace.core.stored_copy import here
from headrace.core.tree import flatten_named
from headrace.data.dataset import DataSet
from headrace.data.sets.arrays import (
    ImageSpec,
    array_dataset,
    array_source,
    check_class_names,
    named_outputs,
    no_labels,
)
from headrace.data.sets.objects import Labelled
from headrace.data.sets.workers import Workers
from headrace.engine.devices import start_devices, start_run_devices
from headrace.engine.multiprocess_arrays import readable
from headrace.engine.objective import LossFunction
from headrace.engine.precision import make_precision
from headrace.engine.state import State, evaluated_weights
from headrace.job import current_group, join_job
from headrace.model.network import Network
from headrace.model.zoo import build_network
from headrace.plan.batch import make_batch_plan
from headrace.plan.plan import Plan
from headrace.rows.exports import find_export, format_of
from headrace.rows.optimizers.given import GIVEN, OptimizerFunction
from headrace.rows.row import Scale
from headrace.rows.tasks import CLASSIFICATION, TASKS
from headrace.run.callback_forms import CallbackLike, check_callbacks
from headrace.run.choices import definition_remarks, settle, with_choices, with_definition, with_some_batch
from headrace.run.custom_functions import AugmentFunction, Metrics, check_optimizer
from headrace.run.design import NOTHING, CustomParts, Design, design_run, starting_state, with_set
from headrace.run.directory import checkpoints_of, from_saved, saved_form
from headrace.run.exports.values import ExportOptions
from headrace.run.exports.write import export_model
from headrace.run.features import features_of_arrays, features_of_files
from headrace.run.fit import resume as resume_run
from headrace.run.fit import train
from headrace.run.given_data import (
    GivenData,
    array_spec,
    evaluation_set,
    given_data,
    held_out,
    image_pair,
    image_paths,
    images_to_predict,
    one_image,
    picture_dataset,
    picture_evaluation,
    picture_options,
    picture_pixels,
    refuse_mismatch,
    refuse_stream,
    validation_folder,
    validation_option,
)
from headrace.run.given_stream import array_stream, picture_stream, refuse_repeats, stream_options, streams_pictures
from headrace.run.grad_cam import Explainer, Explanation
from headrace.run.lr_find import FoundRates, find_learning_rate
from headrace.run.model_inputs import (
    NAMED_OF_ONE_SET,
    OF_ONE_RUN,
    check_custom_options,
    full_names,
    make_network,
    need_rate,
    normalised_spec,
    planned_spec,
    positive,
    refuse_named_data,
    refuse_weights,
    resolve_for_arrays,
    spec_of,
    square_options,
    unfitted_spec,
    without_data,
)
from headrace.run.named_weights import load_file, load_named, pixels_of_weights
from headrace.run.network_summary import Report, Summary, network_summary, shape_text
from headrace.run.prediction import Predictions, find_images, logits_of, predict
from headrace.run.read_weights import find_checkpoint, form_in, weights_in
from headrace.run.run_result import RunResult
from headrace.run.validator import Validator, predict_all
from headrace.weights.input_form import InputForm
from headrace.weights.named import facts_of, is_path
from headrace.weights.weights import AUTO, EMA, RAW, Weights


class Model:
    """A network with its options and its current weights."""

    _recipe: str | None = None  # chosen as the command line does

    @speaks_python
    def __init__(
        self,
        network: str | Network | Sequence[Any] | Callable[..., Any] | None = None,
        *,
        weights: str | os.PathLike[str] | None = None,
        input_shape: Sequence[int] | None = None,
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        name: str = "custom_network",
        config: str | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        """Take the name of a shipped network, a module, a list of blocks or a Network; the rest are ordinary options.

        `weights` is a known name (`headrace models --weights`), hf:OWNER/NAME, an address, a file, a checkpoint or a
        run; with a known name the network needs none. `config` names a recipe (`headrace configs`); without it, it is
        chosen as `headrace train` does. No device is used. What cannot work is refused here, except what depends on the
        data.
        """
        self._recipe = config or self._recipe
        self._code_network: Network | None = None  # given by code
        self._network: Network | None = None
        self._weights_from = None
        if weights is not None:
            self._weights_from = hide_addresses(local_text(str(weights), "weights", WEB))
        self._facts = facts_of(self._weights_from) if self._weights_from is not None else None
        if network is not None and not isinstance(network, str | Network | Sequence):
            if not callable(network) and not hasattr(network, "apply"):
                raise ConfigError(
                    f"The network is a {type(network).__name__}.",
                    rule="It is the name of a shipped network, a module, a list of blocks, or a custom_network.",
                )
            network = [("network", network)]
        self._options = full_names(options, network is not None and not isinstance(network, str))
        if network is None or isinstance(network, str):
            self._options |= {} if network is None else {"model_name": network}
            self._resolved = self._resolve(self._options, aloud=True)
            self._fixed_shape = input_shape is not None
            self._spec = unfitted_spec(self.config, input_shape, num_classes, class_names)
        else:
            made = make_network(network, input_shape, num_classes, name)
            self._options, self._code_network = check_custom_options(self._options, made), made
            self._resolved = self._resolve(self._options)
            # Needed before the plan below, which names blocks.
            self._code_network = made.refined(self.config.pipeline.pipeline_splits)  # cut inside blocks, if asked to
            self._network, self._fixed_shape = self._code_network, True
            names = check_class_names(class_names, made.num_classes) if class_names is not None else ()
            self._spec = ImageSpec(
                image_hwc=made.input_hwc, num_classes=made.num_classes, class_names=names, task=self.config.data.task
            )
        self._carried: Mapping[str, Any] = {}  # the options of the run that it was loaded from
        self._weights: Weights | None = None
        self._measured = CustomParts()  # loss and metrics of the last fit
        self._last_options = without_data(self._options)  # those of the last fit, without what names its data
        self._num_samples = (0, 0)  # of the last fit: training, validation
        if self._code_network is not None:
            self.plan()  # refuses what cannot be planned

    def __repr__(self) -> str:
        name = self._network.name if self._network else self.config.model.model_name
        spec = self._spec
        known = self._network is not None or self._fixed_shape  # else the data decides
        what = f"{shape_text(spec.image_hwc)} images, " if known and spec.image_hwc[0] else ""
        what += f"{spec.num_classes} classes, " if spec.num_classes else ""
        state = f"step {self._weights.step} of {self._weights.origin}" if self._weights else "not trained"
        if not self._weights and self._weights_from:
            state = f"weights from {self._weights_from}"
        return f"Model({name}: {what}{state})"

    @property
    def config(self) -> Config:
        """The options, by section: those of the last fit, or those that the model was made with."""
        return self._resolved.config

    @property
    def network(self) -> Network:
        """The network; a shipped one is known once its number of classes is: given, or after fit or load."""
        if self._network is None:
            spec = self._spec
            num_classes = spec.num_classes or (self._facts.num_classes if self._facts else 0)
            if not num_classes:
                raise ConfigError(
                    f"The number of classes of {self.config.model.model_name} is not known yet.",
                    remedy="Give num_classes, or call fit first.",
                )
            return build_network(self.config.model, num_classes, spec.image_hwc)
        return self._network

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their labels."""
        return self._spec.class_names or named_outputs(self._spec)

    @property
    def params(self) -> dict[str, Any] | None:
        """The weights as {block: tree}, None before the first fit or load. A Flax block keeps Flax's tree."""
        return self._weights.params if self._weights else None

    @property
    def stats(self) -> dict[str, Any] | None:
        """The running statistics as {block: tree}, None before the first fit or load."""
        return self._weights.stats if self._weights else None

    @speaks_python
    @join_job()  # a program that headrace launch, torchrun, mpirun or Kubernetes started several times
    def fit(
        self,
        data: object,
        labels: object = None,
        *,
        validation_data: object = None,
        resume: str | Path | None = None,
        callbacks: Sequence[CallbackLike] = (),
        loss: LossFunction | str | None = None,
        metrics: Metrics | None = None,
        augment: AugmentFunction | None = None,
        optimizer: OptimizerFunction | str | None = None,
        **options: Unpack[FitOptions],
    ) -> RunResult:
        """Train on a path, images and labels, a dataset, a data frame or an iterable; return the run.

        Arrays of images are [N, H, W, C], uint8 or float32, labels [N]; Pillow images, paths and encoded images are
        decoded and cropped as image files are. validation_data is of the same kind as the data. Options are those of
        this run alone, such as epochs or learning_rate. It starts from the model's weights: drawn with the seed at
        first, then as the last fit or load left them. With `resume` it continues an interrupted run exactly, on the
        same data.
        Afterwards the model has the weights of the best validation; without validation, those after the last step.

        `callbacks`: functions of an event, called after each epoch or on the event that they are named after, objects
        of `headrace.Callback`, or with the methods of a callback of Keras.

        Functions traced into the step: `loss(logits, targets)` (or its name, "bce"), `metrics` {name: f(logits,
        labels)} with a value per image (or a list of `headrace.Metric` and of names), `augment(key, images,
        labels)` with the images, and `optimizer(rate)`, which returns a transformation of optax (or its name, "muon");
        docs/howto/python.md says more.
        """
        asked: dict[str, Any] = dict(options)
        if isinstance(optimizer, str):
            asked, optimizer = asked | {"optimizer": optimizer}, None
        elif optimizer is not None:
            asked |= {"optimizer": GIVEN.name}
        asked, loss = (asked | {"loss": loss}, None) if isinstance(loss, str) else (asked, loss)
        given = full_names(asked, self._code_network is not None)
        # A fit that names its own directory needs none of the model's.
        ours = {} if "output" not in given else dict.fromkeys(("log_dir", "run_name"))
        asked = {name: value for name, value in self._options.items() if name not in ours} | given
        resolved, custom = self._training_parts(data, labels, validation_data, asked)
        if optimizer is not None:
            check_optimizer(optimizer)
            if resume is None:
                need_rate(resolved)
        custom = replace(
            custom,
            loss=loss,
            metrics=metrics or {},
            augment=augment,
            optimizer=optimizer,
            callbacks=check_callbacks(callbacks),
            speaks_python=True,
        )
        result = self._fit(resolved, custom, resume, asked)
        self._take_best(result)
        if resolved.config.logging.progress != "none" and current_group().is_first:
            for problem in result.problems:
                print(f"warning: {in_python(problem)}")
        # Without the state: it would keep the devices' memory for as long as somebody keeps the result.
        return replace(result, state=None)

    def _fit(
        self, resolved: Resolved, custom: CustomParts, resume: str | Path | None, asked: dict[str, Any]
    ) -> RunResult:
        custom = with_set(resolved.config, custom, absent_ok=True)
        resolved = settle(resolved, custom)
        design = design_run(resolved.config, custom, current_group().num_processes)
        # Before anything is written: images of another shape would otherwise fail inside the network.
        refuse_mismatch(self._network, self._spec.num_classes, design.info)
        refuse_repeats(design.plan, custom.dataset)
        if resume is not None:
            overrides = {name: value for name, value in asked.items() if name not in self._not_for_resume(custom)}
            result = resume_run(local_text(resume, "resume", STORES), overrides, replace(custom, weights=None))
        else:
            result = train(resolved, custom)
        self._num_samples = (design.info.num_train, design.info.num_validation)
        self._last_options = without_data(asked)
        self._measured = CustomParts(loss=custom.loss, metrics=custom.metrics)
        self._remember(design)
        if result.state is not None:
            epoch = result.step / design.plan.steps.updates_per_epoch
            found = _on_host(result.state, self.network, result.directory.name)
            self._weights = replace(found, step=result.step, epoch=epoch)
        return result

    def _take_best(self, result: RunResult) -> None:
        """Take the weights of a run's best validation, as the commands do; without one, those after the last step."""
        trained, group = self._weights, current_group()
        if trained is None or result.state is None:
            return
        # Process 0 reads it, as only that one can see the run's files.
        best = group.on_first_process(BestCheckpoints(checkpoints_of(result.directory)).read_first_good)
        facts = group.broadcast(best and {"better": best[0].weights, "step": best[1].manifest["step"]})
        if facts is None:
            return
        better, step = facts["better"], facts["step"]
        # It is taken only if it is not the state that the run ended with, which is in memory.
        if step != trained.step:
            read = weights_in(best[1], better, self.network) if best else trained
            trained = replace(trained, **group.broadcast_arrays(_arrays(read)), step=step)
            trained = replace(trained, epoch=trained.epoch * step / result.step)
        self._weights = replace(trained, better=better)

    def _training_parts(
        self, data: object, labels: object, validation_data: object, options: dict[str, Any]
    ) -> tuple[Resolved, CustomParts]:
        """Return the configuration of a fit, and what code gives to it."""
        resolved, custom = self._data_parts(data, labels, validation_data, options)
        of_run = {name: LOADED for name, value in self._carried.items() if options.get(name) == value}
        known = {name: origin for name, origin in of_run.items() if name in resolved.origins}
        source = {
            name: replace(given, origin=of_run.get(name, given.origin)) for name, given in resolved.source.items()
        }
        resolved = replace(resolved, origins={**resolved.origins, **known}, source=source)
        return resolved, replace(custom, weights=self._weights and self._weights.raw)

    def _data_parts(
        self, data: object, labels: object, validation_data: object, options: dict[str, Any]
    ) -> tuple[Resolved, CustomParts]:
        if isinstance(data, Workers):  # a thread waits for each of the processes
            options = {"pipeline_num_parallel": data.num_processes, **options}
        given = given_data(data, labels, self._spec.class_names)
        if given.options:
            options = options | given.options | validation_folder(validation_data) | self._image_options(given)
            return self._resolve(options), CustomParts(network=self._code_network)
        if given.stream is not None:
            return self._stream_parts(given, validation_data, options)
        refuse_named_data(options, shapes=given.pictures is None)
        if given.dataset is not None:
            if validation_data is not None:
                raise ConfigError("validation_data is given beside a dataset, which has a validation part.")
            parts = CustomParts(network=self._code_network, dataset=given.dataset)
            return self._resolve(options, by_code=True), parts
        if given.pictures is not None:
            parts = given.held is not None or validation_data is not None or "validation_split" in options
            asked = picture_options(options | validation_option(options, parts)) | self._image_options(given)
            resolved = self._resolve(asked)
            fraction = options.get("validation_split")
            dataset = picture_dataset(given, validation_data, resolved.config, self._spec, fraction)
            return resolved, CustomParts(network=self._code_network, dataset=dataset)
        assert given.arrays is not None
        images, labels = given.arrays
        validation_data = given.held if validation_data is None else validation_data
        if self._weights is None or not self._weights.step:
            options = pixels_of_weights(self._facts, images, options) | options
        spec = self._spec if self._network else array_spec(self._spec, images, labels)
        # What an earlier fit found of other arrays is open again: these decide it.
        spec = replace(spec, image_dtype="", normalization="", channel_mean=(), channel_std=())
        if given.class_names and not spec.class_names:
            spec = replace(spec, class_names=given.class_names, num_classes=len(given.class_names))
        fraction = options.get("validation_split")
        options = {name: value for name, value in options.items() if name != "validation_split"}
        if fraction is not None and validation_data is not None:
            raise ConfigError("validation_split is given beside validation_data.", remedy="Leave one of them out.")
        source, remarks = array_source(images, labels, spec), ()
        if fraction is not None:
            names = spec.class_names or named_outputs(spec)
            (images, labels), validation_data, remarks = held_out(images, labels, fraction, names)
            source = array_source(images, labels, spec)
        held = (
            array_source(*image_pair(validation_data, spec.class_names), spec, "validation ")
            if validation_data is not None
            else None
        )
        resolved = self._resolve(options | validation_option(options, validation_data is not None), by_code=True)
        dataset = array_dataset(resolved.config.data, spec, source, held)
        dataset = replace(dataset, info=replace(dataset.info, remarks=remarks))
        return resolved, CustomParts(network=self._code_network, dataset=dataset)

    def _stream_parts(
        self, given: GivenData, validation_data: object, options: dict[str, Any]
    ) -> tuple[Resolved, CustomParts]:
        stream, held = given.stream, given.held if validation_data is None else validation_data
        assert stream is not None
        first = stream.peek()
        pictures = streams_pictures(first)
        refuse_named_data(options, shapes=not pictures)
        options = stream_options(options | validation_option(options, held is not None))
        if pictures:
            resolved = self._resolve(picture_options(options) | self._image_options(given))
            dataset = picture_stream(stream, first, held, resolved.config, self._spec)
        else:
            resolved = self._resolve(options, by_code=True)
            spec = replace(self._spec, image_dtype="", normalization="", channel_mean=(), channel_std=())
            dataset = array_stream(stream, first, held, resolved.config.data, spec)
        return resolved, CustomParts(network=self._code_network, dataset=dataset)

    @join_job()
    @speaks_python
    @tuned_interpreter()
    def evaluate(
        self,
        data: object,
        labels: object = None,
        *,
        weights: str = AUTO,
        steps: int | None = None,
        loss: LossFunction | None = None,
        metrics: Metrics | None = None,
        **options: Unpack[Options],
    ) -> Report:
        """Return the report on data given as for fit, each image counted once: num_samples, loss, top1, classes, ...

        `loss` and `metrics` are as in fit, by default those of the last fit.
        Class folders are evaluated whole; a dataset with a training and a validation part, its validation part.
        `steps` evaluates only the first so many batches.
        """
        self._load_given_weights()
        given = given_data(data, labels, self._known_spec().class_names)
        refuse_stream(given, "The data")
        by_path = "dataset_path" in given.options or given.pictures is not None
        asked = self._evaluation_options(by_path) | full_names(options, self._code_network is not None)
        if given.options:
            config = self._resolve(asked | given.options | self._image_options(given)).config
            dataset = evaluation_set(config.data, self._known_spec(), "dataset" in given.options)
        elif given.dataset is not None:
            config, dataset = self._resolve(asked, by_code=True).config, given.dataset
        elif given.pictures is not None:
            refuse_named_data(asked, shapes=False)
            config = self._resolve(picture_options(asked) | self._image_options(given)).config
            dataset = picture_evaluation(given.pictures, config.data, self._known_spec())
        else:
            refuse_named_data(asked)
            config = self._resolve(asked, by_code=True).config
            dataset = self._array_evaluation(config, given.arrays)
        last = self._measured
        measured = replace(last, loss=loss or last.loss, metrics=last.metrics if metrics is None else metrics)
        design = self._evaluation_design(config, dataset, measured)
        if steps is not None:
            count = positive(steps, "steps") * design.plan.validation.batch_size
            part = dataset.validation.first(count)
            dataset = replace(dataset, validation=part, info=replace(dataset.info, num_validation=len(part)))
            design = self._evaluation_design(config, dataset, measured)
        weights = self._chosen(weights)
        state = self._state(design, weights)
        with closing(Validator(design, dataset, _devices(design))) as validator:
            validator.compile(state)
            sums, _ = validator.finish(validator.start(state))[weights]
        return Report(design.report(sums))

    @speaks_python
    @tuned_interpreter()
    def predict(self, images: object, *, weights: str = AUTO, batch_size: int = 32) -> Predictions:
        """Return the predictions for image files, folders, Pillow images, an array [N, H, W, C], or a dataset."""
        self._load_given_weights()
        paths = image_paths(images)
        if paths is None:
            task = TASKS[self._spec.task]
            shares = task.answer(self.logits(images, weights=weights), self._spec.scale)
            return Predictions(shares.astype(np.float32), self.class_names, task=task)
        files, chosen = self._with_files(paths, weights)
        shares = np.full((len(files), self.network.num_classes), np.nan, np.float32)
        found = list(predict(chosen, files, self.network.num_classes, positive(batch_size, "batch_size")))
        for row, prediction in zip(shares, found, strict=True):
            for number, share in prediction.best:
                row[number] = share
        problems = [prediction.problem for prediction in found]
        return Predictions(shares, self.class_names, files, problems, chosen.task)

    @speaks_python
    @tuned_interpreter()
    def features(self, images: Any, *, weights: str = AUTO) -> np.ndarray:
        """Return what the last layer scores, float32 [N, features], of image files, folders or an array [N, H, W, C].

        Images that look alike to the network have features close to each other.
        """
        self._load_given_weights()
        paths = image_paths(images)
        if paths is not None:
            files, chosen = self._with_files(paths, weights)
            return features_of_files(chosen, files)
        if not isinstance(images, np.ndarray) or images.ndim != 4 or not len(images):
            raise ConfigError(
                f"The images are a {type(images).__name__}.",
                rule="Features are those of files, folders or an array [N, H, W, C].",
                remedy="For one image: images[None].",
            )
        chosen = self._usable(weights, "take features with")
        start_devices(self.config.run.platform, 1)
        return features_of_arrays(chosen, images)

    @speaks_python
    @tuned_interpreter()
    def logits(self, images: Any, *, weights: str = AUTO) -> np.ndarray:
        """Return the logits of images given as for predict, float32 [N, num_classes]."""
        self._load_given_weights()
        paths = image_paths(images)
        if paths is not None:
            files, chosen = self._with_files(paths, weights)
            return logits_of(chosen, files)
        images, given = images_to_predict(images, self.network.input_hwc), GivenData()
        if isinstance(images, Labelled) and images.are_pictures:
            asked = picture_options(self._evaluation_options(image_files=True)) | self._image_options(given)
            config = self._resolve(asked).config
            dataset = picture_evaluation(images, config.data, self._known_spec())
        else:
            config = self._resolve(self._evaluation_options(), by_code=True).config
            dataset = self._array_evaluation(config, (images, no_labels(self._known_spec(), len(images))))
        design = self._evaluation_design(config, dataset)
        weights = self._chosen(weights)
        state = self._state(design, weights)
        return predict_all(design, dataset, _devices(design), evaluated_weights(state)[weights])

    @speaks_python
    @tuned_interpreter()
    def explain(self, image: object, class_name: str | None = None, *, weights: str = AUTO) -> Explanation:
        """Return where in an image the network found a class, by default the one that it predicts (Grad-CAM).

        The image is a file, a Pillow image, encoded bytes, or bytes [H, W, C] as the network takes them. A notebook
        shows the result; `.drawn().save("where.png")` writes it, `.maps` has an array for each block.
        """
        self._load_given_weights()
        chosen = self._usable(weights, "explain")
        start_devices(self.config.run.platform, 1)
        explainer = Explainer(chosen)
        if isinstance(image, str | os.PathLike):
            return explainer.explain(local_path(image).expanduser(), class_name)
        if isinstance(image, np.ndarray):
            return explainer.explain_pixels(one_image(image, self.network.input_hwc), class_name)
        return explainer.explain_pixels(picture_pixels(image, chosen.form), class_name)

    def _with_files(self, paths: Sequence[Path], which: str) -> tuple[list[Path], Weights]:
        """Return the image files among paths and folders, and the weights for them, with a device started."""
        files, weights = find_images(paths), self._usable(which, "predict with")
        start_devices(self.config.run.platform, 1)
        return files, weights

    @speaks_python
    @tuned_interpreter()
    def find_learning_rate(
        self,
        data: object,
        labels: object = None,
        *,
        num_steps: int = 100,
        loss: LossFunction | None = None,
        augment: AugmentFunction | None = None,
        **options: Unpack[FitOptions],
    ) -> FoundRates:
        """Train a short while with a growing rate on data given as for fit; return rates, losses and a suggestion.

        Nothing is written, and the model stays as it is.
        """
        asked = self._options | full_names(options, self._code_network is not None)
        resolved, custom = self._training_parts(data, labels, None, asked)
        custom = replace(custom, loss=loss, augment=augment)
        return find_learning_rate(resolved, custom, num_steps=positive(num_steps, "num_steps"))

    @speaks_python
    def plan(self, num_samples: int | None = None, num_validation: int | None = None) -> Plan:
        """Return the plan of a run over so many images, printable; no device is used.

        Without numbers they are those of the last fit, or a thousand: the batch may follow from them. Before a fit the
        images count as 8-bit ones, with `normalization="none"` as float32.
        """
        step = make_batch_plan(self.config.batch).global_batch_size
        train_count = num_samples or self._num_samples[0] or max(1000, step)
        held_out = self._num_samples[1] if num_validation is None else num_validation
        dataset = array_dataset(self.config.data, planned_spec(self._spec, self.network, self.config.data), None, None)
        info = replace(dataset.info, num_train=train_count, num_validation=held_out)
        custom = CustomParts(network=self.network, dataset=replace(dataset, info=info))
        resolved = self._resolve(without_data(self._options) | {"validation": held_out > 0})
        return design_run(with_choices(resolved, custom).config, custom).plan

    def summary(self) -> Summary:
        """Return a table of the network's blocks: output shape, parameters and FLOPs of each."""
        return network_summary(self.network)

    @speaks_python
    def save(self, path: str | Path) -> Path:
        """Write the weights as a checkpoint directory of the ordinary format (process 0 does), and return its path."""
        self._load_given_weights()
        trained, path = self._need_weights("save"), local_path(path)
        if path.suffix in (".keras", ".h5", ".pth", ".pt", ".onnx", ".safetensors", ".stablehlo"):
            raise ConfigError(
                f"save was given {path.name}, the name of a file.",
                rule="It writes a directory, a checkpoint for Headrace.",
                remedy=f"Leave the suffix out; for other programs there is model.export({path.stem!r} + '.onnx'), also "
                ".safetensors and .pth.",
            )
        if not current_group().is_first:
            return path
        refuse_replacing(path)
        dataset = array_dataset(self.config.data, self._known_spec(), None, None)
        custom = CustomParts(network=self._code_network, dataset=dataset)
        saved = {name: value for name, value in self._last_options.items() if name not in IMAGE_OPTIONS}
        if self._spec.scale.std:
            saved |= {"target_mean": self._spec.scale.mean, "target_std": self._spec.scale.std}
        manifest = {
            "step": trained.step,
            "epoch": trained.epoch,
            "seed": self.config.run.seed,
            "config": saved_form(self._resolve(saved, by_code=True), custom.record()),
            "class_names": list(self.class_names),
            "better": trained.better,
            "input": InputForm.of_data(dataset.info, self.config).saved(),
            "elapsed_seconds": 0.0,
        }
        stored = make_precision(self.config.numerics, self.config.batch).weight_dtype
        return save(path.parent, path.name, flatten_named(trained.state(stored)), manifest)

    @speaks_python
    @tuned_interpreter()
    def export(
        self,
        path: str | Path,
        *,
        format: str | None = None,
        weights: str = AUTO,
        dtype: str = "float32",
        with_preprocessing: bool = False,
    ) -> Path:
        """Write the network for other programs, checked on generated images, and return the file's path.

        The format follows from the suffix: onnx, stablehlo, safetensors, and pth with the names of torchvision or timm.
        The network takes images as `fit` did: bytes to be normalised, or float32 numbers. With preprocessing it takes
        bytes of images of any size, and resizes and crops them; `dtype` is float32 or float16.
        """
        self._load_given_weights()
        chosen, path = self._usable(weights, "export"), local_path(path)
        kind = format or format_of(path)
        if not current_group().is_first:
            return path
        start_devices(self.config.run.platform, 1)
        is_float = self._spec.image_dtype == "float32" and "input" in find_export(kind).takes
        options = ExportOptions(
            format=kind,
            input="float" if is_float else "uint8",
            dtype=dtype,
            with_preprocessing=with_preprocessing,
        )
        return export_model(chosen, path, options).path

    @classmethod
    @speaks_python
    def load(
        cls,
        path: str | Path,
        network: Network | Sequence[Any] | Callable[..., Any] | None = None,
        **options: Unpack[Options],
    ) -> "Model":
        """Return the model of a run's best checkpoint, of the checkpoint at `path`, or of weights with a name.

        A name is hf:OWNER/NAME, as `headrace push` made it, or one of `headrace models --weights`. `network` is the one
        of a run whose network was given by code; `options` are added to those of the run.
        """
        added: dict[str, Any] = dict(options)
        if not is_path(str(path)):
            model = cls(network, weights=path, **added)
            model._load_given_weights()
            return model
        checkpoint, better = find_checkpoint(_run_here(path))
        manifest = checkpoint.manifest
        made = network if network is None or isinstance(network, Network) else None
        parts = ("network",) if network is not None else ()
        saved = from_saved(manifest["config"], given=parts, needed=("network",))
        given = {name: option.value for name, option in saved.given().items()}
        # Where its data was and what its run was called says nothing about the model.
        kept = {name: value for name, value in given.items() if name not in NAMED_OF_ONE_SET | OF_ONE_RUN}
        # Of a recipe, which may be for any network; asked for, they are refused where they have no meaning.
        norm = norm_choice(saved.config.model)["name"]
        if norm not in ("batch_norm", "custom_batch_norm"):
            kept.pop("bn_momentum_start", None)
        if norm != saved.config.model.norm_layer["name"]:
            kept.pop("norm_layer", None)
        # Without a recipe: what the run's own gave is among its saved options.
        if network is None:
            model = cls(config="none", **kept | added)
        else:
            kept = {name: value for name, value in kept.items() if name not in network_options()}
            classes = {} if made else {"num_classes": len(manifest["class_names"])}
            shape = {} if made else {"input_shape": manifest["input"]["image_hwc"]}
            model = cls(network, config="none", **classes, **shape, **kept | added)
        asked = full_names(added, network is not None)
        model._carried = {name: value for name, value in kept.items() if name not in asked}
        return model._take(checkpoint, better)

    @speaks_python
    def load_weights(self, path: str | Path) -> "Model":
        """Take the weights of a checkpoint, or of a run's best one, made under any plan; return the model."""
        return self._take(*find_checkpoint(_run_here(path)))

    def _take(self, checkpoint: Checkpoint, better: str) -> "Model":
        names, form = tuple(checkpoint.manifest.get("class_names", ())), form_in(checkpoint)
        if self._network is None and names and form:
            self._network = build_network(self.config.model, len(names), form.image_hwc)
        saved = checkpoint.manifest["config"]["values"]
        loaded = self._weights = weights_in(checkpoint, better, self.network)
        self._spec = replace(
            self._spec,
            image_hwc=self.network.input_hwc,
            num_classes=self.network.num_classes,
            class_names=self._spec.class_names or loaded.class_names,
            image_dtype=loaded.image_dtype,
            normalization=form.normalization if form else "",
            channel_mean=form.mean if form else (),
            channel_std=form.std if form else (),
            task=str(saved.get("task", CLASSIFICATION.name)),
            scale=Scale(mean=tuple(saved.get("target_mean") or ()), std=tuple(saved.get("target_std") or ())),
        )
        return self

    def _resolve(self, options: Mapping[str, object], *, by_code: bool = False, aloud: bool = False) -> Resolved:
        """Return the configuration of options over the recipe; `by_code`: the data does not come from options.

        `aloud`: print what follows from the weights, which a run prints among its notes.
        """
        options = {"weights": self._weights_from, **options}
        if by_code:
            resolved = resolve_for_arrays(options, self._recipe)
        else:  # not the default, digits, for which options about image files are refused
            resolved = resolve_code({"dataset": "auto", **options}, self._recipe)
        if self._code_network is not None:
            return resolved
        settled = with_definition(resolved)
        if aloud:
            _say(definition_remarks(resolved, settled), settled.config)
        return settled

    def _image_options(self, given: GivenData) -> dict[str, Any]:
        """Return the options by which a dataset of files gets the images that the network takes."""
        if (self._network is None and not self._fixed_shape) or given.options.get("dataset") in IMAGE_SIZES:
            return {}
        return square_options(self._spec.image_hwc)

    def _evaluation_options(self, image_files: bool = False) -> dict[str, Any]:
        """Return the options of an evaluation: those of the last fit, without what applies only to its kind of data."""
        last = self._last_options
        left_out = ("eval_reduced_decoding",) if image_files else IMAGE_OPTIONS  # what a run did to save time
        kept = {name: last[name] for name in last if name not in left_out}
        return kept | {"training": False, "validation": True}

    def _not_for_resume(self, custom: CustomParts) -> set[str]:
        """Return the options that a resumed run takes from itself."""
        left_out = set(network_options()) | {"weights"}
        return left_out | (set(NAMED_OF_DATA) if custom.dataset else set())

    def _array_evaluation(self, config: Config, arrays: Any) -> DataSet:
        images, labels = arrays
        source = array_source(images, labels, self._known_spec())
        return array_dataset(config.data, self._known_spec(), None, source)

    def _evaluation_design(self, config: Config, dataset: DataSet, measured: CustomParts = NOTHING) -> Design:
        """Return a run that only validates this dataset."""
        custom = replace(measured, network=self.network, dataset=dataset)
        return design_run(with_some_batch(config), custom, current_group().num_processes)

    def _chosen(self, weights: str) -> str:
        """Return which weights are meant: auto are the better ones."""
        if weights != AUTO:
            return weights
        return self._weights.better if self._weights else RAW

    def _state(self, design: Design, weights: str) -> State:
        """Return the state to evaluate; refuse weights that the model does not have."""
        possible = (RAW, EMA) if self.config.learning.ema_decay > 0 else (RAW,)
        if self._weights:
            possible = tuple(self._weights.sets())
        refuse_weights(weights, possible)
        if self._weights:
            return self._weights.state(design.precision.weight_dtype)
        _devices(design)  # before anything else uses JAX: virtual devices may have to be created
        return starting_state(design)

    def _load_given_weights(self) -> None:
        """Read the file of weights that the model was made with, where no fit has done so."""
        if self._weights is not None or self._weights_from is None:
            return
        path = Path(self._weights_from).expanduser()
        if path.is_dir():
            self.load_weights(path)
            return
        if self._code_network is not None:
            loaded = load_file(self._weights_from, self._code_network, self.config)
        else:
            shape = zip(("image_size", "num_channels"), self._spec.image_hwc[1:], strict=True)
            asked = self._options | (dict(shape) if self._fixed_shape else {})
            loaded = load_named(self._weights_from, asked, self._spec.num_classes)
            known, form = self._spec.class_names, loaded.form
            _say((line for line in loaded.remarks if line.startswith("warning")), self.config)
            self._network = loaded.network
            self._spec = ImageSpec(
                image_hwc=loaded.network.input_hwc,
                num_classes=loaded.network.num_classes,
                class_names=known or loaded.class_names,
                image_dtype="uint8",
                normalization=form.normalization,
                channel_mean=form.mean,
                channel_std=form.std,
                task=self._spec.task,
                scale=self._spec.scale,
            )
        self._weights = replace(loaded, origin=path.name)

    def _usable(self, which: str, verb: str) -> Weights:
        """Return one set of the weights, ready to predict and to export."""
        trained, spec = self._need_weights(verb), self._known_spec()
        chosen = self._chosen(which)
        refuse_weights(chosen, tuple(trained.sets()))
        info = array_dataset(self.config.data, spec, None, None).info
        return replace(
            trained.only(chosen),
            label=chosen,
            class_names=self.class_names,
            input_form=InputForm.of_data(info, self.config),
            resolved=replace(self._resolved, config=replace(self.config, data=self._known_targets())),
            by_code=frozenset({"dataset"}),
        )

    def _known_targets(self) -> Data:
        """Return the options of the data with the task and the scale of its targets, which weights bring along."""
        scale = self._spec.scale
        means, stds = scale.mean or None, scale.std or None
        return replace(self.config.data, task=self._spec.task, target_mean=means, target_std=stds)

    def _remember(self, design: Design) -> None:
        self._network = self._code_network or design.network
        self._resolved = replace(self._resolved, config=design.config)
        self._spec = spec_of(design.info)

    def _known_spec(self) -> ImageSpec:
        """Return what images must be, with ImageNet's normalization where no training has decided it."""
        spec = replace(self._spec, image_hwc=self.network.input_hwc, num_classes=self.network.num_classes)
        decided = spec.normalization or self._code_network is not None
        return spec if decided else normalised_spec(spec, self.config.data)

    def _need_weights(self, verb: str) -> Weights:
        if self._weights is None:
            raise ConfigError(f"There is nothing to {verb} yet.", remedy="Call fit or load first.")
        return self._weights


def _run_here(path: str | Path) -> Path:
    """Return a path as it is, and the copy of a run or checkpoint in a store."""
    return here(local_text(path, accepted=STORES))


def _say(lines: Iterable[str], config: Config) -> None:
    """Print what follows from the weights, which a run prints among its notes."""
    if config.logging.progress != "none":
        for line in lines:
            print(line, file=sys.stderr)


def _devices(design: Design) -> list[Any]:
    return start_run_devices(design.config.run, design.plan.num_devices, design.plan.num_processes)


def _on_host(state: State, network: Network, origin: str) -> Weights:
    """Return the weights of a state as a value, float32 in host memory."""
    kept = {key: state[key] for key in ("params", "stats", "ema") if key in state}
    host = jax.device_get(jax.tree.map(lambda leaf: readable(leaf) if isinstance(leaf, jax.Array) else leaf, kept))
    return Weights(
        network=network,
        params=jax.tree.map(lambda w: w.astype(np.float32, copy=False), host["params"]),
        stats=host["stats"],
        ema=(host["ema"]["params"], host["ema"]["stats"]) if "ema" in host else None,
        origin=origin,
    )


def _arrays(weights: Weights) -> dict[str, Any]:
    return {"params": weights.params, "stats": weights.stats, "ema": weights.ema}
