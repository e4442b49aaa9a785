"""A whole network: against a forward pass in numpy, in parts, in half precision, and its initial weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.core.tree import flatten_named
from headrace.model.context import Ctx
from headrace.model.initial import VarianceScaling
from headrace.model.network import weights_like

from .build import network

EPSILON = 1.001e-5


def conv(x, w, stride):
    """Convolve with a 3x3 window, padded as TensorFlow's SAME."""
    missing = [max((-(-size // stride) - 1) * stride + 3 - size, 0) for size in x.shape[1:3]]
    padded = np.pad(x.astype(np.float64), ((0, 0), *((m // 2, m - m // 2) for m in missing), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))[:, ::stride, ::stride]
    return np.einsum("nijchw,hwco->nijo", windows, w.astype(np.float64))


def batch_norm(x, layer):
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / np.sqrt(variance + EPSILON) * layer["gamma"] + layer["beta"]


def cifar_resnet_in_numpy(params, x):
    """Return the logits of a CIFAR ResNet in training mode, written from the reference's words."""
    x = np.maximum(batch_norm(conv(x, params["conv1"]["conv"]["kernel"], 1), params["conv1"]["bn"]), 0)
    for name in [name for name in params if "_block" in name]:
        layers = params[name]
        halves = "layer1_conv_ds" in layers
        first = layers["layer1_conv_ds" if halves else "layer1_conv"]["kernel"]
        h = np.maximum(batch_norm(conv(x, first, 2 if halves else 1), layers["layer1_bn"]), 0)
        h = batch_norm(conv(h, layers["layer2_conv"]["kernel"], 1), layers["layer2_bn"])
        short = np.concatenate([x[:, ::2, ::2], np.zeros_like(x[:, ::2, ::2])], -1) if halves else x
        x = np.maximum(h + short, 0)
    return x.mean((1, 2)) @ params["fc_layer"]["kernel"] + params["fc_layer"]["bias"]


def random_params(built, seed=1):
    """Return initial parameters with random gammas, betas and biases in the place of ones and zeros."""
    params, stats = built.init(seed)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda a: a if a.ndim > 1 else rng.normal(1, 0.3, a.shape).astype(np.float32), params)
    return params, stats


def apply(built, ctx, params, stats, images):
    return jax.jit(lambda p, s, x: built.apply(p, s, x, ctx))(params, stats, images)


@pytest.fixture(scope="module")
def small():
    built = network("cifar_resnet8", image=(9, 8, 3))
    images = np.random.default_rng(0).normal(size=(3, 9, 8, 3)).astype(np.float32)
    return built, *random_params(built), images


def test_logits_by_numpy(small):
    built, params, stats, images = small
    logits, batch_stats = apply(built, Ctx(train=True), params, stats, images)
    assert jax.tree.structure(batch_stats) == jax.tree.structure(stats)
    np.testing.assert_allclose(logits, cifar_resnet_in_numpy(params, images), rtol=1e-4, atol=1e-4)


def test_ranges_of_blocks_compose(small):
    built, params, stats, images = small
    ctx = Ctx(train=True)
    whole, whole_stats = apply(built, ctx, params, stats, images)
    cut = built.block_names.index("conv3_block1_post_addition_relu")

    def in_two(params, stats, x):
        first, second = ({k: v for k, v in params.items() if k in names} for names in
                         (built.block_names[:cut], built.block_names[cut:]))  # fmt: skip
        x, early = built.apply_range(0, cut, first, stats, x, ctx)
        x, late = built.apply_range(cut, len(built.blocks), second, stats, x, ctx)
        return x, early | late

    parts, parts_stats = jax.jit(in_two)(params, stats, images)
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), parts_stats, whole_stats)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_gives_float32_logits_and_statistics(small, dtype):
    built, params, stats, images = small
    wanted, _ = apply(built, Ctx(train=True), params, stats, images)
    seen = {}
    ctx = Ctx(train=True, compute_dtype=dtype, probe=lambda name, y: seen.update({name: y.dtype}))
    logits, batch_stats = apply(built, ctx, params, stats, images)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(batch_stats)} == {jnp.dtype(jnp.float32)}
    assert {seen.pop("fc_layer")} == {jnp.dtype(jnp.float32)}
    assert set(seen.values()) == {jnp.dtype(dtype)}
    assert 0 < np.abs(logits - wanted).max() < 0.1


def test_the_probe_sees_every_block_in_order(small):
    built, params, stats, images = small
    seen = []
    jax.eval_shape(
        lambda x: built.apply(params, stats, x, Ctx(train=True, probe=lambda n, y: seen.append((n, y.shape)))), images
    )
    assert seen == [(name, (3, *shape)) for name, shape in zip(built.block_names, built.shapes()[1:], strict=True)]


def test_evaluation_does_not_look_at_the_batch(small):
    built, params, stats, images = small
    together, after = apply(built, Ctx(train=False), params, stats, images)
    alone, _ = apply(built, Ctx(train=False), params, stats, images[:1])
    np.testing.assert_allclose(together[:1], alone, rtol=1e-5, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, after, stats)


def test_gradients_reach_every_parameter(small):
    built, params, stats, images = small
    loss = jax.jit(jax.grad(lambda p: (built.apply(p, stats, images, Ctx(train=True))[0] ** 2).sum()))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(loss(params)))


def test_initial_weights_depend_on_seed_and_name_alone():
    params, _ = network("cifar_resnet8").init(5)
    again, _ = network("cifar_resnet8").init(5)
    other, _ = network("cifar_resnet8").init(6)
    deeper, _ = network("cifar_resnet20").init(5)
    jax.tree.map(np.testing.assert_array_equal, params, again)
    kernel = params["conv2_block1"]["layer1_conv"]["kernel"]
    np.testing.assert_array_equal(kernel, deeper["conv2_block1"]["layer1_conv"]["kernel"])
    assert not np.array_equal(kernel, params["conv2_block1"]["layer2_conv"]["kernel"])
    assert not np.array_equal(kernel, other["conv2_block1"]["layer1_conv"]["kernel"])
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


def test_initial_distributions():
    params = flatten_named(network("resnet18", image=(32, 32, 3)).init(0)[0])
    kernel = params["conv5_block2/2_conv/kernel"]  # truncated normal with variance 1 / fan in
    deviation = 1 / np.sqrt(9 * 512)
    assert kernel.std() == pytest.approx(deviation, rel=0.01)
    assert abs(kernel.mean()) < 0.01 * deviation
    assert np.abs(kernel).max() == pytest.approx(2 * deviation / 0.8796256610342398, rel=1e-3)
    for name, fans in (("conv1/conv/kernel", 49 * 3 + 49 * 64), ("predictions/kernel", 512 + 1000)):  # Glorot uniform
        limit = np.sqrt(6 / fans)
        assert np.abs(params[name]).max() == pytest.approx(limit, rel=0.01)
        assert params[name].std() == pytest.approx(limit / np.sqrt(3), rel=0.02)
    assert (params["predictions/bias"] == 0).all()


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("cifar_resnet8", "fc_layer"),
        ("resnet50", "predictions"),
        ("mobilenet_v3_small", "predictions"),
        ("efficientnet_b0", "predictions"),
        ("squeezenet", "conv10"),
        ("toy_model", "dense"),
    ],
)
def test_the_head_is_the_last_layer_with_weights(name: str, head: str) -> None:
    """Whatever it is called, and whatever follows it: its weights are those whose shape has the number of classes."""
    few, many = (network(name, count) for count in (7, 9))
    shapes = [{k: v.shape for k, v in flatten_named(weights_like(each)[0]).items()} for each in (few, many)]
    scoring = [k for k in shapes[0] if shapes[0][k] != shapes[1][k]]
    found = few.head(shapes[0])
    assert found.startswith(head)
    assert scoring == [k for k in shapes[0] if k.startswith(f"{found}/")]


@pytest.mark.parametrize("name", ["cifar_resnet8", "cifar_fastnet", "mobilenet_v3_small", "toy_model_bn"])
def test_shapes_without_drawing_are_those_of_initial_weights(name):
    net = network(name)
    drawn, like = (flatten_named(weights) for weights in (net.init(0), weights_like(net)))
    assert {key: (leaf.shape, leaf.dtype) for key, leaf in drawn.items()} == {
        key: (leaf.shape, leaf.dtype) for key, leaf in like.items()
    }
    some = net.block_names[:2]
    assert set(weights_like(net, some)[0]) == {block for block in net.init(0)[0] if block in some}


@pytest.mark.parametrize(("name", "num_blocks"), [("resnet10", 2), ("densenet121", 1)])
def test_gpus_pool_with_the_norm_before_it(name, num_blocks, monkeypatch):
    """In a stem whose pool is a block of its own, and in one whose pool is the last layer."""
    built = network(name, image=(32, 32, 3))
    params, stats = ({key: tree[key] for key in built.block_names[:num_blocks] if key in tree}
                     for tree in random_params(built))  # fmt: skip
    images = np.random.default_rng(0).normal(size=(4, 32, 32, 3)).astype(np.float32)

    def run(fuse):
        monkeypatch.setattr("headrace.ops.normalization.on_gpu", lambda: fuse)

        def loss(params):
            y, batch_stats = built.apply_range(0, num_blocks, params, stats, images, Ctx(train=True, cpu_kernels="off"))
            return jnp.square(y).sum(), batch_stats

        is_fused = "_norm_pool" in str(jax.make_jaxpr(loss)(params))
        return is_fused, jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    (fused, found), (apart, wanted) = run(True), run(False)
    assert (fused, apart) == (True, False)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max()), found, wanted)


def test_the_shapes_of_weights_are_known_without_drawing(monkeypatch):
    built = network("cifar_resnet8", shortcut="projection")
    drawn = built.init(0)
    monkeypatch.setattr(VarianceScaling, "sample", lambda *_: pytest.fail("it draws"))
    for like, tree in zip(weights_like(built), drawn, strict=True):
        shapes = {name: (leaf.shape, leaf.dtype) for name, leaf in flatten_named(like).items()}
        assert shapes == {name: (leaf.shape, leaf.dtype) for name, leaf in flatten_named(tree).items()}
