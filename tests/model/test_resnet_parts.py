"""Parts of ResNets that are options: stems, how images are halved, shortcuts, the scale that units start with."""

from typing import Any

import jax
import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.core.errors import ConfigError
from headrace.core.tree import flatten_named
from headrace.model.composite import Residual
from headrace.model.context import Ctx
from headrace.model.layers import BlurPool, Conv
from headrace.model.network import weights_like
from headrace.model.norm import Norm
from headrace.rows.networks import NETWORKS
from tests.harness import OPTIONS, Stages, assert_close, make_samples, train_pipelined, train_steps
from tests.ops.naive import conv

from .build import compute, network

RESIDUAL = [name for name, row in NETWORKS.items() if row.family in ("resnet", "resnext", "seresnet", "seresnext")]
TODAY = {"stem": "deep", "downsample": "max-blur", "zero_init_residual": True, "activation": "mish"}


def blurred(x: np.ndarray) -> np.ndarray:
    """Average 3x3 pixels by the definition, one output at a time; the pixel before the first is the second."""
    n, height, width, channels = x.shape
    y = np.zeros((n, -(-height // 2), -(-width // 2), channels))
    for i, j in np.ndindex(y.shape[1:3]):
        for di, dj in np.ndindex(3, 3):
            rows, columns = (abs(2 * at + d - 1) for at, d in ((i, di), (j, dj)))
            rows, columns = (
                2 * (size - 1) - at if at >= size else at for at, size in ((rows, height), (columns, width))
            )
            y[:, i, j] += x[:, rows, columns] * (2 - abs(di - 1)) * (2 - abs(dj - 1)) / 16
    return y


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), ("bfloat16", 8e-3)])
def test_blurring_by_the_definition(dtype, tolerance):
    for size in ((4, 5), (7, 6), (2, 3)):
        x = np.random.default_rng(0).normal(size=(2, *size, 3)).astype(np.float32)
        y, _ = compute(BlurPool(), {}, {}, jax.numpy.asarray(x, dtype), Ctx(train=True))
        assert y.dtype == dtype
        assert y.shape[1:] == BlurPool().shape((*size, 3))
        np.testing.assert_allclose(np.asarray(y, np.float32), blurred(x), rtol=tolerance, atol=tolerance)
    one, _ = compute(BlurPool(), {}, {}, np.full((1, 1, 1, 2), 3, np.float32), Ctx(train=True))
    np.testing.assert_array_equal(one, np.full((1, 1, 1, 2), 3))


