"""Predict the classes of images, from files and folders: probabilities with names."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.config.field import COMMAND_LINE
from headrace.config.layers import Given
from headrace.config.load import with_values
from headrace.core.errors import ConfigError, DataError
from headrace.data.decoding.image import EXTENSIONS, BadImage
from headrace.data.decoding.image_source import ViewSpec, decode_into
from headrace.data.feeding.fetch import FetchImages
from headrace.data.sets.samples import FileSamples, Samples
from headrace.engine.devices import replica_mesh
from headrace.engine.forward import LOGITS, EvalSpec, WholeForward
from headrace.engine.ready import outputs
from headrace.rows.row import Task
from headrace.rows.tasks import CLASSIFICATION, MULTILABEL, REGRESSION
from headrace.weights.input_form import InputForm
from headrace.weights.weights import Weights

_SHOWN, _CLASSES = 10, 3  # images and classes in a text
_HALF = 0.5  # a label of a greater probability is answered


@dataclass(frozen=True, kw_only=True, repr=False)
class Predicted:
    """The prediction for one image: its classes or labels, best first; targets in their order, with their values.

    `problem` says why a file could not be read.
    """

    source: str  # the file, or the number of the image
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]
    problem: str = ""
    task: Task = CLASSIFICATION

    @property
    def name(self) -> str:
        """The best class."""
        return self.classes[0] if self.classes else ""

    @property
    def probability(self) -> float:
        """The probability of the best class."""
        return self.probabilities[0] if self.probabilities else float("nan")

    def __repr__(self) -> str:
        best = zip(self.classes[:_CLASSES], self.probabilities, strict=False)
        texts = [f"{name} {self.task.text(value)}" for name, value in best]
        return f"{self.source}: {', '.join(texts) or self.problem}"


class Predictions(Sequence[Predicted]):
    """Predictions for images, in their order: `probabilities` [N, classes], `labels` and `names` [N].

    A file that could not be read has NaN everywhere, and the label -1. Of a regression `values` [N, targets] are the
    numbers; of several labels `labels` [N, labels] says which ones are more likely than not, `names` has theirs.
    """

    def __init__(
        self,
        probabilities: np.ndarray,
        class_names: Sequence[str],
        files: Sequence[Path] = (),
        problems: Sequence[str] = (),
        task: Task = CLASSIFICATION,
    ) -> None:
        self.probabilities, self.class_names, self.files = probabilities, tuple(class_names), tuple(files)
        self.task = task
        self.problems = tuple(problems) or ("",) * len(probabilities)

    @property
    def values(self) -> np.ndarray:
        """The answers [N, outputs]: the targets of a regression, else the probabilities."""
        return self.probabilities

    @property
    def labels(self) -> np.ndarray:
        """The number of the best class of each image; of several labels, which are likelier than not."""
        if self.task is REGRESSION:
            raise ConfigError("A regression has no labels.", remedy="`values` are its numbers.")
        if self.task is MULTILABEL:
            return self.probabilities > _HALF
        readable = ~np.isnan(self.probabilities).any(1)
        return np.where(readable, np.nan_to_num(self.probabilities).argmax(1), -1)

    @property
    def names(self) -> list[Any]:
        """The name of the best class of each image; of several labels, the names of those that it has."""
        if self.task is MULTILABEL:
            return [tuple(self.class_names[k] for k in np.flatnonzero(row)) for row in self.labels]
        return [self.class_names[label] if label >= 0 else "" for label in self.labels]

    def __len__(self) -> int:
        return len(self.probabilities)

    def __getitem__(self, number: Any) -> Any:
        """Return the prediction of an image, or several of them for a slice."""
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        shares = self.probabilities[number]
        order = order_of(shares, self.task) if not self.problems[number] else []
        return Predicted(
            source=str(self.files[number]) if self.files else f"image {range(len(self))[number]}",
            classes=tuple(self.class_names[i] for i in order),
            probabilities=tuple(float(shares[i]) for i in order),
            problem=self.problems[number],
            task=self.task,
        )

    def __iter__(self) -> Iterator[Predicted]:
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        rows = [repr(one) for one in self[:_SHOWN]]
        return "\n".join([*rows, *([f"... and {len(self) - _SHOWN:,} more"] if len(self) > _SHOWN else [])])

    def _repr_html_(self) -> str:
        """Return the same as lines of HTML, for a notebook."""
        return "".join(f"<div>{escape(line)}</div>" for line in repr(self).splitlines())


def order_of(answers: np.ndarray, task: Task) -> np.ndarray:
    """Return the numbers of the outputs as people are told them: the best first, targets in their order."""
    return np.argsort(-answers, kind="stable") if task.are_shares else np.arange(len(answers))


# From files and folders to probabilities.


_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The best classes of one image, best first, as (class number, probability); or why it cannot be read."""

    file: Path
    best: tuple[tuple[int, float], ...] = ()
    problem: str = ""
    shares: tuple[float, ...] = ()  # the probabilities of all classes, where they were asked for


