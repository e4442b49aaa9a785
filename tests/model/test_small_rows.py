"""Rows too small for a table: each divided for a pipeline, and each as ONNX, computes what the whole network does.

Whether the rows of the tables are the networks of other libraries is the matter of tests/weights/test_torch_parity.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.core.tree import flatten_named, unflatten_named
from headrace.data.augmentation.preprocess import Preprocess
from headrace.model.context import Ctx, Draws
from headrace.rows.networks.convnext import ConvNeXtRow
from headrace.rows.networks.densenet import DenseNetRow
from headrace.rows.networks.efficientnet import EfficientNetRow, Group
from headrace.rows.networks.regnet import RegNetRow
from headrace.rows.networks.resnet import ResNetRow
from headrace.rows.networks.vgg import VggRow
from headrace.weights.onnx_file import write_onnx

from .build import row_network

_FUSED = (Group(3, 1, 8, 8, 1, 1, fused=True), Group(3, 1, 8, 16, 4, 2, fused=True), Group(3, 2, 16, 24, 4, 2))

ROWS = {
    "efficientnet_v2": (
        EfficientNetRow(name="small", width=1.0, depth=1.0, dropout_rate=0.2, groups=_FUSED),
        ["block1a/project_bn", "block2a/project_conv", "block3b/se"],
    ),
    "efficientnet_lite": (
        EfficientNetRow(name="small", width=0.5, depth=1.0, dropout_rate=0.0, groups=_FUSED[2:], lite=True),
        ["block1b/dwconv", "top/bn"],
    ),
    "resnet": (
        ResNetRow(name="small", family="resnet", units=(1, 1), unit="basic", stem="deep", squeezes=True),
        ["conv1/2_conv", "conv2_block1/se", "conv3_block1/0_conv"],
    ),
    "regnet": (
        RegNetRow(name="small", depth=2, first=8, slope=8.0, factor=2.0, group_width=4, squeezes=True),
        ["group1_block1/2_conv", "group2_block1/se"],
    ),
    "densenet": (DenseNetRow(name="small", units=(1, 2), growth=4, stem=8), ["stem/pool", "group2/conv"]),
    "vgg": (VggRow(name="small", units=(1, 1), widths=(4, 8), hidden=16), ["group2_conv1/relu", "fc1/relu"]),
    "convnext": (
        ConvNeXtRow(name="small", units=(1, 1), widths=(8, 12), survival=0.6),
        ["stem/ln", "group1_block1/expand_conv", "group2_block1/scale", "top"],
    ),
}


def drawn(net):
    """Return weights that are all different from their initial ones, and from each other."""
    rng = np.random.default_rng(0)
    params, stats = net.init(0)
    params = jax.tree.map(lambda w: w + rng.uniform(0.1, 0.3, w.shape).astype(np.float32) if w.ndim == 1 else w, params)
    return params, jax.tree.map(lambda s: s * rng.uniform(0.5, 2, s.shape).astype(np.float32) + 0.05, stats)


@pytest.mark.parametrize("family", ROWS)
def test_stages_and_onnx_compute_the_same(family):
    row, splits = ROWS[family]
    whole = row_network(row)
    fine = whole.refined(splits)
    assert len(fine.blocks) > len(whole.blocks)
    assert fine.total_cost() == whole.total_cost()
    params, stats = drawn(whole)
    like = fine.init(0)
    fine_params, fine_stats = (unflatten_named(like[i], flatten_named(tree)) for i, tree in enumerate((params, stats)))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == whole.total_cost().params
    x = np.random.default_rng(0).normal(size=(4, *whole.input_hwc)).astype(np.float32)
    ctx = Ctx(train=True, draws=Draws(seed=1, step=2, samples=jnp.arange(4, dtype=jnp.uint32)))

    def both(x):
        trained = whole.apply(params, stats, x, ctx)[0], fine.apply(fine_params, fine_stats, x, ctx)[0]
        return *trained, whole.apply(params, stats, x, Ctx(train=False))[0]

    wanted, found, evaluated = jax.jit(both)(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert np.abs(np.asarray(wanted - evaluated)).max() > 1e-4  # statistics of the batch, or dropped units

    runtime = pytest.importorskip("onnxruntime")
    how = Preprocess(augmentation="none", normalization="none", mean=(0,), std=(1,), seed=0, image_hwc=whole.input_hwc)
    model = write_onnx(whole, (params, stats), how, False, {"class_names": []})
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["logits"], {"images": x})[0], evaluated, rtol=1e-3, atol=1e-4)
