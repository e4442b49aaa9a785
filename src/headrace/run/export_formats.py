"""Export a trained network for other programs: a file in their format, and a JSON description of input and classes."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.core.errors import CheckpointError, ConfigError, DataError, HeadraceError, did_you_mean
from headrace.core.files import sync_directory, write_synced
from headrace.core.rng import generator
from headrace.core.tensor_file import write_safetensors
from headrace.data.augmentation.crop_resize import CentreView, centre_view
from headrace.data.augmentation.preprocess import preprocess
from headrace.data.dataset import open_dataset
from headrace.data.decoding.crop import valid_view
from headrace.data.decoding.image import BadImage, decode, read_header
from headrace.data.decoding.image_source import ImageSource
from headrace.data.decoding.resize import Resampling, View, resize_view
from headrace.data.sets.source import Source
from headrace.ops.tracing import portable
from headrace.run.prediction import find_images
from headrace.run.trained_model import TrainedModel
from headrace.weights.convert import export_names, flat_weights, load_into
from headrace.weights.onnx_file import OnnxForm, check_onnx, compare_logits, write_onnx
from headrace.weights.torch_file import write_torch_file
from headrace.weights.weight_file import read_file

# Real images to check exports with: given files, those of the run's validation, or generated ones.


NUM_IMAGES = 8


@dataclass(frozen=True, kw_only=True)
class CheckImages:
    """Images [h, w, C] as they were decoded, each of its own size, and what they are."""

    images: tuple[np.ndarray, ...]
    what: str

    def views(self, model: TrainedModel) -> np.ndarray:
        """Return what validation takes of the images: [n, H, W, C], of the network's size."""
        return np.stack([_view_of_file(image, model) for image in self.images])


def check_images(model: TrainedModel, given: Sequence[Path] = ()) -> CheckImages:
    """Return images to check an export of the model with, and say in words which."""
    channels = model.network.input_hwc[2]
    if given:
        files = find_images(given)[:NUM_IMAGES]
        images = tuple(_read(file, channels) for file in files)
        return CheckImages(images=images, what=f"{len(images)} given image{'s' if len(images) > 1 else ''}")
    if not model.names_dataset:
        return _generated(model, "the run's images were given by code")
    try:
        dataset = open_dataset(model.config.data, model.config.run.seed)
    except HeadraceError as error:
        return _generated(model, f"the run's dataset is not at hand: {error.problem}")
    if dataset.info.synthetic_on or not len(dataset.validation):
        return _generated(model, "the run's dataset has no real validation images")
    if dataset.validation.image_hwc[2] != channels:
        return _generated(model, "the images of the run's dataset have another number of channels")
    images = _of_validation(dataset.validation, channels)
    if not images:
        return _generated(model, "none of the validation images tried can be read")
    return CheckImages(images=images, what=f"{len(images)} validation image{'s' * (len(images) > 1)}")


def network_input(views: np.ndarray, model: TrainedModel) -> np.ndarray:
    """Return views as the network takes them: normalised."""
    return np.asarray(preprocess(views, None, 0, model.preprocess, train=False))


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
    if isinstance(source, ImageSource):
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


def _generated(model: TrainedModel, why: str) -> CheckImages:
    """Return smooth random images: the noise of a few pixels, enlarged, as photographs have large areas."""
    height, width, channels = model.network.input_hwc
    rng, images = generator(0, "export/check"), []
    for number in range(NUM_IMAGES):
        coarse = rng.integers(0, 256, (6 + number, 7 + number, channels)).astype(np.uint8)
        image = np.empty((height + 16 * (number % 3), width + 16 * (number % 2), channels), np.uint8)
        resize_view(coarse, View((0, 0, *coarse.shape[:2]), image.shape[:2]), image)
        images.append(image)
    return CheckImages(images=tuple(images), what=f"{NUM_IMAGES} generated images ({why})")


def _view_of_file(image: np.ndarray, model: TrainedModel) -> np.ndarray:
    """Return what validation takes of an image; one of the network's size stays as it is."""
    height, width, _ = model.network.input_hwc
    if image.shape[:2] == (height, width) and (model.shorter_side in (None, height) or image.dtype != np.uint8):
        return image
    out = np.empty(model.network.input_hwc, np.uint8)
    view = valid_view(image.shape[:2], height, model.shorter_side)
    resize_view(image, view, out, Resampling(model.antialias, model.interpolation == "bicubic"))
    return out


# The formats.


