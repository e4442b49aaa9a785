"""Export a network as an ONNX model, from pixels (or preprocessed images) to logits and probabilities, and check it."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from headrace.core.errors import CheckpointError, ConfigError
from headrace.data.augmentation.augment import Preprocess
from headrace.data.augmentation.crop_resize import CUBIC_FAR, CUBIC_NEAR, CentreView
from headrace.model import activations, composite, gates, layers, norm
from headrace.model.network import Network
from headrace.ops.pool import Padding, pad_pixels, share_matrix

# The layers as ONNX nodes: a function for each that writes what the layer's `apply` computes in evaluation.
#
# Images are [N, C, H, W] inside the graph, as ONNX expects, so weights are transposed.


# The graph under construction: nodes and weights, named by the paths of their layers


OPSET = 18  # ReduceMean takes its axes as an input from here on; onnxruntime 1.14 and newer read it


@dataclass(frozen=True)
class Graph:
    """The nodes and weights so far (shared by all views of the graph), and the current path in the network."""

    nodes: list[Any] = field(default_factory=list)
    initializers: list[Any] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    path: str = ""
    dtype: Any = np.float32  # of weights, and of constants that are not whole numbers

    def under(self, name: str) -> "Graph":
        """Return a view of the graph for a part of this layer."""
        return replace(self, path=f"{self.path}/{name}" if self.path else name)

    def node(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node with one output; return the output's name."""
        from onnx import helper

        name = f"{self.path}/{kind}_{next(self.numbers)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def weight(self, name: str, array: object) -> str:
        """Add weights in the graph's type; return their name."""
        return self._add(f"{self.path}/{name}", np.asarray(array, self.dtype))

    def constant(self, array: object) -> str:
        """Add a constant, a floating-point one in the graph's type; return its name."""
        values = np.asarray(array)
        typed = values.astype(self.dtype) if values.dtype.kind == "f" else values
        return self._add(f"{self.path}/constant_{next(self.numbers)}", typed)

    def reshaped(self, x: str, shape: Sequence[int]) -> str:
        """Reshape; 0 keeps a dim, -1 takes the rest."""
        return self.node("Reshape", [x, self.constant(np.array(shape, np.int64))])

    def _add(self, name: str, array: np.ndarray) -> str:
        from onnx import numpy_helper

        # The reshape: ascontiguousarray makes a vector of a single number.
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name))
        return name


def require_onnx() -> Any:
    """Return the packages onnx and onnxruntime; if missing, refuse with instructions."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise ConfigError(
            f"ONNX export needs the package {error.name}.", remedy="pip install 'headrace[onnx]'"
        ) from error
    return onnx, onnxruntime


Shape = tuple[int, ...]
Trees = tuple[Mapping[str, Any], Mapping[str, Any]]
# (graph, layer, (params, stats), shape of one image here [H, W, C], name of the input) -> name of the output
Write = Callable[[Graph, Any, Trees, Shape, str], str]


def write_layer(graph: Graph, layer: object, trees: Trees, hwc: Shape, x: str) -> str:
    """Write a layer's nodes; return the name of its output."""
    write = LAYERS.get(type(layer))
    if write is None:
        raise ConfigError(
            f"The layer {type(layer).__name__} at {graph.path} has no form in ONNX.",
            rule="ONNX export knows the layers of the shipped networks.",
            remedy="Export with --format stablehlo, which knows every layer.",
        )
    return write(graph, layer, trees, hwc, x)


def _inside(trees: Trees, name: str) -> Trees:
    return trees[0].get(name, {}), trees[1].get(name, {})


def _pads(padding: Padding, hwc: Shape, window: int, stride: int) -> list[int]:
    (top, bottom), (left, right) = pad_pixels(padding, (hwc[0], hwc[1]), (window, window), stride)
    return [top, left, bottom, right]


def _conv(graph: Graph, layer: layers.Conv, trees: Trees, hwc: Shape, x: str) -> str:
    params = trees[0]
    inputs = [x, graph.weight("weight", np.transpose(params["kernel"], (3, 2, 0, 1)))]
    inputs += [graph.weight("bias", params["bias"])] if layer.bias else []
    return graph.node(
        "Conv",
        inputs,
        kernel_shape=[layer.kernel] * 2,
        strides=[layer.stride] * 2,
        pads=_pads(layer.padding, hwc, layer.kernel, layer.stride),
        group=layer.groups,
    )


