"""Predict the classes of image files: files and folders in, probabilities of the best classes out."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.core.errors import DataError
from headrace.data.augmentation.augment import preprocess
from headrace.data.decoding.image import EXTENSIONS, BadImage
from headrace.data.decoding.image_source import ViewSpec, decode_into
from headrace.data.sets.samples import FileSamples
from headrace.engine.devices import replica_mesh
from headrace.engine.forward import PROBABILITIES, EvalSpec, WholeForward
from headrace.run.trained_model import TrainedModel

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
            found.append(path)  # one that does not exist is reported with the unreadable ones
    if not found:
        raise DataError(
            f"There is no image in {', '.join(map(str, paths)) or 'an empty list'}.",
            rule=f"Images are files that end in {', '.join(EXTENSIONS)}.",
        )
    return found


def predict(
    model: TrainedModel, files: Sequence[Path], top_k: int = 5, batch_size: int = 32, *, keep_shares: bool = False
) -> Iterator[Prediction]:
    """Yield a prediction for every file, in order; batches all have one size, so one program is compiled."""
    size = min(batch_size, len(files))
    forward = WholeForward(replica_mesh(jax.local_devices()[:1]), _forward_spec(model))
    weights, program = forward.place((model.params, model.stats)), None
    with ThreadPoolExecutor(_THREADS) as pool:
        for first in range(0, len(files), size):
            chosen = files[first : first + size]
            # Always of the full size: the last batch is padded with black images, and needs no second program.
            images = np.zeros((size, *model.network.input_hwc), np.uint8)
            problems = list(pool.map(lambda pair: read_image(model, *pair), zip(chosen, images, strict=False)))
            block = forward.put({"images": images[None]}, "batches")
            program = program or forward.compile(weights, None, block)
            shares = np.asarray(program(weights, None, block))[0]
            for file, problem, share in zip(chosen, problems, shares, strict=False):
                best = np.argsort(-share, kind="stable")[:top_k]
                found = tuple((int(number), float(share[number])) for number in best)
                if problem:
                    yield Prediction(file=file, problem=problem)
                else:
                    shares = tuple(map(float, share)) if keep_shares else ()
                    yield Prediction(file=file, best=found, shares=shares)


def labels_by_folder(files: Sequence[Path], names: Sequence[str]) -> list[int]:
    """Return the class of each file by the name of its folder; nothing if some folder names no class."""
    numbers = {name: number for number, name in enumerate(names)}
    found = [numbers.get(file.absolute().parent.name) for file in files]
    return [number for number in found if number is not None] if None not in found else []


def _forward_spec(model: TrainedModel) -> EvalSpec:
    def fetch(_resident: Any, batch: dict[str, Any]) -> tuple[Any, None]:
        return preprocess(batch["images"], None, 0, model.preprocess, train=False), None

    return EvalSpec(
        network=model.network, fetch=fetch, compute_dtype=jnp.float32, num_replicas=1, reducer=PROBABILITIES
    )


def read_image(model: TrainedModel, path: Path, out: np.ndarray) -> str:
    """Decode an image into `out` as the model's validation does; return what is wrong with it, or nothing."""
    height, _, channels = model.network.input_hwc
    view = ViewSpec(
        size=height,
        channels=channels,
        shorter_side=model.shorter_side,
        antialias=model.antialias,
        bicubic=model.interpolation == "bicubic",
    )
    try:
        decode_into(FileSamples(path.parent, [path.name], np.zeros(1, np.int32)), 0, 0, view, out, None)
    except BadImage as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    return ""