PLATFORMS = ("cpu", "cuda", "tpu")
DTYPES = ("float32", "float16")
# Of the largest logit. float16 has 11 bits; a resized pixel may differ by a level from the one that validation makes.
_TOLERANCES = {"float32": 1e-3, "float16": 2e-2}
_RESIZED_TOLERANCE = 1e-2


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is written: the format, its numbers, the names of torch-names, the input of a whole network, the check."""

    format: str
    names: str = ""
    input: str = "uint8"
    platforms: tuple[str, ...] = PLATFORMS
    dtype: str = "float32"
    with_preprocessing: bool = False  # the network takes pixels of any size: resize and crop are part of it
    check_images: tuple[Path, ...] = ()  # [the run's validation images]

    @property
    def as_pixels(self) -> bool:
        """Whether the network takes pixels from 0 to 255."""
        return self.input == "uint8"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file that was written, the description beside it, and remarks on it and on the result of its check."""

    path: Path
    description: Path
    remark: str


@dataclass(frozen=True, kw_only=True)
class _Made:
    """The bytes of an export, what its description says besides, and a remark."""

    data: bytes
    more: dict[str, Any]
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class _Format:
    """A format: the suffix of its files, whether it holds a network, and how it is made and checked."""

    suffix: str
    network: bool
    make: Callable[[TrainedModel, Path, ExportOptions], _Made]
    # (file, model, options, images) -> (largest difference of logits, by what it was checked)
    check: Callable[[Path, TrainedModel, ExportOptions, CheckImages], tuple[float, str]]


def export_model(model: TrainedModel, out: Path | None, options: ExportOptions) -> Exported:
    """Write the network in a format; `out` defaults to a file in the directory of the run, named after the network."""
    if options.format not in FORMATS:
        raise ConfigError(f"There is no format {options.format!r}.", remedy=did_you_mean(options.format, FORMATS))
    form = FORMATS[options.format]
    _refuse(model, options, form)
    path = out or _default_directory(model) / f"{model.network.name}{form.suffix}"
    if path.is_dir():
        path = path / f"{model.network.name}{form.suffix}"
    if not path.parent.is_dir():
        raise ConfigError(f"There is no directory {path.parent}.", remedy="Make it, or choose another --out.")
    images = check_images(model, options.check_images)
    made = form.make(model, path, options)
    description = path.with_name(f"{path.name}.json")
    # Both or none: a file without the description of its input would be guessed at.
    temporary = [each.with_name(f".{each.name}.tmp-{os.getpid()}") for each in (path, description)]
    try:
        write_synced(temporary[0], made.data)
        # Before the file gets its name: what fails its check never replaces a file that worked.
        difference, checker = form.check(temporary[0], model, options, images)
        along = model.describe() | {"format": options.format, "dtype": options.dtype} | made.more
        along["check"] = {"images": images.what, "by": checker, "largest_logit_difference": difference}
        write_synced(temporary[1], (json.dumps(along, indent=1, ensure_ascii=False) + "\n").encode())
        for each, name in zip(temporary, (path, description), strict=True):
            each.replace(name)
    except OSError as error:
        raise CheckpointError(
            f"Cannot write {path}: {error.strerror}.", remedy="Name another place with --out."
        ) from error
    finally:
        for each in temporary:
            each.unlink(missing_ok=True)
    sync_directory(path.parent)
    result = f"checked {checker} on {images.what}: logits differ by at most {difference:.2g}"
    return Exported(path=path, description=description, remark="\n".join(filter(None, (made.remark, result))))


def _refuse(model: TrainedModel, options: ExportOptions, form: _Format) -> None:
    """Refuse options that the format or the network cannot follow."""
    if options.dtype not in DTYPES:
        raise ConfigError(f"There is no type {options.dtype!r}.", remedy=did_you_mean(options.dtype, DTYPES))
    if not options.with_preprocessing:
        return
    height, width, _ = model.network.input_hwc
    if not form.network:
        raise ConfigError(
            f"--with-preprocessing has no meaning for --format {options.format}.",
            rule="It holds weights alone.",
            remedy="Choose --format onnx or stablehlo.",
        )
    if not options.as_pixels:
        raise ConfigError(
            "--with-preprocessing takes pixels, --input float numbers that have been normalised.",
            remedy="Leave one of them out.",
        )
    if height != width:
        raise ConfigError(
            f"{model.network.name} takes images of {height} x {width} pixels.",
            rule="--with-preprocessing cuts a square from the centre of an image.",
            remedy="Leave --with-preprocessing out.",
        )