def _dense(graph: Graph, layer: object, trees: Trees, hwc: Shape, x: str) -> str:
    return graph.node("Gemm", [x, graph.weight("weight", trees[0]["kernel"]), graph.weight("bias", trees[0]["bias"])])


def _activation(graph: Graph, kind: str, x: str) -> str:
    if kind == "relu":
        return graph.node("Relu", [x])
    if kind == "relu6":
        low, high = (graph.constant(np.float32(limit)) for limit in (0, 6))
        return graph.node("Clip", [x, low, high])
    if kind == "sigmoid":
        return graph.node("Sigmoid", [x])
    if kind == "swish":
        return graph.node("Mul", [x, graph.node("Sigmoid", [x])])
    if kind == "mish":
        return graph.node("Mul", [x, graph.node("Tanh", [graph.node("Softplus", [x])])])
    if kind == "gelu":  # x (1 + erf(x / sqrt 2)) / 2
        half, one, root = (graph.constant(np.float32(number)) for number in (0.5, 1, np.sqrt(0.5)))
        doubled = graph.node("Add", [graph.node("Erf", [graph.node("Mul", [x, root])]), one])
        return graph.node("Mul", [graph.node("Mul", [x, half]), doubled])
    if kind == "hard_sigmoid":
        return graph.node("HardSigmoid", [x], alpha=1 / 6, beta=0.5)
    assert kind == "hard_swish", kind
    return graph.node("Mul", [x, graph.node("HardSigmoid", [x], alpha=1 / 6, beta=0.5)])


def _max_pool(graph: Graph, layer: layers.MaxPool, trees: Trees, hwc: Shape, x: str) -> str:
    pads = _pads(layer.padding, hwc, layer.window, layer.stride)
    return graph.node("MaxPool", [x], kernel_shape=[layer.window] * 2, strides=[layer.stride] * 2, pads=pads)


def _average_pool(graph: Graph, layer: layers.AveragePool, trees: Trees, hwc: Shape, x: str) -> str:
    pads = _pads(layer.padding, hwc, layer.window, layer.stride)
    shape = {"kernel_shape": [layer.window] * 2, "strides": [layer.stride] * 2, "pads": pads}
    return graph.node("AveragePool", [x], count_include_pad=0, **shape)


def _resize(graph: Graph, layer: layers.ResizeByAverage, trees: Trees, hwc: Shape, x: str) -> str:
    if hwc[:2] == (layer.size, layer.size):
        return x
    down, across = (share_matrix(pixels, layer.size) for pixels in hwc[:2])
    return graph.node("MatMul", [graph.node("MatMul", [graph.constant(down), x]), graph.constant(across.T)])


def _mean(graph: Graph, layer: object, trees: Trees, hwc: Shape, x: str) -> str:
    return graph.node("ReduceMean", [x, graph.constant(np.array([2, 3]))], keepdims=0)


def _flatten(graph: Graph, layer: object, trees: Trees, hwc: Shape, x: str) -> str:
    """Flatten row by row with the channels last, as here."""
    if len(hwc) == 3:
        x = graph.node("Transpose", [x], perm=[0, 2, 3, 1])
    return graph.reshaped(x, [0, -1])


def _zero_pad(graph: Graph, layer: layers.ZeroPad, trees: Trees, hwc: Shape, x: str) -> str:
    (top, bottom), (left, right) = layer.pads
    return graph.node("Pad", [x, graph.constant(np.array([0, 0, top, left, 0, 0, bottom, right]))])


def _norm(graph: Graph, layer: norm.Norm, trees: Trees, hwc: Shape, x: str) -> str:
    spec = layer.spec
    if spec.kind == "none":
        return x
    params, stats = trees
    if spec.kind == "batch" and graph.dtype == np.float16:
        # One factor and one summand, computed here: variances may be too large or too small for 16 bits.
        scale = np.asarray(params["gamma"], np.float64) / np.sqrt(np.asarray(stats["variance"]) + spec.epsilon)
        shift = np.asarray(params["beta"]) - np.asarray(stats["mean"]) * scale
        by_channel = {name: each.reshape(1, hwc[2], 1, 1) for name, each in (("scale", scale), ("shift", shift))}
        scaled = graph.node("Mul", [x, graph.weight("scale", by_channel["scale"])])
        return graph.node("Add", [scaled, graph.weight("shift", by_channel["shift"])])
    if spec.kind == "batch":
        tensors = {"scale": params["gamma"], "shift": params["beta"], "mean": stats["mean"], "var": stats["variance"]}
        inputs = [x, *(graph.weight(name, array) for name, array in tensors.items())]
        return graph.node("BatchNormalization", inputs, epsilon=spec.epsilon)
    return _group_norm(graph, layer, params, hwc, x)