def find_images(paths: Sequence[Path]) -> list[Path]:
    """Return the image files: files as given, folders searched recursively and sorted."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = (file for file in path.rglob("*") if file.suffix.lower() in EXTENSIONS and file.is_file())
            found += sorted(file for file in inside if not file.name.startswith("."))
        else:
            found.append(path)  # one that cannot be read, or does not exist, is reported with the others
    if not found:
        raise DataError(
            f"There is no image in {', '.join(map(str, paths)) or 'an empty list'}.",
            rule=f"Images are files that end in {', '.join(EXTENSIONS)}.",
        )
    return found


def predict(
    weights: Weights, files: Sequence[Path], top_k: int = 5, batch_size: int = 32, *, keep_shares: bool = False
) -> Iterator[Prediction]:
    """Yield a prediction for every file, in order."""
    for file, problem, logits in _outputs(weights, files, batch_size):
        if problem:
            yield Prediction(file=file, problem=problem)
            continue
        share = weights.answers(logits[None])[0]
        best = order_of(share, weights.task)[: top_k if weights.task.are_shares else None]
        yield Prediction(
            file=file,
            best=tuple((int(number), float(share[number])) for number in best),
            shares=tuple(map(float, share)) if keep_shares else (),
        )


def logits_of(weights: Weights, files: Sequence[Path], batch_size: int = 32) -> np.ndarray:
    """Return the logits [N, classes] of files, in order; one that cannot be read is refused."""
    rows = []
    for file, problem, row in _outputs(weights, files, batch_size):
        if problem:
            raise DataError(
                f"{file}: {problem.rstrip('.')}.",
                rule="logits returns numbers alone, a row for each image.",
                remedy="Leave it out; predict says which files cannot be read.",
            )
        rows.append(row)
    return np.stack(rows)


def _outputs(weights: Weights, files: Sequence[Path], batch_size: int) -> Iterator[tuple[Path, str, np.ndarray]]:
    """Yield (file, why it cannot be read, logits); batches all have one size, so one program is compiled."""
    size = min(batch_size, len(files))
    forward = WholeForward(replica_mesh(jax.local_devices()[:1]), _forward_spec(weights))
    batches = [files[first : first + size] for first in range(0, len(files), size)]
    form, problems = weights.form, list[list[str]]()
    with ThreadPoolExecutor(_THREADS) as pool:

        def blocks() -> Iterator[Any]:
            for batch in batches:
                # Always of the full size: the last batch is padded with black images, and needs no second program.
                images = np.zeros((size, *form.image_hwc), np.uint8)
                problems.append(list(pool.map(lambda pair: read_image(form, *pair), zip(batch, images, strict=False))))
                yield forward.put({"images": images[None]}, "batches")

        for batch, output in zip(batches, outputs(forward, weights.raw, blocks()), strict=True):
            yield from zip(batch, problems.pop(), np.asarray(output)[0], strict=False)


def labels_by_folder(files: Sequence[Path], names: Sequence[str]) -> list[int]:
    """Return the class of each file by the name of its folder; nothing if some folder names no class."""
    numbers = {name: number for number, name in enumerate(names)}
    found = [numbers.get(file.absolute().parent.name) for file in files]
    return [number for number in found if number is not None] if None not in found else []


def _forward_spec(weights: Weights) -> EvalSpec:
    return EvalSpec(
        network=weights.network,
        fetch=FetchImages(weights.form.preprocess.with_seed(0)),
        compute_dtype=jnp.float32,
        num_replicas=1,
        matmul_precision=weights.config.numerics.matmul_precision,
        stable_norm=weights.config.model.stable_norm,
        reducer=LOGITS,
        flip=weights.config.validation.validation_flip,
        shift=weights.config.validation.validation_shift,
    )


def with_flip(weights: Weights, flip: bool | None) -> Weights:
    """Return weights that predict the mean of the scores of an image and of its mirror image, or that do not.

    None leaves it to the run: it predicts as it validates.
    """
    if flip is None or weights.resolved is None:
        return weights
    said = Given(value=flip, origin=COMMAND_LINE)
    return replace(weights, resolved=with_values(weights.resolved, {"validation_flip": said}))


def read_sample(form: InputForm, samples: Samples, out: np.ndarray) -> None:
    """Decode the first of some images into `out` as validation does; BadImage says what is wrong with it."""
    height, _, channels = form.image_hwc
    view = ViewSpec(
        size=height,
        channels=channels,
        shorter_side=form.shorter_side,
        antialias=form.antialias,
        bicubic=form.interpolation == "bicubic",
    )
    decode_into(samples, 0, 0, view, out, None)


def read_image(form: InputForm, path: Path, out: np.ndarray) -> str:
    """Decode an image file into `out` as validation does; return what is wrong with it, or nothing."""
    try:
        read_sample(form, FileSamples(path.parent, [path.name], np.zeros(1, np.int32)), out)
    except BadImage as error:
        return str(error) if path.exists() else "the file does not exist"
    except OSError as error:
        return error.strerror or str(error)
    return ""
