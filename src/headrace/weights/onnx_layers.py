"""The layers as ONNX nodes: a function for each that writes what the layer's `apply` computes in evaluation.

Images are [N, C, H, W] inside the graph, as ONNX expects, so weights are transposed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from headrace.core.errors import ConfigError
from headrace.model import activations, composite, gates, layers, norm
from headrace.ops.pool import Padding, pad_pixels, share_matrix
from headrace.weights.onnx_graph import Graph

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


def _blur_pool(graph: Graph, layer: layers.BlurPool, trees: Trees, hwc: Shape, x: str) -> str:
    around = [int(size > 1) for size in hwc[:2]]
    mirrored = graph.node("Pad", [x, graph.constant(np.array([0, 0, *around] * 2))], mode="reflect")
    # A side of one pixel cannot be mirrored: all three weights are its own.
    sides = (np.array([1, 2, 1], np.float32) / 4 if each else np.ones(1, np.float32) for each in around)
    weights = np.multiply.outer(*sides)
    kernel = graph.constant(np.tile(weights, (hwc[2], 1, 1, 1)))
    shape = {"kernel_shape": list(weights.shape), "strides": [layer.stride] * 2}
    return graph.node("Conv", [mirrored, kernel], group=hwc[2], **shape)


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
    layers.BlurPool: _blur_pool,
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