def format_of(path: Path) -> str:
    """Return the format that a file's suffix stands for."""
    suffixes = {form.suffix: name for name, form in FORMATS.items()} | dict.fromkeys((".pth", ".pt"), "torch-names")
    if path.suffix not in suffixes:
        raise ConfigError(
            f"The format of {path.name} is not known.",
            rule=f"It follows from the suffix ({', '.join(suffixes)}), or is given: {', '.join(FORMATS)}.",
            remedy="Give the format: --format onnx, in Python format='onnx'.",
        )
    return suffixes[path.suffix]


def _default_directory(model: TrainedModel) -> Path:
    run = model.checkpoint.parent.parent
    return run if (run / "config.json").is_file() else Path()


def _view(model: TrainedModel, options: ExportOptions) -> CentreView | None:
    """Return the view that is part of the exported network, None where it takes images of its own size."""
    if not options.with_preprocessing:
        return None
    side = model.describe()["resize_shorter_side"]
    return CentreView(
        size=model.network.input_hwc[0],
        shorter_side=side,
        antialias=model.antialias,
        bicubic=model.interpolation == "bicubic",
    )


# Weights


def _safetensors(model: TrainedModel, path: Path, options: ExportOptions) -> _Made:
    arrays = _typed(flat_weights(model.params, model.stats), options.dtype)
    data = write_safetensors(arrays, model.describe())
    return _Made(data=data, more={"names": "headrace"}, remark=f"{len(arrays)} tensors")


def _torch_names(model: TrainedModel, path: Path, options: ExportOptions) -> _Made:
    dialect = model.config.model.model_dialect
    scheme, found = export_names(model.params, model.stats, options.names, model.step, dialect)
    arrays = _typed(found, options.dtype)
    as_torch = path.suffix in (".pth", ".pt")
    data = write_torch_file(arrays) if as_torch else write_safetensors(arrays, model.describe())
    remark = f"{len(arrays)} tensors under the names of {scheme}"
    if dialect in ("reference", "keras") and scheme in ("torchvision", "timm"):
        remark += (
            f"; padding, epsilon and shortcuts are those of {dialect}: trained with --model-dialect {scheme}, a "
            "network loads there strictly and computes the same"
        )
    return _Made(data=data, more={"names": scheme}, remark=remark)


