"""Networks against torch itself: logits, all gradients of a training step, and weights in and out, loaded strictly.

`make parity` runs the small ones in an environment with torch, torchvision and timm, the extra `torch`; with that
environment's Python, `pytest -m slow tests/weights/test_torch_parity.py` runs all. The gradients there are float64, so
a difference is the rounding of float32 here.
"""

import importlib.util
import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config.networks import find_variant
from headrace.core.tree import flatten_named
from headrace.model.context import Ctx
from headrace.rows.networks import OPTION_FAMILIES
from headrace.weights.convert import export_names, load_into
from headrace.weights.torch_file import write_torch_file
from headrace.weights.weight_file import ForeignWeights, read_file
from tests.model.build import network

HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "torchvision", "timm"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not HAS_TORCH, reason="torch, torchvision and timm are not all installed"),
    # what torch and its libraries warn of on import is their matter
    pytest.mark.filterwarnings("ignore"),
]
# library, its model, ours, image size; the small ones are those of `make parity`
SMALL = [
    ("torchvision", "resnet18", "resnet18", 64),
    ("torchvision", "efficientnet_b0", "efficientnet_b0", 64),
    ("torchvision", "mobilenet_v3_small", "mobilenet_v3_small", 64),
    ("torchvision", "convnext_tiny", "convnext_tiny", 32),
    ("timm", "tf_efficientnetv2_b0", "efficientnet_v2_b0", 64),
    ("timm", "efficientnet_lite0", "efficientnet_lite0", 65),
    ("timm", "resnet18d", "resnet18d", 65),
    ("timm", "seresnet18", "seresnet18", 64),
    ("torchvision", "regnet_y_400mf", "regnet_y_400mf", 64),
    ("torchvision", "densenet121", "densenet121", 65),
    ("common", "20-both", "cifar_resnet20", 32),
]
OTHERS = [
    ("torchvision", "resnet50", "resnet50", 64),
    ("timm", "resnet50", "resnet50", 65),
    ("torchvision", "resnext50_32x4d", "resnext50", 64),
    ("timm", "efficientnet_b0", "efficientnet_b0", 65),
    ("torchvision", "mobilenet_v2", "mobilenet_v2", 64),
    ("timm", "mobilenetv2_100", "mobilenet_v2", 64),
    ("timm", "mobilenetv3_small_100", "mobilenet_v3_small", 64),
    ("torchvision", "mobilenet_v3_large", "mobilenet_v3_large", 64),
    ("timm", "mobilenetv3_large_100", "mobilenet_v3_large", 64),
    ("torchvision", "squeezenet1_0", "squeezenet", 64),
    ("timm", "convnext_tiny", "convnext_tiny", 65),
    ("torchvision", "convnext_small", "convnext_small", 32),
    ("torchvision", "efficientnet_v2_s", "efficientnet_v2_s", 64),
    ("timm", "efficientnetv2_s", "efficientnet_v2_s", 65),
    ("timm", "tf_efficientnetv2_b3", "efficientnet_v2_b3", 65),
    ("timm", "tf_efficientnet_lite1", "efficientnet_lite1", 65),
    ("timm", "resnet50d", "resnet50d", 65),
    ("timm", "seresnet50", "seresnet50", 64),
    ("timm", "seresnext50_32x4d", "seresnext50", 64),
    ("timm", "regnetx_002", "regnet_x_200mf", 64),
    ("timm", "regnety_004", "regnet_y_400mf", 64),
    ("torchvision", "regnet_x_400mf", "regnet_x_400mf", 64),
    ("timm", "densenet121", "densenet121", 66),
    ("torchvision", "densenet169", "densenet169", 64),
    ("torchvision", "vgg11_bn", "vgg11_bn", 64),  # each VGG takes 13 GB of memory
    ("timm", "vgg11_bn", "vgg11_bn", 64),
    ("torchvision", "vgg16_bn", "vgg16_bn", 96),
    ("common", "20-end", "cifar_resnet20", 32),
]
NUM_IMAGES = 8


def options_of(library: str, model: str, name: str) -> dict[str, Any]:
    """Return the options under which our network is the library's, without chance."""
    family = find_variant(name).family
    dialect = "torchvision" if library == "common" else "reference" if model.startswith("tf_") else library
    wanted = {"model_dialect": dialect}
    wanted |= {"dropout_rate": 0.0, "block_survival_prob": 1.0}
    options = {key: value for key, value in wanted.items() if family in OPTION_FAMILIES[key]}
    return options | ({"shortcut": f"pad-{model.partition('-')[2]}"} if library == "common" else {})


