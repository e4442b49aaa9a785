"""Export a network as an ONNX model, from pixels (or preprocessed images) to logits and probabilities, and check it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.core.errors import CheckpointError
from headrace.data.augmentation.crop_resize import CUBIC_FAR, CUBIC_NEAR, CentreView
from headrace.data.augmentation.preprocess import Preprocess
from headrace.model.network import Network
from headrace.rows.row import NO_SCALE, Scale, Task
from headrace.rows.tasks import CLASSIFICATION, MULTILABEL
from headrace.weights.onnx_graph import OPSET, Graph, require_onnx
from headrace.weights.onnx_layers import write_layer

TOLERANCE = 1e-3  # relative to the logits: float32 sums differ in order, through up to 150 layers
_BATCHES = (1, 3)


@dataclass(frozen=True, kw_only=True)
class OnnxForm:
    """The type that the network computes in, and the view that it takes of images of any size (None: of one size)."""

    dtype: str = "float32"  # or float16; input, output, normalisation and softmax are float32 (or uint8) all the same
    view: CentreView | None = None
    task: Task = CLASSIFICATION
    scale: Scale = NO_SCALE  # of the targets of a regression


PLAIN = OnnxForm()


def write_onnx(
    network: Network,
    weights: tuple[Any, Any],
    preprocess: Preprocess,
    as_pixels: bool,
    along: dict[str, Any],
    form: OnnxForm = PLAIN,
) -> bytes:
    """Return the model's bytes. Input `images` [N, H, W, C]: uint8 pixels, or float32, already preprocessed."""
    onnx, _ = require_onnx()
    helper, kinds = onnx.helper, onnx.TensorProto
    plain, half = Graph(), form.dtype == "float16"
    graph = replace(plain, dtype=np.dtype(form.dtype).type)
    first = plain.under("input")
    x = _resized(first, form.view) if form.view else "images"
    x = _normalised(first, preprocess, x) if as_pixels else x
    x = first.node("Transpose", [x], perm=[0, 3, 1, 2])
    x = first.node("Cast", [x], to=kinds.FLOAT16) if half else x
    for (name, block), shape in zip(network.blocks, network.shapes(), strict=False):
        trees = (weights[0].get(name, {}), weights[1].get(name, {}))
        x = write_layer(graph.under(name), block, trees, shape, x)
    last = helper.make_node("Cast", [x], ["logits"], name="logits", to=kinds.FLOAT)
    graph.nodes.append(last if half else helper.make_node("Identity", [x], ["logits"], name="logits"))
    _answers(plain, form)
    kind = kinds.UINT8 if as_pixels else kinds.FLOAT
    rows, hw = ["batch", network.num_classes], ("height", "width") if form.view else network.input_hwc[:2]
    made = helper.make_graph(
        graph.nodes,
        network.name,
        [helper.make_tensor_value_info("images", kind, ["batch", *hw, network.input_hwc[2]])],
        [helper.make_tensor_value_info(name, kinds.FLOAT, rows) for name in ("logits", form.task.answers)],
        graph.initializers,
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="headrace")
    model.ir_version = 8
    helper.set_model_props(model, {"headrace": json.dumps(along), "class_names": json.dumps(along["class_names"])})
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def _answers(graph: Graph, form: OnnxForm) -> None:
    """Write what the outputs say, in float32: `probabilities`, or `values` in the units of their targets."""
    name = form.task.answers
    helper = require_onnx()[0].helper
    if form.task is CLASSIFICATION:
        graph.nodes.append(helper.make_node("Softmax", ["logits"], [name], name=name, axis=-1))
    elif form.task is MULTILABEL:
        graph.nodes.append(helper.make_node("Sigmoid", ["logits"], [name], name=name))
    else:
        last = graph.under("values")
        mean, std = (last.constant(np.array([each], np.float32)) for each in (form.scale.mean, form.scale.std))
        scaled = last.node("Mul", ["logits", std])
        graph.nodes.append(helper.make_node("Add", [scaled, mean], [name], name=name))


def check_onnx(
    data: bytes,
    network: Network,
    as_pixels: bool,
    expected: Callable[[Any], Any],
    batches: Sequence[np.ndarray] = (),
    form: OnnxForm = PLAIN,
    tolerance: float = TOLERANCE,
) -> float:
    """Compare the model in onnxruntime with the network; return the largest difference of logits, refuse a large one.

    `expected(images)` returns the network's logits. Without `batches` two are generated, of different sizes.
    """
    _, runtime = require_onnx()
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    rng, worst = np.random.default_rng(0), 0.0
    if not batches:
        shapes = [(count, *network.input_hwc) for count in _BATCHES]
        batches = [rng.integers(0, 256, shape).astype(np.uint8) for shape in shapes]
        batches = batches if as_pixels else [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    for images in batches:
        logits, answers = map(np.asarray, session.run(["logits", form.task.answers], {"images": images}))
        difference = compare_logits(("The ONNX model", network.name), logits, expected(images), tolerance)
        worst = max(worst, difference)
        told = form.task.answer(logits, form.scale)
        assert np.allclose(answers, told, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(told).max()))), answers
    return worst


def compare_logits(names: tuple[str, str], found: object, expected: object, tolerance: float) -> float:
    """Return the largest difference of logits; refuse one beyond the tolerance, relative to the largest logit.

    `names`: what the export and the network are called in the message.
    """
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    difference, limit = float(np.abs(found - expected).max()), tolerance * max(1.0, float(np.abs(expected).max()))
    if difference <= limit and np.isfinite(expected).all():
        return difference
    raise CheckpointError(
        f"{names[0]} does not compute what {names[1]} does: logits differ by {difference:.3g}.",
        rule=f"They may differ by {limit:.3g}. The file was not kept.",
        remedy="Please report it; --format stablehlo holds the network itself, --dtype float32 its full precision.",
    )