def _group_norm(graph: Graph, layer: norm.Norm, params: Mapping[str, Any], hwc: Shape, x: str) -> str:
    """Normalise [N, groups, rest] by instance norm; strided groups are gathered first and put back after."""
    height, width, channels = hwc
    groups = layer.groups(channels)
    count, strided = groups.num_groups, groups.order == "strided"
    if strided:
        x = graph.reshaped(x, [0, channels // count, count, height * width])
        x = graph.node("Transpose", [x], perm=[0, 2, 1, 3])
    x = graph.reshaped(x, [0, count, -1])
    ones, zeros = graph.constant(np.ones(count, np.float32)), graph.constant(np.zeros(count, np.float32))
    x = graph.node("InstanceNormalization", [x, ones, zeros], epsilon=layer.spec.epsilon)
    if strided:
        x = graph.reshaped(x, [0, count, channels // count, height * width])
        x = graph.node("Transpose", [x], perm=[0, 2, 1, 3])
    x = graph.reshaped(x, [0, channels, height, width])
    if not params:
        return x
    scale, shift = (np.reshape(params[name], (1, channels, 1, 1)) for name in ("gamma", "beta"))
    return graph.node("Add", [graph.node("Mul", [x, graph.weight("scale", scale)]), graph.weight("shift", shift)])


def _layer_norm(graph: Graph, layer: norm.LayerNorm, trees: Trees, hwc: Shape, x: str) -> str:
    """Normalise the channels of each pixel; ONNX does so for the last dims."""
    inputs = [graph.weight("scale", trees[0]["gamma"]), graph.weight("shift", trees[0]["beta"])]
    has_pixels = len(hwc) > 1
    x = graph.node("Transpose", [x], perm=[0, 2, 3, 1]) if has_pixels else x
    x = graph.node("LayerNormalization", [x, *inputs], axis=-1, epsilon=layer.epsilon)
    return graph.node("Transpose", [x], perm=[0, 3, 1, 2]) if has_pixels else x


def _layer_scale(graph: Graph, layer: object, trees: Trees, hwc: Shape, x: str) -> str:
    return graph.node("Mul", [x, graph.weight("scale", np.reshape(trees[0]["gamma"], (1, -1, *(1,) * (len(hwc) - 1))))])


def _chain(graph: Graph, layer: composite.Chain, trees: Trees, hwc: Shape, x: str) -> str:
    for name, inner in layer.layers:
        x = write_layer(graph.under(name), inner, _inside(trees, name), hwc, x)
        hwc = inner.shape(hwc)
    return x


def _residual(graph: Graph, layer: composite.Residual, trees: Trees, hwc: Shape, x: str) -> str:
    branches = [_chain(graph, branch, trees, hwc, x) for branch in (layer.body, layer.shortcut)]
    return graph.node("Add", branches)


def _concat(graph: Graph, layer: composite.Concat, trees: Trees, hwc: Shape, x: str) -> str:
    parts = [write_layer(graph.under(name), inner, _inside(trees, name), hwc, x) for name, inner in layer.layers]
    return graph.node("Concat", parts, axis=1)


def _subsample(graph: Graph, layer: composite.SubsampleShortcut, trees: Trees, hwc: Shape, x: str) -> str:
    far = np.iinfo(np.int64).max
    bounds = [np.array(values) for values in ([0, 0], [far, far], [2, 3], [layer.stride] * 2)]
    x = graph.node("Slice", [x, *(graph.constant(values) for values in bounds)])
    more = layer.channels - hwc[2]
    before = more // 2 if layer.both_sides else 0
    return graph.node("Pad", [x, graph.constant(np.array([0, before, 0, 0, 0, more - before, 0, 0]))])


def _squeeze_excite(graph: Graph, layer: gates.SqueezeExcite, trees: Trees, hwc: Shape, x: str) -> str:
    gate = _mean(graph, layer, trees, hwc, x)
    for name, kind in (("reduce", layer.activation), ("expand", layer.gate)):
        gate = _dense(graph.under(name), layer, _inside(trees, name), hwc, gate)
        gate = _activation(graph.under(name), kind, gate)
    return graph.node("Mul", [x, graph.reshaped(gate, [0, hwc[2], 1, 1])])


def _proxy(graph: Graph, layer: norm.ProxyActivation, trees: Trees, hwc: Shape, x: str) -> str:
    """Scale, shift, activate, and normalise by the proxy's moments, which follow from the weights alone."""
    gamma, beta, scale, shift = (np.asarray(trees[0][n]) for n in ("gamma", "beta", "proxy_scale", "proxy_shift"))
    gaussian = norm.quantiles()[:, None] * (1 + scale) + shift
    proxy = np.asarray(activations.ACTIVATIONS[layer.kind](jnp.asarray(gaussian * gamma + beta)))
    inverse = 1 / np.sqrt(proxy.var(0) + layer.epsilon)
    tensors = {"scale": gamma, "shift": beta, "mean": proxy.mean(0), "inverse": inverse}
    w = {name: graph.weight(name, array.reshape(1, hwc[2], 1, 1)) for name, array in tensors.items()}
    x = graph.node("Add", [graph.node("Mul", [x, w["scale"]]), w["shift"]])
    x = graph.node("Sub", [_activation(graph, layer.kind, x), w["mean"]])
    return graph.node("Mul", [x, w["inverse"]])


LAYERS: dict[type, Write] = {
    layers.Conv: _conv,
    layers.Dense: _dense,
    layers.Relu: lambda graph, layer, trees, hwc, x: _activation(graph, "relu", x),
    layers.MaxPool: _max_pool,
    layers.AveragePool: _average_pool,
    layers.ResizeByAverage: _resize,
    layers.GlobalAveragePool: _mean,
    layers.Flatten: _flatten,
    layers.ZeroPad: _zero_pad,
    norm.Norm: _norm,
    norm.LayerNorm: _layer_norm,
    gates.LayerScale: _layer_scale,
    composite.Chain: _chain,
    composite.Residual: _residual,
    composite.Concat: _concat,
    composite.SubsampleShortcut: _subsample,
    activations.Activation: lambda graph, layer, trees, hwc, x: _activation(graph, layer.kind, x),
    gates.SqueezeExcite: _squeeze_excite,
    norm.ProxyActivation: _proxy,
    gates.Dropout: lambda graph, layer, trees, hwc, x: x,  # nothing is dropped in evaluation
    gates.DropPath: lambda graph, layer, trees, hwc, x: x,
}


# The whole model, and its comparison with the network.


TOLERANCE = 1e-3  # relative to the logits: float32 sums differ in order, through up to 150 layers
_BATCHES = (1, 3)


@dataclass(frozen=True, kw_only=True)
class OnnxForm:
    """The type that the network computes in, and the view that it takes of images of any size (None: of one size)."""

    dtype: str = "float32"  # or float16; input, output, normalisation and softmax are float32 (or uint8) all the same
    view: CentreView | None = None


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
    graph.nodes.append(helper.make_node("Softmax", ["logits"], ["probabilities"], name="probabilities", axis=-1))
    kind = kinds.UINT8 if as_pixels else kinds.FLOAT
    rows, hw = ["batch", network.num_classes], ("height", "width") if form.view else network.input_hwc[:2]
    made = helper.make_graph(
        graph.nodes,
        network.name,
        [helper.make_tensor_value_info("images", kind, ["batch", *hw, network.input_hwc[2]])],
        [helper.make_tensor_value_info(name, kinds.FLOAT, rows) for name in ("logits", "probabilities")],
        graph.initializers,
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="headrace")
    model.ir_version = 8
    helper.set_model_props(model, {"headrace": json.dumps(along), "class_names": json.dumps(along["class_names"])})
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def check_onnx(
    data: bytes,
    network: Network,
    as_pixels: bool,
    expected: Callable[[Any], Any],
    batches: Sequence[np.ndarray] = (),
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
        logits, probabilities = session.run(["logits", "probabilities"], {"images": images})
        sums = np.asarray(probabilities).sum(-1)
        difference = compare_logits(("The ONNX model", network.name), logits, expected(images), tolerance)
        worst = max(worst, difference)
        assert np.allclose(sums, 1, atol=1e-4), sums
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
