"""Grad-CAM against slopes measured by differences; the command is tested with the images of a run."""

from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from headrace.model.context import Ctx
from headrace.model.zoo import build_network
from headrace.run.grad_cam import Explainer, Explanation, color_text, draw_explanation, explained_blocks


def test_the_map_is_that_of_measured_slopes(quick):
    network = build_network(quick(model_name="cifar_resnet8").config.model, 10, (32, 32, 1))
    params, stats = network.init(3)
    ctx, label = Ctx(train=False, compute_dtype=jnp.float32), 4
    model = cast(Any, SimpleNamespace(network=network, params=params, stats=stats, context=lambda: ctx))
    images = np.random.default_rng(0).standard_normal((1, 32, 32, 1), np.float32)
    last, earlier = explained_blocks(network)
    assert last > earlier
    features = np.asarray(network.apply_range(0, last + 1, params, stats, images, ctx)[0])

    def logit(changed: np.ndarray) -> float:
        return float(network.apply_range(last + 1, len(network.blocks), params, stats, changed, ctx)[0][0, label])

    height, width, channels = features.shape[1:]
    expected = np.zeros((height, width))
    for k in range(channels):
        step = np.zeros_like(features)
        step[..., k] = 0.5  # after the last map the network is linear, so the step may be large
        slope = (logit(features + step) - logit(features - step)) / (height * width)
        expected += slope * features[0, ..., k]
    np.testing.assert_allclose(
        Explainer(model).map(images, label, last), np.maximum(expected, 0), atol=1e-4 * abs(expected).max()
    )


def test_a_map_is_drawn_where_it_is():
    heat = np.zeros((4, 4))
    heat[0, 3] = 1
    found = Explanation(pixels=np.full((32, 32, 1), 128, np.uint8), name="a", probability=1, best=(), maps={"x": heat})
    drawn = np.asarray(draw_explanation(found)).astype(int)
    assert drawn.shape == (380, 652, 3)  # with a line of text above, two below
    assert (drawn[20:340, :320] == 128).all()
    assert drawn[40, 632, 0] > drawn[320, 632, 0] + 80, "top right is hot"
    for rows, what in ((slice(0, 20), "the class"), (slice(340, 360), "the blocks")):
        assert (drawn[rows] < 128).any(), what
    scale = drawn[370, 332:492]
    assert tuple(scale[0]) == (0, 60, 140)
    assert tuple(scale[-1]) == (255, 214, 64)
    assert color_text(0) == "#003c8c"
    assert color_text(1) == "#ffd640"
