"""Export a trained network for other programs: a file in their format, and a JSON description of input and classes.

Files are checked before they are written, and appear under their names only when they are complete.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.core.errors import ConfigError, did_you_mean
from headrace.core.files import write_atomic
from headrace.core.tensor_file import write_safetensors
from headrace.data.augmentation.augment import preprocess
from headrace.model.context import Ctx
from headrace.ops.backend import portable
from headrace.run.trained_model import TrainedModel
from headrace.weights.convert import export_names, flat_weights
from headrace.weights.onnx_file import check_onnx, write_onnx
from headrace.weights.torch_file import write_torch_file

PLATFORMS = ("cpu", "cuda", "tpu")
_STABLEHLO_LIMIT = 1e-4


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is written: the format, the names of torch-names, the input and the platforms of a whole network."""

    format: str
    names: str = ""
    input: str = "uint8"
    platforms: tuple[str, ...] = PLATFORMS


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file that was written, the description beside it, and a remark on the result of its check."""

    path: Path
    description: Path
    remark: str


def export(model: TrainedModel, out: Path | None, options: ExportOptions) -> Exported:
    """Write the network in a format; `out` defaults to a file in the directory of the run, named after the network."""
    if options.format not in FORMATS:
        raise ConfigError(f"There is no format {options.format!r}.", remedy=did_you_mean(options.format, FORMATS))
    suffix, make = FORMATS[options.format]
    path = out or _default_directory(model) / f"{model.network.name}{suffix}"
    if path.is_dir():
        path = path / f"{model.network.name}{suffix}"
    if not path.parent.is_dir():
        raise ConfigError(f"There is no directory {path.parent}.", remedy="Make it, or choose another --out.")
    data, more, remark = make(model, path, options)
    along = model.describe() | {"format": options.format} | more
    description = path.with_name(f"{path.name}.json")
    write_atomic(path, data)
    write_atomic(description, (json.dumps(along, indent=1, ensure_ascii=False) + "\n").encode())
    return Exported(path=path, description=description, remark=remark)


def _default_directory(model: TrainedModel) -> Path:
    run = model.checkpoint.parent.parent
    return run if (run / "config.json").is_file() else Path()


def _safetensors(model: TrainedModel, path: Path, options: ExportOptions) -> tuple[bytes, dict[str, Any], str]:
    arrays = {name: np.asarray(array) for name, array in flat_weights(model.params, model.stats).items()}
    return write_safetensors(arrays, model.describe()), {"names": "headrace"}, f"{len(arrays)} tensors"


def _torch_names(model: TrainedModel, path: Path, options: ExportOptions) -> tuple[bytes, dict[str, Any], str]:
    dialect = model.config.model.model_dialect
    asked = options.names or (dialect if dialect != "reference" else "")
    scheme, arrays = export_names(model.params, model.stats, asked, model.step)
    as_torch = path.suffix in (".pth", ".pt")
    data = write_torch_file(arrays) if as_torch else write_safetensors(arrays, model.describe())
    remark = f"{len(arrays)} tensors under the names of {scheme}"
    if dialect == "reference" and scheme in ("torchvision", "timm"):
        remark += (
            f"; padding, epsilon and shortcuts are the reference's: trained with --model-dialect {scheme}, a network "
            "loads there strictly and computes the same"
        )
    return data, {"names": scheme}, remark


def _onnx(model: TrainedModel, path: Path, options: ExportOptions) -> tuple[bytes, dict[str, Any], str]:
    as_pixels = options.input == "uint8"
    more = _input_form(model, options)
    weights = (model.params, model.stats)
    data = write_onnx(model.network, weights, model.preprocess, as_pixels, model.describe() | more)
    difference = check_onnx(data, model.network, as_pixels, _logits(model, as_pixels))
    return data, more, f"checked with onnxruntime: logits differ by at most {difference:.2g}"


def _stablehlo(model: TrainedModel, path: Path, options: ExportOptions) -> tuple[bytes, dict[str, Any], str]:
    unknown = [name for name in options.platforms if name not in (*PLATFORMS, "rocm")]
    if unknown:
        raise ConfigError(f"There is no platform {unknown[0]!r}.", remedy=did_you_mean(unknown[0], PLATFORMS))
    as_pixels = options.input == "uint8"
    (batch,) = jax.export.symbolic_shape("batch")
    images = jax.ShapeDtypeStruct((batch, *model.network.input_hwc), jnp.uint8 if as_pixels else jnp.float32)
    function = as_function(model, as_pixels)
    with portable():  # a convolution is lowered differently on each platform; this one's form would be slow elsewhere
        made = jax.export.export(jax.jit(function), platforms=options.platforms)(images)
    data = bytes(made.serialize())
    _check_stablehlo(data, model, as_pixels, options.platforms)
    more = _input_form(model, options) | {"platforms": list(options.platforms)}
    return data, more, f"for {', '.join(options.platforms)}; read it with jax.export.deserialize"


def _check_stablehlo(data: bytes, model: TrainedModel, as_pixels: bool, platforms: tuple[str, ...]) -> None:
    """Compare what was serialised with the network, where it can run on this machine."""
    here = jax.default_backend()
    if ("cuda" if here == "gpu" else here) not in platforms:
        return
    pixels = np.random.default_rng(0).integers(0, 256, (2, *model.network.input_hwc)).astype(np.uint8)
    images = pixels if as_pixels else pixels.astype(np.float32) / 255
    found = np.asarray(jax.export.deserialize(bytearray(data)).call(images)["logits"])
    expected = np.asarray(_logits(model, as_pixels)(images))
    assert np.abs(found - expected).max() <= _STABLEHLO_LIMIT * max(1.0, float(np.abs(expected).max()))


def _input_form(model: TrainedModel, options: ExportOptions) -> dict[str, Any]:
    pixels = "uint8 pixels, 0 to 255, resized and cropped; normalised inside"
    ready = "float32, resized, cropped and normalised"
    height, width, channels = model.network.input_hwc
    form = pixels if options.input == "uint8" else ready
    return {"input": {"name": "images", "shape": ["batch", height, width, channels], "what": form}}


def as_function(model: TrainedModel, as_pixels: bool) -> Callable[[Any], dict[str, Any]]:
    """Return the network as a function of pixels (0 to 255, normalised inside) or of normalised numbers."""

    def apply(images: Any) -> dict[str, Any]:
        inputs = preprocess(images, None, 0, model.preprocess, train=False) if as_pixels else images
        logits, _ = model.network.apply(model.params, model.stats, inputs, Ctx(train=False))
        return {"logits": logits, "probabilities": jax.nn.softmax(logits)}

    return apply


def _logits(model: TrainedModel, as_pixels: bool) -> Callable[[Any], Any]:
    program = jax.jit(as_function(model, as_pixels))
    return lambda images: program(images)["logits"]


FORMATS: dict[str, tuple[str, Callable[..., tuple[bytes, dict[str, Any], str]]]] = {
    "safetensors": (".safetensors", _safetensors),
    "torch-names": (".torch.safetensors", _torch_names),
    "onnx": (".onnx", _onnx),
    "stablehlo": (".stablehlo", _stablehlo),
}
