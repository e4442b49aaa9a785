"""The forward pass: the mean over an image and its mirror image."""

import jax
import jax.numpy as jnp
import numpy as np

from headrace.engine.devices import replica_mesh
from headrace.engine.forward import LOGITS, EvalSpec, WholeForward
from headrace.model.context import Ctx
from headrace.model.network import Network
from tests.model.build import compute, network


def test_flip_averages_the_logits_of_an_image_and_its_mirror_image():
    net = network("toy_model")
    weights = net.init(0)
    images = np.random.default_rng(0).normal(size=(2, 4, 32, 32, 3)).astype(np.float32)
    block = {"images": jnp.array(images), "labels": jnp.zeros((2, 4), jnp.int32)}

    def logits(flip: bool) -> np.ndarray:
        spec = EvalSpec(
            network=net,
            fetch=lambda _resident, batch: (batch["images"], batch["labels"]),
            compute_dtype=jnp.float32,
            num_replicas=1,
            reducer=LOGITS,
            flip=flip,
        )
        forward = WholeForward(replica_mesh(jax.devices()[:1]), spec)
        placed = forward.place(weights)
        return np.asarray(forward.compile(placed, {}, block)(placed, {}, block))

    flat = images.reshape(8, 32, 32, 3)
    both = [compute(net, *weights, x, Ctx(train=False))[0] for x in (flat, flat[:, :, ::-1])]
    np.testing.assert_allclose(logits(False).reshape(8, -1), both[0], atol=1e-5)
    np.testing.assert_allclose(logits(True).reshape(8, -1), (both[0] + both[1]) / 2, atol=1e-5)
    assert np.abs(both[0] - both[1]).max() > 0.01


def test_python_traces_an_evaluation_once(monkeypatch):
    net, traced, apply = network("toy_model"), [], Network.apply_range
    monkeypatch.setattr(Network, "apply_range", lambda *given: traced.append(1) or apply(*given))
    spec = EvalSpec(
        network=net,
        fetch=lambda _resident, batch: (batch["images"], batch["labels"]),
        compute_dtype=jnp.float32,
        num_replicas=1,
    )
    block = {
        "images": jnp.zeros((2, 4, 32, 32, 3)),
        "labels": jnp.zeros((2, 4), jnp.int32),
        "mask": jnp.ones((2, 4), jnp.float32),
    }
    forward = WholeForward(replica_mesh(jax.devices()[:1]), spec)
    placed = forward.place(net.init(0))
    sums = forward.compile(placed, {}, block)(placed, {}, block)
    assert len(traced) == 1
    assert sums["count"] == 8
