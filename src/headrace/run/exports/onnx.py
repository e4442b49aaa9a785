"""The whole network as ONNX, checked in onnxruntime."""

from pathlib import Path

from headrace.run.check_images import CheckImages
from headrace.run.exports.values import ExportOptions, Made
from headrace.run.exports.whole_network import batches_of, centre_view_of, describe_input, tolerance_of
from headrace.weights.onnx_file import OnnxForm, check_onnx, write_onnx
from headrace.weights.weights import Weights


def make(weights: Weights, path: Path, options: ExportOptions) -> Made:
    """Return the file."""
    more = describe_input(weights, options)
    form = _form(weights, options)
    along = weights.describe() | {"dtype": options.dtype} | more
    data = write_onnx(weights.network, weights.raw, weights.form.preprocess, options.as_pixels, along, form)
    return Made(data=data, more=more)


def _form(weights: Weights, options: ExportOptions) -> OnnxForm:
    view = centre_view_of(weights, options)
    return OnnxForm(dtype=options.dtype, view=view, task=weights.task, scale=weights.scale)


def check(file: Path, weights: Weights, options: ExportOptions, images: CheckImages) -> tuple[float, str]:
    """Run the file beside the network."""
    batches, expected = batches_of(weights, options, images)
    answers = iter(expected)
    difference = check_onnx(
        file.read_bytes(),
        weights.network,
        options.as_pixels,
        lambda _: next(answers),
        batches,
        _form(weights, options),
        tolerance_of(options),
    )
    return difference, "with onnxruntime"