@pytest.mark.parametrize(
    ("library", "model", "name", "size"), [*(pytest.param(*row, marks=pytest.mark.parity) for row in SMALL), *OTHERS]
)
def test_a_network_is_the_one_of_torch(tmp_path, library, model, name, size):
    import torch  # pyright: ignore[reportMissingImports]

    from tests.weights import torch_side

    torch.manual_seed(0)
    torch.set_num_threads(1)  # several wait for each other by spinning, which takes minutes on a busy machine
    rng = np.random.default_rng(0)
    images = rng.normal(size=(NUM_IMAGES, size, size, 3)).astype(np.float32)
    labels = rng.integers(0, 10, NUM_IMAGES)
    theirs = torch_side.build(library, model)
    torch_side.draw(theirs)
    torch_side.calibrate(theirs, images)
    logits = torch_side.logits_of(theirs, images[:2])
    net = network(name, num_classes=logits.shape[1], image=(size, size, 3), **options_of(library, model, name))

    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    initial = net.init(3)
    found = load_into(net, initial, read_file(tmp_path / "weights.pth"), min_share=1.0)
    assert found.loading.unused == ()
    assert net.total_cost().params == sum(p.numel() for p in theirs.parameters())
    run = jax.jit(lambda x: net.apply(found.params, found.stats, x, Ctx(train=False))[0])
    errors = {"logits": _error(run(images[:2]), logits)}
    assert errors["logits"] < 1e-4

    scheme, arrays = export_names(found.params, found.stats, "" if library == "common" else library)
    assert scheme == library
    back = torch.load(io.BytesIO(write_torch_file(arrays)), weights_only=True)
    theirs.load_state_dict(back, strict=True)
    np.testing.assert_array_equal(torch_side.logits_of(theirs, images[:2]), logits)

    torch_side.decide(theirs)
    errors |= _gradient_errors(net, initial, theirs, images, labels)
    worst = max((key for key in errors if "logits" not in key), key=lambda key: errors[key])
    print(
        f"{library} {model}: {net.total_cost().params:,} parameters, logits up to {np.abs(logits).max():.3g}, off by "
        f"{errors['logits']:.1e} in evaluation and {errors['training logits']:.1e} in training, "
        f"{worst} by {errors[worst]:.1e} of its largest"
    )
    # VGG's depend on which of two nearly equal pixels a pool takes: torch's own float32 and float64 differ by 2.7e-2.
    limit = 5e-2 if name.startswith("vgg") else 1e-3
    assert max(errors.values()) < limit, {key: error for key, error in errors.items() if error >= limit}


def _gradient_errors(net, initial, theirs, images, labels) -> dict[str, float]:
    """Return the relative errors of logits and gradients of a training step."""
    from tests.weights import torch_side

    numbers = {key: tensor.numpy().copy() for key, tensor in theirs.state_dict().items()}
    start = load_into(net, initial, ForeignWeights(source="torch", arrays=numbers), min_share=1.0)
    logits, gradients = torch_side.step_of(theirs, images, labels)
    arrays = numbers | {key: gradient.astype(np.float32) for key, gradient in gradients.items()}
    wanted = load_into(net, initial, ForeignWeights(source="torch", arrays=arrays), min_share=1.0)

    def loss(params):
        found, _ = net.apply(params, start.stats, images, Ctx(train=True, stable_norm=True))
        chances = jax.nn.log_softmax(found)
        return -jnp.mean(jnp.take_along_axis(chances, labels[:, None], 1)), found

    ours, found = jax.jit(jax.grad(loss, has_aux=True))(start.params)
    flat, flat_wanted = flatten_named(ours), flatten_named(wanted.params)
    # A shift that the next norm takes out again has no gradient but rounding: smaller ones count as a thousandth.
    least = max(float(np.abs(leaf).max()) for leaf in flat_wanted.values()) / 1000
    errors = {key: _error(flat[key], leaf, least) for key, leaf in flat_wanted.items()}
    return errors | {"training logits": _error(found, logits)}


def _error(found, wanted, least: float = 0.0) -> float:
    """Return the largest difference as a share of the largest number, or of the least that counts."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), least))
