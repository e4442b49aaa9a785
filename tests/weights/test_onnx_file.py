"""ONNX models against the networks that they were written from, run by onnxruntime."""

import jax
import numpy as np
import pytest
from PIL import Image

from headrace.core.errors import CheckpointError, ConfigError
from headrace.data.augmentation.crop_resize import CentreView, centre_view
from headrace.data.augmentation.preprocess import Preprocess, preprocess
from headrace.data.decoding.crop import valid_view
from headrace.data.decoding.resize import Resampling, resize_view
from headrace.model.context import Ctx
from headrace.model.cost import Cost
from headrace.model.layers import Dense, GlobalAveragePool, WithoutParameters
from headrace.model.network import Network
from headrace.weights.onnx_file import _resized, check_onnx, write_onnx
from headrace.weights.onnx_graph import OPSET, Graph
from tests.model.build import network

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
ALONG = {"class_names": ["a", "b"]}


def spec(net, kind="per-channel"):
    channels = net.input_hwc[2]
    return Preprocess(
        augmentation="none",
        normalization=kind,
        mean=(0.4, 0.5, 0.6)[:channels],
        std=(0.2, 0.3, 0.4)[:channels],
        seed=0,
        image_hwc=net.input_hwc,
    )


def drawn(net):
    """Return weights whose norms are all different from their initial ones."""
    rng = np.random.default_rng(0)
    params, stats = net.init(0)
    params = jax.tree.map(lambda w: w + rng.normal(size=w.shape).astype(np.float32) * 0.1 if w.ndim == 1 else w, params)
    return params, jax.tree.map(lambda s: s * rng.uniform(0.5, 2, s.shape).astype(np.float32) + 0.05, stats)


def logits_of(net, weights, how):
    def apply(images):
        inputs = preprocess(images, None, 0, how, train=False) if how else images
        return net.apply(*weights, inputs, Ctx(train=False))[0]

    return jax.jit(apply)


NETWORKS = [
    ("toy_model_bn", {}),
    ("cifar_resnet8", {}),
    ("cifar_resnet8", {"norm_layer": {"name": "group_norm", "num_groups": 4}}),
    ("cifar_resnet8", {"norm_layer": {"name": "group_norm", "num_groups": 4}, "group_order": "strided"}),
    ("cifar_resnet8", {"stem": "deep", "downsample": "blur", "activation": "mish"}),
    ("cifar_fastnet", {}),
    pytest.param("cifar_resnet8", {"groups": 4, "proxy_norm": True}, marks=pytest.mark.slow),
    pytest.param("resnet18", {"model_dialect": "torchvision"}, marks=pytest.mark.slow),
    pytest.param("resnext14", {}, marks=pytest.mark.slow),
    pytest.param("efficientnet_b0", {}, marks=pytest.mark.slow),
    pytest.param("mobilenet_v2", {}, marks=pytest.mark.slow),
    pytest.param("mobilenet_v3_small", {}, marks=pytest.mark.slow),
    *(
        pytest.param(name, {}, marks=pytest.mark.slow)
        for name in ("convnext_tiny", "efficientnet_v2_b0", "regnet_y_200mf", "seresnet18", "resnet18d", "densenet121")
    ),
    pytest.param("squeezenet", {"use_bypass": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "options"), NETWORKS, ids=lambda value: str(value)[:60])
def test_the_model_computes_what_the_network_computes(name, options):
    image = (32, 32, 3) if "toy" in name or "cifar" in name else (64, 64, 3)
    net = network(name, num_classes=7, image=image, **options)
    weights, how = drawn(net), spec(net)
    for as_pixels in (True, False):
        data = write_onnx(net, weights, how, as_pixels, ALONG)
        difference = check_onnx(data, net, as_pixels, logits_of(net, weights, how if as_pixels else None))
        assert difference < 1e-3
    model = onnx.load_from_string(data)
    assert {prop.key: prop.value for prop in model.metadata_props}["class_names"] == '["a", "b"]'
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.parametrize("kind", ["per-image", "zero-one", "none", "per-channel", "centred"])
def test_pixels_are_normalised_inside(kind):
    net = network("toy_model", num_classes=3)
    weights, how = drawn(net), spec(net, kind)
    data = write_onnx(net, weights, how, True, ALONG)
    assert check_onnx(data, net, True, logits_of(net, weights, how)) < 1e-3 * 255


@pytest.mark.parametrize(("antialias", "bicubic"), [(True, False), (False, False), (True, True)])
def test_images_are_resized_and_cropped_as_in_validation(antialias, bicubic):
    """Whatever the size: shrunk, kept, enlarged, sides that end on halves."""
    view = CentreView(size=20, shorter_side=24, antialias=antialias, bicubic=bicubic)
    graph = Graph()
    graph.nodes.append(onnx.helper.make_node("Identity", [_resized(graph, view)], ["out"]))
    made = onnx.helper.make_graph(
        graph.nodes,
        "resize",
        [onnx.helper.make_tensor_value_info("images", onnx.TensorProto.UINT8, ["n", "h", "w", 3])],
        [onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, ["n", 20, 20, 3])],
        graph.initializers,
    )
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=8)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    for hw in [(24, 24), (48, 48), (48, 49), (48, 51), (33, 70), (300, 24), (64, 63), (13, 17), (24, 31), (301, 457)]:
        pixels = rng.integers(0, 256, (*hw, 3)).astype(np.uint8)
        _, (height, width), (top, left) = valid_view(hw, 20, 24)
        expected = np.empty((20, 20, 3), np.uint8)
        if antialias:  # Pillow itself, across first
            method = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
            image = Image.fromarray(pixels).resize((width, hw[0]), method).resize((width, height), method)
            expected[...] = np.asarray(image)[top : top + 20, left : left + 20]
        else:
            resize_view(pixels, valid_view(hw, 20, 24), expected, Resampling(antialias=False))
        difference = np.abs(session.run(["out"], {"images": pixels[None]})[0][0] - expected)
        assert difference.max() <= 1, hw
        # 33x70 become 24x50: weights of tenths, so that many sums end on halves.
        assert (difference > 0).mean() <= 0.03, hw
    found = np.asarray(jax.jit(lambda images: centre_view(images, view))(pixels[None]))[0]
    assert np.abs(found - expected).max() <= 1


def test_a_model_that_computes_something_else_is_refused():
    net = network("toy_model", num_classes=3)
    weights, how = drawn(net), spec(net)
    data = write_onnx(net, weights, how, True, ALONG)
    other = logits_of(net, net.init(9), how)
    with pytest.raises(CheckpointError, match="does not compute what toy_model does"):
        check_onnx(data, net, True, other)


class Odd(WithoutParameters):
    """A layer that nobody has heard of."""

    def shape(self, hwc):
        return hwc

    def apply(self, params, stats, x, ctx):
        return x * 2, {}

    def cost(self, hwc):
        return Cost()


def test_an_unknown_layer_is_named():
    blocks = (("odd", Odd()), ("pool", GlobalAveragePool()), ("head", Dense(features=2, logits=True)))
    net = Network(name="mine", blocks=blocks, input_hwc=(4, 4, 3), num_classes=2)
    with pytest.raises(ConfigError, match="Odd at odd") as caught:
        write_onnx(net, net.init(0), spec(net), True, ALONG)
    assert "stablehlo" in caught.value.remedy