def _typed(arrays: dict[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """Return the arrays with floating-point ones in this type."""
    host = {name: np.asarray(array) for name, array in arrays.items()}
    return {name: array.astype(dtype) if array.dtype.kind == "f" else array for name, array in host.items()}


def _check_weights(file: Path, model: TrainedModel, options: ExportOptions, images: CheckImages) -> tuple[float, str]:
    """Load the file into the network as --init-from would, every tensor of it, and compare what it computes."""
    loaded = load_into(model.network, (model.params, model.stats), read_file(file), min_share=1.0)
    inputs = network_input(images.views(model), model)
    program = jax.jit(lambda params, stats, x: model.network.apply(params, stats, x, model.context())[0])
    found, expected = (program(each.params, each.stats, inputs) for each in (loaded, model))
    return compare_logits(
        ("The file", model.network.name), found, expected, _TOLERANCES[options.dtype]
    ), "by loading it again"


# Whole networks


def _onnx(model: TrainedModel, path: Path, options: ExportOptions) -> _Made:
    more = _input_form(model, options)
    form = OnnxForm(dtype=options.dtype, view=_view(model, options))
    along = model.describe() | {"dtype": options.dtype} | more
    data = write_onnx(model.network, (model.params, model.stats), model.preprocess, options.as_pixels, along, form)
    return _Made(data=data, more=more)


def _check_onnx(file: Path, model: TrainedModel, options: ExportOptions, images: CheckImages) -> tuple[float, str]:
    batches, expected = _batches(model, options, images)
    answers = iter(expected)
    difference = check_onnx(
        file.read_bytes(), model.network, options.as_pixels, lambda _: next(answers), batches, _tolerance(options)
    )
    return difference, "with onnxruntime"


def _stablehlo(model: TrainedModel, path: Path, options: ExportOptions) -> _Made:
    unknown = [name for name in options.platforms if name not in (*PLATFORMS, "rocm")]
    if unknown:
        raise ConfigError(f"There is no platform {unknown[0]!r}.", remedy=did_you_mean(unknown[0], PLATFORMS))
    data = _lowered(model, options, options.platforms)
    more = _input_form(model, options) | {"platforms": list(options.platforms)}
    return _Made(
        data=data, more=more, remark=f"for {', '.join(options.platforms)}; read it with jax.export.deserialize"
    )


def _lowered(model: TrainedModel, options: ExportOptions, platforms: tuple[str, ...]) -> bytes:
    batch, *hw = jax.export.symbolic_shape("batch, height, width")
    height, width, channels = model.network.input_hwc
    shape = (batch, *(hw if options.with_preprocessing else (height, width)), channels)
    images = jax.ShapeDtypeStruct(shape, jnp.uint8 if options.as_pixels else jnp.float32)
    function = as_function(model, options.as_pixels, options.dtype, _view(model, options))
    with portable():  # a convolution is lowered differently on each platform; this one's form would be slow elsewhere
        return bytes(jax.export.export(jax.jit(function), platforms=platforms)(images).serialize())


def _check_stablehlo(file: Path, model: TrainedModel, options: ExportOptions, images: CheckImages) -> tuple[float, str]:
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    data, where = file.read_bytes(), f"on {here}"
    if here not in options.platforms:  # the file cannot run on this machine
        data, where = _lowered(model, options, (here,)), f"on {here}, the same network lowered for it,"
    batches, expected = _batches(model, options, images)
    call, worst = jax.export.deserialize(bytearray(data)).call, 0.0
    for batch, answer in zip(batches, expected, strict=True):
        worst = max(
            worst,
            compare_logits(("The StableHLO", model.network.name), call(batch)["logits"], answer, _tolerance(options)),
        )
    return worst, where


def _batches(
    model: TrainedModel, options: ExportOptions, images: CheckImages
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return batches to run an exported network on, of more than one batch size, and the network's logits for each."""
    inputs = network_input(images.views(model), model)
    logits = np.asarray(jax.jit(as_function(model, False))(inputs)["logits"])
    if not options.with_preprocessing:
        batch = images.views(model) if options.as_pixels else inputs
        return [batch[:1], batch], [logits[:1], logits]
    each = [image[None] for image in images.images]
    return [*each, np.repeat(each[0], 2, 0)], [*(row[None] for row in logits), np.repeat(logits[:1], 2, 0)]


def _tolerance(options: ExportOptions) -> float:
    exact = _TOLERANCES[options.dtype]
    return max(exact, _RESIZED_TOLERANCE) if options.with_preprocessing else exact


def _input_form(model: TrainedModel, options: ExportOptions) -> dict[str, Any]:
    height, width, channels = model.network.input_hwc
    sides: Sequence[int | str] = (height, width)
    form = "uint8 pixels, 0 to 255, resized and cropped; normalised inside"
    if options.with_preprocessing:
        sides = ("height", "width")
        form = "uint8 pixels, 0 to 255, of images of any size (one in a batch); resized, cropped and normalised inside"
    elif not options.as_pixels:
        form = "float32, resized, cropped and normalised"
    return {"input": {"name": "images", "shape": ["batch", *sides, channels], "what": form}}


def as_function(
    model: TrainedModel, as_pixels: bool, dtype: str = "float32", view: CentreView | None = None
) -> Callable[[Any], dict[str, Any]]:
    """Return the network as a function of pixels (0 to 255, normalised inside) or of normalised numbers.

    With a view, the function takes pixels of any size, and resizes and crops them.
    """
    params = model.params
    if dtype != "float32":
        params = jax.tree.map(lambda array: np.asarray(array).astype(dtype), params)

    def apply(images: Any) -> dict[str, Any]:
        images = centre_view(images, view) if view is not None else images
        inputs = preprocess(images, None, 0, model.preprocess, train=False) if as_pixels else images
        logits, _ = model.network.apply(params, model.stats, inputs, model.context(jnp.dtype(dtype)))
        return {"logits": logits, "probabilities": jax.nn.softmax(logits)}

    return apply


FORMATS: dict[str, _Format] = {
    "safetensors": _Format(suffix=".safetensors", network=False, make=_safetensors, check=_check_weights),
    "torch-names": _Format(suffix=".torch.safetensors", network=False, make=_torch_names, check=_check_weights),
    "onnx": _Format(suffix=".onnx", network=True, make=_onnx, check=_check_onnx),
    "stablehlo": _Format(suffix=".stablehlo", network=True, make=_stablehlo, check=_check_stablehlo),
}
