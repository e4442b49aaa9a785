"""Real images to check exports with: given files, those of the run's validation, or generated ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.core.errors import DataError, HeadraceError
from headrace.core.rng import generator
from headrace.data.augmentation.preprocess import preprocess
from headrace.data.dataset import open_dataset
from headrace.data.decoding.crop import valid_view
from headrace.data.decoding.image import BadImage, decode, read_header
from headrace.data.decoding.resize import Resampling, View, resize_view
from headrace.data.sets.source import Source
from headrace.run.prediction import find_images
from headrace.weights.input_form import InputForm
from headrace.weights.weights import Weights

NUM_IMAGES = 8


@dataclass(frozen=True, kw_only=True)
class CheckImages:
    """Images [h, w, C] as they were decoded, each of its own size, and what they are."""

    images: tuple[np.ndarray, ...]
    what: str

    def views(self, form: InputForm) -> np.ndarray:
        """Return what validation takes of the images: [n, H, W, C], of the network's size."""
        return np.stack([_view_of_file(image, form) for image in self.images])


def check_images(weights: Weights, given: Sequence[Path] = ()) -> CheckImages:
    """Return images to check an export of the model with, and say in words which."""
    channels = weights.network.input_hwc[2]
    if given:
        files = find_images(given)[:NUM_IMAGES]
        images = tuple(_read(file, channels) for file in files)
        return CheckImages(images=images, what=f"{len(images)} given image{'s' if len(images) > 1 else ''}")
    if "dataset" in weights.by_code:
        return _generated(weights, "the run's images were given by code")
    try:
        dataset = open_dataset(weights.config.data, weights.config.run.seed)
    except HeadraceError as error:
        return _generated(weights, f"the run's dataset is not at hand: {error.problem}")
    if dataset.info.synthetic_on or not len(dataset.validation):
        return _generated(weights, "the run's dataset has no real validation images")
    if dataset.validation.image_hwc[2] != channels:
        return _generated(weights, "the images of the run's dataset have another number of channels")
    images = _of_validation(dataset.validation, channels)
    if not images:
        return _generated(weights, "none of the validation images tried can be read")
    return CheckImages(images=images, what=f"{len(images)} validation image{'s' * (len(images) > 1)}")


def network_input(views: np.ndarray, form: InputForm) -> np.ndarray:
    """Return views as the network takes them: normalised."""
    return np.asarray(preprocess(views, None, 0, form.preprocess, train=False))


def _of_validation(source: Source, channels: int) -> tuple[np.ndarray, ...]:
    # Spread over the split, which may be sorted by class.
    chosen = np.unique(np.linspace(0, len(source) - 1, NUM_IMAGES).astype(int)).tolist()
    images = []
    for number in chosen:
        try:
            images.append(_decoded(source, number, channels))
        except BadImage:
            continue
    return tuple(images)


def _decoded(source: Source, number: int, channels: int) -> np.ndarray:
    """Return a sample as it is stored where the source decodes images, else as it is read."""
    if source.samples is not None:
        data = source.samples.content(number)[0]
        if isinstance(data, bytes):
            return decode(data, read_header(data), channels)
    return source.read(np.array([number]), 0)[0]


def _read(file: Path, channels: int) -> np.ndarray:
    try:
        data = file.read_bytes()
        return decode(data, read_header(data), channels)
    except (OSError, BadImage) as error:
        raise DataError(f"Cannot read {file}: {error}.", remedy="Give other images with --check-images.") from error


def _generated(weights: Weights, why: str) -> CheckImages:
    """Return smooth random images: the noise of a few pixels, enlarged, as photographs have large areas."""
    height, width, channels = weights.network.input_hwc
    rng, images = generator(0, "export/check"), []
    for number in range(NUM_IMAGES):
        coarse = rng.integers(0, 256, (6 + number, 7 + number, channels)).astype(np.uint8)
        image = np.empty((height + 16 * (number % 3), width + 16 * (number % 2), channels), np.uint8)
        resize_view(coarse, View((0, 0, *coarse.shape[:2]), image.shape[:2]), image)
        images.append(image)
    return CheckImages(images=tuple(images), what=f"{NUM_IMAGES} generated images ({why})")


def _view_of_file(image: np.ndarray, form: InputForm) -> np.ndarray:
    """Return what validation takes of an image; one of the network's size stays as it is."""
    height, width, _ = form.image_hwc
    if image.shape[:2] == (height, width) and (form.shorter_side in (None, height) or image.dtype != np.uint8):
        return image
    out = np.empty(form.image_hwc, np.uint8)
    view = valid_view(image.shape[:2], height, form.shorter_side)
    resize_view(image, view, out, Resampling(form.antialias, form.interpolation == "bicubic"))
    return out
