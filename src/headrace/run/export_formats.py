"""Hand a trained network to other programs: a file in their format, with its input, output and classes described.

Whatever is written was checked first, and is put under its name only when it is whole.
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
    """A file that was written, its description beside it, and what was found out about it."""

    path: Path
    described: Path
    told: str


def export(bundle: TrainedModel, out: Path | None, options: ExportOptions) -> Exported:
    """Write the network in a format; `out` defaults to a name of the run in the directory of its checkpoints' run."""
    if options.format not in FORMATS:
        raise ConfigError(f"There is no format {options.format!r}.", remedy=did_you_mean(options.format, FORMATS))
    suffix, make = FORMATS[options.format]
    path = out or _default_place(bundle) / f"{bundle.network.name}{suffix}"
    if path.is_dir():
        path = path / f"{bundle.network.name}{suffix}"
    if not path.parent.is_dir():
        raise ConfigError(f"There is no directory {path.parent}.", remedy="Make it, or choose another --out.")
    data, more, told = make(bundle, path, options)
    along = bundle.describe() | {"format": options.format} | more
    described = path.with_name(f"{path.name}.json")
    write_atomic(path, data)
    write_atomic(described, (json.dumps(along, indent=1, ensure_ascii=False) + "\n").encode())
    return Exported(path=path, described=described, told=told)


def _default_place(bundle: TrainedModel) -> Path:
    run = bundle.checkpoint.parent.parent
    return run if (run / "config.json").is_file() else Path()


def _safetensors(bundle: TrainedModel, path: Path, options: ExportOptions) -> tuple[bytes, dict[str, Any], str]:
    arrays = {name: np.asarray(array) for name, array in flat_weights(bundle.params, bundle.stats).items()}
    return write_safetensors(arrays, bundle.describe()), {"names": "headrace"}, f"{len(arrays)} tensors"


def _torch_names(bundle: TrainedModel, path: Path, options: ExportOptions) -> tuple[bytes, dict[str, Any], str]:
    dialect = bundle.config.model.model_dialect
    asked = options.names or (dialect if dialect != "reference" else "")
    scheme, arrays = export_names(bundle.params, bundle.stats, asked, bundle.step)
    as_torch = path.suffix in (".pth", ".pt")
    data = write_torch_file(arrays) if as_torch else write_safetensors(arrays, bundle.describe())
    told = f"{len(arrays)} tensors under the names of {scheme}"
    if dialect == "reference" and scheme in ("torchvision", "timm"):
        told += (
            f"; padding, epsilon and shortcuts are the reference's: trained with --model-dialect {scheme}, a network "
            "loads there strictly and computes the same"
        )
    return data, {"names": scheme}, told


def _onnx(bundle: TrainedModel, path: Path, options: ExportOptions) -> tuple[bytes, dict[str, Any], str]:
    as_pixels = options.input == "uint8"
    more = _input_form(bundle, options)
    weights = (bundle.params, bundle.stats)
    data = write_onnx(bundle.network, weights, bundle.preprocess, as_pixels, bundle.describe() | more)
    difference = check_onnx(data, bundle.network, as_pixels, _logits(bundle, as_pixels))
    return data, more, f"checked with onnxruntime: logits differ by at most {difference:.2g}"


def _stablehlo(bundle: TrainedModel, path: Path, options: ExportOptions) -> tuple[bytes, dict[str, Any], str]:
    unknown = [name for name in options.platforms if name not in (*PLATFORMS, "rocm")]
    if unknown:
        raise ConfigError(f"There is no platform {unknown[0]!r}.", remedy=did_you_mean(unknown[0], PLATFORMS))
    as_pixels = options.input == "uint8"
    (batch,) = jax.export.symbolic_shape("batch")
    images = jax.ShapeDtypeStruct((batch, *bundle.network.input_hwc), jnp.uint8 if as_pixels else jnp.float32)
    function = as_function(bundle, as_pixels)
    with portable():  # a convolution has another form on each platform; the host's alone would be slow elsewhere
        made = jax.export.export(jax.jit(function), platforms=options.platforms)(images)
    data = bytes(made.serialize())
    _check_stablehlo(data, bundle, as_pixels, options.platforms)
    more = _input_form(bundle, options) | {"platforms": list(options.platforms)}
    return data, more, f"for {', '.join(options.platforms)}; read it with jax.export.deserialize"


def _check_stablehlo(data: bytes, bundle: TrainedModel, as_pixels: bool, platforms: tuple[str, ...]) -> None:
    """Run what was serialised where it can run here, beside the network."""
    here = jax.default_backend()
    if ("cuda" if here == "gpu" else here) not in platforms:
        return
    pixels = np.random.default_rng(0).integers(0, 256, (2, *bundle.network.input_hwc)).astype(np.uint8)
    images = pixels if as_pixels else pixels.astype(np.float32) / 255
    found = np.asarray(jax.export.deserialize(bytearray(data)).call(images)["logits"])
    own = np.asarray(_logits(bundle, as_pixels)(images))
    assert np.abs(found - own).max() <= _STABLEHLO_LIMIT * max(1.0, float(np.abs(own).max()))


def _input_form(bundle: TrainedModel, options: ExportOptions) -> dict[str, Any]:
    pixels = "uint8 pixels, 0 to 255, resized and cropped; normalised inside"
    ready = "float32, resized, cropped and normalised"
    height, width, channels = bundle.network.input_hwc
    form = pixels if options.input == "uint8" else ready
    return {"input": {"name": "images", "shape": ["batch", height, width, channels], "what": form}}


def as_function(bundle: TrainedModel, as_pixels: bool) -> Callable[[Any], dict[str, Any]]:
    """Return the network as a function of pixels (0 to 255, normalised inside) or of normalised numbers."""

    def apply(images: Any) -> dict[str, Any]:
        inputs = preprocess(images, None, 0, bundle.preprocess, train=False) if as_pixels else images
        logits, _ = bundle.network.apply(bundle.params, bundle.stats, inputs, Ctx(train=False))
        return {"logits": logits, "probabilities": jax.nn.softmax(logits)}

    return apply


def _logits(bundle: TrainedModel, as_pixels: bool) -> Callable[[Any], Any]:
    program = jax.jit(as_function(bundle, as_pixels))
    return lambda images: program(images)["logits"]


FORMATS: dict[str, tuple[str, Callable[..., tuple[bytes, dict[str, Any], str]]]] = {
    "safetensors": (".safetensors", _safetensors),
    "torch-names": (".torch.safetensors", _torch_names),
    "onnx": (".onnx", _onnx),
    "stablehlo": (".stablehlo", _stablehlo),
}