def test_the_gradient_of_blurring_is_its_transpose():
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=size).astype(np.float32) for size in ((1, 5, 6, 1), (1, 3, 3, 1)))
    slope = jax.jit(jax.grad(lambda x: (BlurPool().apply({}, {}, x, Ctx(train=True))[0] * dy).sum()))(x)
    pixels = np.eye(30).reshape(30, 5, 6, 1)
    np.testing.assert_allclose(slope.ravel(), (blurred(pixels) * dy).sum((1, 2, 3)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RESIDUAL)
@pytest.mark.parametrize("downsample", ["blur", "max-blur"])
def test_every_residual_network_takes_every_part(name, downsample):
    shortcut = {"shortcut": "pool"} if downsample == "blur" else {}
    for stem in ("imagenet", "deep", "cifar"):
        built = network(name, 5, (64, 64, 3), **{**TODAY, **shortcut, "stem": stem, "downsample": downsample})
        assert built.shapes()[-1] == (5,)
        # the smallest image: eighths of what the stem leaves
        small = 64 // {"imagenet": 4, "deep": 4, "cifar": 1}[stem] // 2 ** (3 if not name.startswith("cifar") else 2)
        assert built.shapes()[-3][:2] == (small, small)
        for _, block in built.blocks:
            if isinstance(block, Residual):
                norms = [layer for _, layer in block.body.layers if isinstance(layer, Norm)]
                assert norms[-1].gamma == 0


def test_blurs_change_no_weight_and_no_size():
    """timm's resnetblur50 has the names and shapes of its resnet50."""
    plain, blur = (
        network("resnet50", model_dialect="timm", downsample=how, image=(96, 96, 3)) for how in ("stride", "blur")
    )
    shapes = [
        {name: leaf.shape for name, leaf in flatten_named(weights_like(each)[0]).items()} for each in (plain, blur)
    ]
    assert shapes[0] == shapes[1]
    assert plain.shapes() == blur.shapes()
    unit = dict(blur.blocks)["conv3_block1"]
    assert isinstance(unit, Residual)
    names = [name for name, _ in unit.body.layers]
    assert names == ["1_conv", "1_bn", "1_relu", "2_conv", "2_bn", "2_relu", "blur", "3_conv", "3_bn"]
    assert all(layer.stride == 1 for _, layer in unit.body.layers if isinstance(layer, Conv))


def test_a_resnet_d_is_a_resnet_with_two_options():
    for size in ("18", "50"):
        wanted = network(f"resnet{size}d", image=(64, 64, 3))
        built = network(f"resnet{size}", image=(64, 64, 3), model_dialect="timm", stem="deep", shortcut="pool")
        assert built.blocks == wanted.blocks
        strided = network(f"resnet{size}d", image=(64, 64, 3), stem="imagenet", shortcut="projection")
        assert strided.blocks == network(f"resnet{size}", image=(64, 64, 3), model_dialect="timm").blocks


@pytest.mark.parametrize("downsample", ["blur", "max-blur"])
def test_a_unit_by_the_definition(downsample):
    """The first unit that halves, of a CIFAR ResNet with zero channels in its shortcut, in evaluation."""
    built = network("cifar_resnet8", 4, (6, 6, 3), downsample=downsample)
    params, stats = built.init(0)
    first = built.block_names.index("conv3_block1_pool" if downsample == "max-blur" else "conv3_block1")
    last = built.block_names.index("conv3_block1") + 1
    x = np.random.default_rng(0).normal(size=(2, 6, 6, 16)).astype(np.float32)
    y, _ = jax.jit(lambda x: built.apply_range(first, last, params, stats, x, Ctx(train=False)))(x)
    w = params["conv3_block1"]
    scale = 1 / np.sqrt(1 + 1.001e-5)
    inside, short = x.astype(np.float64), x[:, ::2, ::2].astype(np.float64)
    if downsample == "max-blur":
        padded = np.pad(inside, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=-np.inf)
        inside = blurred(np.lib.stride_tricks.sliding_window_view(padded, (2, 2), (1, 2)).max((-1, -2)))
        short = inside
    (inside,) = conv(inside, w["layer1_conv_ds"]["kernel"], 1, "SAME")
    inside = np.maximum(inside * scale, 0)
    inside = blurred(inside) if downsample == "blur" else inside
    (inside,) = conv(inside, w["layer2_conv"]["kernel"], 1, "SAME")
    wanted = inside * scale + np.pad(short, ((0, 0), (0, 0), (0, 0), (0, 16)))
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


def test_units_that_start_as_their_shortcut():
    built = network("cifar_resnet8", zero_init_residual=True)
    gammas = {n: w for n, w in flatten_named(built.init(0)[0]).items() if n.endswith("gamma")}
    assert [n for n, w in gammas.items() if not w.any()] == [f"conv{i}_block1/layer2_bn/gamma" for i in (2, 3, 4)]
    bottleneck = flatten_named(network("resnet14", image=(32, 32, 3), zero_init_residual=False).init(0)[0])
    assert all((w == 1).all() for n, w in bottleneck.items() if n.endswith("gamma"))


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        ("resnet50", {"shortcut": "pad-end"}, "In bottleneck units"),
        ("resnext50", {"shortcut": "pool", "downsample": "max-blur"}, "has nothing left to average"),
        ("resnet18", {"zero_init_residual": True, "norm_layer": {"name": "none"}}, "scale of a unit's last norm"),
        ("efficientnet_b0", {"downsample": "blur"}, "downsample is for resnet"),
        ("vgg11_bn", {"stem": "deep"}, "stem is for resnet"),
        ("convnext", {"zero_init_residual": False}, "zero_init_residual is for resnet"),
    ],
)
def test_refusals(model, options, told):
    with pytest.raises(ConfigError, match=told):
        network(model, 10, (32, 32, 3), **options)


@pytest.fixture(scope="module")
def today() -> tuple[Any, ...]:
    config = config_from(OPTIONS)
    built = network("cifar_resnet8", 10, (16, 16, 3), **TODAY, groups=4)
    samples = make_samples()
    return config, built, samples, train_steps(config, built, *samples, replicas=1, count=2)[0]


def test_replicas_give_the_weights_of_one_device(today):
    config, built, samples, wanted = today
    found, _ = train_steps(config, built, *samples, replicas=2, count=1)
    assert_close(found["params"], wanted["params"], 5e-5)


def test_stages_give_the_weights_of_one_device(today):
    config, built, samples, wanted = today
    # before and after the block that halves
    names = built.block_names
    cut = (names.index("conv3_block1_pool"), names.index("conv3_block1"))
    found, _ = train_pipelined(config, built, samples, Stages(count=2, cut=cut, mapping=(0, 1, 0)))
    assert_close(found["params"], wanted["params"], 5e-5)
