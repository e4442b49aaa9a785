"""Predict the classes of pictures: files and folders in, probabilities of the best classes out."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.core.errors import DataError
from headrace.data.augmentation.augment import preprocess
from headrace.data.dataset import DataSet
from headrace.data.decoding.image import EXTENSIONS, BadPicture
from headrace.data.decoding.image_source import ViewSpec, show
from headrace.data.feeding.cache import fetch
from headrace.data.feeding.feed import EvalFeed, feed_options
from headrace.data.sets.samples import FileSamples
from headrace.engine.devices import replica_mesh, replicated, take
from headrace.engine.forward import EvalSpec, make_prediction
from headrace.engine.multiprocess_arrays import readable, transfer
from headrace.engine.step import put_on
from headrace.model.context import Ctx
from headrace.run.design import Design
from headrace.run.trained_model import TrainedModel
from headrace.run.training import own_share

_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The best classes of one picture, best first, as (class number, probability); or why it cannot be read."""

    file: Path
    best: tuple[tuple[int, float], ...] = ()
    problem: str = ""


def find_pictures(paths: Sequence[Path]) -> list[Path]:
    """Return the pictures that files and folders mean: files as given, folders searched through, sorted."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = (file for file in path.rglob("*") if file.suffix.lower() in EXTENSIONS and file.is_file())
            found += sorted(file for file in inside if not file.name.startswith("."))
        else:
            found.append(path)  # one that is not there is named with the unreadable ones
    if not found:
        raise DataError(
            f"There is no picture in {', '.join(map(str, paths)) or 'an empty list'}.",
            rule=f"Pictures are files that end in {', '.join(EXTENSIONS)}.",
        )
    return found


def forward(bundle: TrainedModel) -> Callable[[Any], dict[str, Any]]:
    """Return the network as a function of pixels (0 to 255): normalised inside, logits and probabilities out."""
    ctx = Ctx(train=False, compute_dtype=jnp.float32)

    def apply(images: Any) -> dict[str, Any]:
        inputs = preprocess(images, None, 0, bundle.preprocess, train=False)
        logits, _ = bundle.network.apply(bundle.params, bundle.stats, inputs, ctx)
        return {"logits": logits, "probabilities": jax.nn.softmax(logits)}

    return apply


def predict(bundle: TrainedModel, files: Sequence[Path], top_k: int = 5, batch_size: int = 32) -> Iterator[Prediction]:
    """Yield a prediction for every file, in order; batches all have one size, so one program is compiled."""
    height, _, channels = bundle.network.input_hwc
    look = ViewSpec(size=height, channels=channels, shorter_side=bundle.shorter_side, antialias=bundle.antialias)
    program = jax.jit(forward(bundle))
    size = min(batch_size, len(files))
    with ThreadPoolExecutor(_THREADS) as pool:
        for first in range(0, len(files), size):
            chosen = files[first : first + size]
            images = np.zeros((size, *bundle.network.input_hwc), np.uint8)
            problems = list(pool.map(lambda pair: _read(pair[0], look, pair[1]), zip(chosen, images, strict=False)))
            shares = np.asarray(program(images)["probabilities"])
            for file, problem, share in zip(chosen, problems, shares, strict=False):
                best = np.argsort(-share, kind="stable")[:top_k]
                found = tuple((int(number), float(share[number])) for number in best)
                yield Prediction(file=file, problem=problem) if problem else Prediction(file=file, best=found)


def _read(path: Path, look: ViewSpec, out: np.ndarray) -> str:
    """Decode a picture into `out`; return what is wrong with it, or nothing."""
    try:
        show(FileSamples(path.parent, [path.name], np.zeros(1, np.int32)), 0, 0, look, out, None)
    except BadPicture as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    return ""


# Predict every sample of a data set's validation split: the feed and the devices of an evaluation, logits out.


_BATCHES_PER_BLOCK = 16


def predict_all(design: Design, dataset: DataSet, devices: list[Any], weights: tuple[Any, Any]) -> np.ndarray:
    """Return the logits [N, classes] in float32 of these (params, stats), each replica with the whole network."""
    config, plan = design.config, design.plan.validation
    mesh = replica_mesh(take(devices, plan.num_replicas))
    options = feed_options(config.data, dataset.info, config.run.seed, plan.num_replicas)
    options = replace(options, share=own_share(design.plan))
    spec = EvalSpec(
        network=design.network,
        fetch=lambda resident, batch: fetch(resident, batch, options.preprocess, train=False),
        compute_dtype=design.precision.compute_dtype,
        half_partials=design.precision.half_partials,
        num_replicas=plan.num_replicas,
    )
    program = make_prediction(spec, mesh)
    params, stats = transfer(weights, replicated(mesh))
    with closing(EvalFeed(dataset.validation, plan.batch_size, _BATCHES_PER_BLOCK, options, put_on(mesh))) as feed:
        parts = [readable(program(params, stats, feed.resident, block)) for block in feed]
    logits = np.concatenate([part.reshape(-1, design.network.num_classes) for part in jax.device_get(parts)])
    return logits[: len(dataset.validation)]