def _resized(graph: Graph, view: CentreView) -> str:
    """Write `centre_view` (data/augmentation/crop_resize.py): [N, any height, any width, C] in, uint8 or float32 out.

    Products with matrices of weights, which every runtime has; few of them resize with antialiasing as Pillow does.
    """
    shape = graph.node("Shape", ["images"])
    sides = [graph.node("Gather", [shape, graph.constant(np.array([axis]))]) for axis in (1, 2)]
    shorter = graph.node("Min", sides)
    rows, columns = (_view_matrix(graph, side, shorter, view) for side in sides)
    x = graph.node("Transpose", [graph.node("Cast", ["images"], to=1)], perm=[0, 3, 1, 2])
    # Across first, as Pillow does, and rounded in between; the plain form is one interpolation.
    x = graph.node("MatMul", [x, graph.node("Transpose", [columns], perm=[1, 0])])
    x = _rounded(graph, x) if view.antialias else x
    x = _rounded(graph, graph.node("MatMul", [rows, x]))
    return graph.node("Transpose", [x], perm=[0, 2, 3, 1])


def _rounded(graph: Graph, x: str) -> str:
    levels = graph.node("Floor", [graph.node("Add", [x, graph.constant(np.float32(0.5))])])
    return graph.node("Clip", [levels, graph.constant(np.float32(0)), graph.constant(np.float32(255))])


def _view_matrix(graph: Graph, side: str, shorter: str, view: CentreView) -> str:
    """Write the weights of the old pixels of one side, whose number is `side`, in the new ones: [size, side]."""

    def whole(number: int) -> str:
        return graph.constant(np.array([number]))

    def number(value: float) -> str:
        return graph.constant(np.float32(value))

    resized = graph.node("Div", [graph.node("Mul", [side, whole(view.shorter_side)]), shorter])
    outside = graph.node("Sub", [resized, whole(view.size)])
    # Half of it, as `valid_view` rounds: halves go to the even number.
    up = graph.node("Equal", [graph.node("Mod", [outside, whole(4)]), whole(3)])
    first = graph.node("Div", [graph.node("Add", [outside, graph.node("Cast", [up], to=7)]), whole(2)])
    scale = graph.node("Div", [graph.node("Cast", [side], to=1), graph.node("Cast", [resized], to=1)])
    places = graph.node("Add", [graph.constant(np.arange(view.size)[:, None]), first])
    centre = graph.node("Mul", [graph.node("Add", [graph.node("Cast", [places], to=1), number(0.5)]), scale])
    end = graph.node("Squeeze", [side, whole(0)])
    pixels = graph.node(
        "Cast", [graph.node("Range", [graph.constant(np.int64(0)), end, graph.constant(np.int64(1))])], to=1
    )
    distance = graph.node("Abs", [graph.node("Sub", [graph.node("Add", [pixels, number(0.5)]), centre])])
    wide = graph.node("Max", [scale, number(1)]) if view.antialias else number(1)
    far = graph.node("Div", [distance, wide])
    weights = graph.node("Max", [graph.node("Sub", [number(1), far]), number(0)])
    if view.bicubic:
        near, outer = (_polynomial(graph, far, each) for each in (CUBIC_NEAR, CUBIC_FAR))
        outer = graph.node("Where", [graph.node("Less", [far, number(2)]), outer, number(0)])
        weights = graph.node("Where", [graph.node("Less", [far, number(1)]), near, outer])
    return graph.node("Div", [weights, graph.node("ReduceSum", [weights, whole(1)], keepdims=1)])


def _polynomial(graph: Graph, x: str, factors: Sequence[float]) -> str:
    value = graph.constant(np.float32(factors[0]))
    for factor in factors[1:]:
        value = graph.node("Add", [graph.node("Mul", [value, x]), graph.constant(np.float32(factor))])
    return value


def _normalised(graph: Graph, spec: Preprocess, x: str) -> str:
    """Write the normalisation of pixels from 0 to 255, [N, H, W, C] in and out."""
    _, _, channels = spec.image_hwc
    x = graph.node("Cast", [x], to=1)
    if spec.normalization == "none":
        return x
    if spec.normalization == "zero-one":
        return graph.node("Mul", [x, graph.constant(np.float32(1 / 255))])
    if spec.normalization == "per-image":
        return _per_image(graph, spec, x)
    assert spec.normalization in ("per-channel", "centred"), spec.normalization
    mean, std = (np.array(each, np.float64) for each in (spec.mean, spec.std))
    assert mean.shape in ((channels,), (1,))
    centred = graph.node("Sub", [x, graph.constant((255 * mean).astype(np.float32))])
    if spec.normalization == "centred":
        return centred
    return graph.node("Mul", [centred, graph.constant((1 / (255 * std)).astype(np.float32))])


def _per_image(graph: Graph, spec: Preprocess, x: str) -> str:
    """Write (x - mean) / max(deviation, 1 / sqrt(number of values)) of each image."""
    axes = graph.constant(np.array([1, 2, 3]))
    centred = graph.node("Sub", [x, graph.node("ReduceMean", [x, axes], keepdims=1)])
    variance = graph.node("ReduceMean", [graph.node("Mul", [centred, centred]), axes], keepdims=1)
    least = graph.constant(np.float32(1 / np.sqrt(np.prod(spec.image_hwc))))
    return graph.node("Div", [centred, graph.node("Max", [graph.node("Sqrt", [variance]), least])])
