"""Export a network as an ONNX model, from pixels (or preprocessed images) to logits and probabilities, and check it."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.core.errors import CheckpointError
from headrace.data.augmentation.augment import Preprocess
from headrace.model.network import Network
from headrace.weights.onnx_layers import OPSET, Graph, require_onnx, write_layer

_TOLERANCE = 1e-3  # relative to the logits: float32 sums differ in order, through up to 150 layers
_BATCHES = (1, 3)


def write_onnx(
    network: Network, weights: tuple[Any, Any], preprocess: Preprocess, as_pixels: bool, along: dict[str, Any]
) -> bytes:
    """Return the model's bytes. Input `images` [N, H, W, C]: uint8 pixels, or float32, already preprocessed."""
    onnx, _ = require_onnx()
    helper, kinds = onnx.helper, onnx.TensorProto
    graph = Graph()
    x = _normalised(graph.under("input"), preprocess) if as_pixels else "images"
    x = graph.under("input").node("Transpose", [x], perm=[0, 3, 1, 2])
    for (name, block), shape in zip(network.blocks, network.shapes(), strict=False):
        trees = (weights[0].get(name, {}), weights[1].get(name, {}))
        x = write_layer(graph.under(name), block, trees, shape, x)
    graph.nodes.append(helper.make_node("Identity", [x], ["logits"], name="logits"))
    graph.nodes.append(helper.make_node("Softmax", ["logits"], ["probabilities"], name="probabilities", axis=-1))
    kind = kinds.UINT8 if as_pixels else kinds.FLOAT
    rows = ["batch", network.num_classes]
    made = helper.make_graph(
        graph.nodes,
        network.name,
        [helper.make_tensor_value_info("images", kind, ["batch", *network.input_hwc])],
        [helper.make_tensor_value_info(name, kinds.FLOAT, rows) for name in ("logits", "probabilities")],
        graph.initializers,
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="headrace")
    model.ir_version = 8
    helper.set_model_props(model, {"headrace": json.dumps(along), "class_names": json.dumps(along["class_names"])})
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def check_onnx(data: bytes, network: Network, as_pixels: bool, expected: Callable[[Any], Any]) -> float:
    """Compare the model in onnxruntime with the network; return the largest difference of logits, refuse a large one.

    `expected(images)` returns the network's logits. Two batch sizes prove that the batch size is free.
    """
    _, runtime = require_onnx()
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    rng, worst = np.random.default_rng(0), 0.0
    for count in _BATCHES:
        images = rng.integers(0, 256, (count, *network.input_hwc)).astype(np.uint8)
        if not as_pixels:
            images = rng.normal(size=images.shape).astype(np.float32)
        logits, probabilities = session.run(["logits", "probabilities"], {"images": images})
        reference = np.asarray(expected(images))
        difference = float(np.abs(logits - reference).max())
        limit = _TOLERANCE * max(1.0, float(np.abs(reference).max()))
        if not (
            difference <= limit and np.isfinite(reference).all() and np.allclose(probabilities.sum(-1), 1, atol=1e-4)
        ):
            raise CheckpointError(
                f"The ONNX model does not compute what {network.name} does: logits differ by {difference:.3g}.",
                rule=f"They may differ by {limit:.3g}. The file was not kept.",
                remedy="Please report it; --format stablehlo holds the network itself.",
            )
        worst = max(worst, difference)
    return worst


def _normalised(graph: Graph, spec: Preprocess) -> str:
    """Write the normalisation of pixels from 0 to 255, [N, H, W, C] in and out."""
    _, _, channels = spec.image_hwc
    x = graph.node("Cast", ["images"], to=1)
    if spec.normalization == "none":
        return x
    if spec.normalization == "zero-one":
        return graph.node("Mul", [x, graph.constant(np.float32(1 / 255))])
    if spec.normalization == "per-channel":
        mean, std = (np.array(each, np.float64) for each in (spec.mean, spec.std))
        centre, scale = (255 * mean).astype(np.float32), (1 / (255 * std)).astype(np.float32)
    else:
        assert spec.normalization == "per-image", spec.normalization
        return _per_image(graph, spec, x)
    assert centre.shape in ((channels,), (1,))
    return graph.node("Mul", [graph.node("Sub", [x, graph.constant(centre)]), graph.constant(scale)])


def _per_image(graph: Graph, spec: Preprocess, x: str) -> str:
    """Write (x - mean) / max(deviation, 1 / sqrt(number of values)) of each image."""
    axes = graph.constant(np.array([1, 2, 3]))
    centred = graph.node("Sub", [x, graph.node("ReduceMean", [x, axes], keepdims=1)])
    variance = graph.node("ReduceMean", [graph.node("Mul", [centred, centred]), axes], keepdims=1)
    least = graph.constant(np.float32(1 / np.sqrt(np.prod(spec.image_hwc))))
    return graph.node("Div", [centred, graph.node("Max", [graph.node("Sqrt", [variance]), least])])
