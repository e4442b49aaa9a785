"""`hr.Model(NAME, weights=FILE)` of a plain file of torchvision or timm beside that library's own network."""

import importlib.util
import re

import numpy as np
import pytest

from headrace import Model
from headrace.core.errors import ConfigError

HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "torchvision", "timm"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not HAS_TORCH, reason="torch, torchvision and timm are not all installed"),
    # what torch and its libraries warn of on import is their matter
    pytest.mark.filterwarnings("ignore"),
]
# library, its model, ours, what has to be said (of two networks with the same names), image size
SMALL = [
    ("torchvision", "resnet18", "resnet18", "", 65),
    ("timm", "resnet50", "resnet50", "", 65),
    ("torchvision", "efficientnet_b0", "efficientnet_b0", "", 64),
    ("timm", "efficientnet_b0", "efficientnet_b0", "timm", 64),
    ("timm", "tf_efficientnet_b0", "efficientnet_b0", "reference", 64),
    ("torchvision", "mobilenet_v3_small", "mobilenet_v3_small", "", 64),
]
OTHERS = [
    ("timm", "resnet18", "resnet18", "", 64),
    ("torchvision", "resnet50", "resnet50", "", 64),
    ("timm", "tf_efficientnet_lite0", "efficientnet_lite0", "reference", 65),
    ("timm", "tf_efficientnetv2_b0", "efficientnet_v2_b0", "", 64),
    ("torchvision", "efficientnet_v2_s", "efficientnet_v2_s", "", 64),
    ("torchvision", "mobilenet_v2", "mobilenet_v2", "", 64),
    ("timm", "mobilenetv2_100", "mobilenet_v2", "", 64),
    ("torchvision", "mobilenet_v3_large", "mobilenet_v3_large", "", 64),
    ("timm", "mobilenetv3_small_100", "mobilenet_v3_small", "timm", 64),
    ("timm", "tf_mobilenetv3_large_100", "mobilenet_v3_large", "keras", 65),
    ("torchvision", "convnext_tiny", "convnext_tiny", "", 64),
    ("timm", "convnext_tiny", "convnext_tiny", "", 64),
    ("torchvision", "densenet121", "densenet121", "", 65),
    ("timm", "densenet121", "densenet121", "", 65),
    ("torchvision", "vgg11_bn", "vgg11_bn", "", 64),
    ("timm", "vgg11_bn", "vgg11_bn", "", 64),
    ("torchvision", "regnet_y_400mf", "regnet_y_400mf", "", 64),
    ("torchvision", "regnet_x_400mf", "regnet_x_400mf", "", 64),  # other widths than timm's
    ("timm", "regnetx_004", "regnet_x_400mf", "", 64),
    ("timm", "resnet18d", "resnet18d", "", 64),
    ("timm", "seresnet18", "seresnet18", "", 64),
]
MEAN, STD = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], np.float32)

# timm's names of EfficientNet-Lite's tensors in those of efficientnet_pytorch, but for the blocks' numbers
RENAMED = (
    ("^conv_stem", "_conv_stem"),
    ("^bn1", "_bn0"),
    ("^conv_head", "_conv_head"),
    ("^bn2", "_bn1"),
    ("^classifier", "_fc"),
    (r"^(blocks\.\d+)\.conv_dw", r"_\1._depthwise_conv"),
    (r"^(blocks\.0)\.bn1", r"_\1._bn1"),  # without an expansion
    (r"^(blocks\.0)\.conv_pw", r"_\1._project_conv"),
    (r"^(blocks\.0)\.bn2", r"_\1._bn2"),
    (r"^(blocks\.\d+)\.conv_pwl", r"_\1._project_conv"),
    (r"^(blocks\.\d+)\.conv_pw", r"_\1._expand_conv"),
    (r"^(blocks\.\d+)\.bn1", r"_\1._bn0"),
    (r"^(blocks\.\d+)\.bn2", r"_\1._bn1"),
    (r"^(blocks\.\d+)\.bn3", r"_\1._bn2"),
)


@pytest.mark.parity
def test_names_of_efficientnet_pytorch_give_the_logits_of_timms_network_of_the_same_weights(tmp_path):
    import torch  # pyright: ignore[reportMissingImports]

    from tests.weights import torch_side

    torch.manual_seed(0)
    torch.set_num_threads(1)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 65, 65, 3)).astype(np.uint8)
    images = (pixels / np.float32(255) - 0.5) / np.float32(0.5)
    theirs = torch_side.build("timm", "tf_efficientnet_lite0")
    torch_side.draw(theirs)
    torch_side.calibrate(theirs, images)
    found, places = {}, {}
    for timms, tensor in theirs.state_dict().items():
        key = re.sub(r"^blocks\.(\d+\.\d+)", lambda m: f"blocks.{places.setdefault(m[1], len(places))}", timms)
        pattern, name = next(row for row in RENAMED if re.match(row[0], key))
        found[re.sub(pattern, name, key)] = tensor
    assert "_blocks.15._project_conv.weight" in found
    torch.save(found, tmp_path / "lite.pth")
    half, shape = (0.5,) * 3, (65, 65, 3)
    file = tmp_path / "lite.pth"
    ours = Model("efficientnet_lite0", weights=file, input_shape=shape, pixel_mean=half, pixel_std=half)
    wanted = torch_side.logits_of(theirs, images)
    assert np.abs(ours.logits(pixels) - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("library", "model", "name", "asked", "size"),
    [*(pytest.param(*row, marks=pytest.mark.parity) for row in SMALL), *OTHERS],
)
def test_a_plain_file_gives_the_logits_of_its_library(tmp_path, capsys, library, model, name, asked, size):
    import torch  # pyright: ignore[reportMissingImports]

    from tests.weights import torch_side

    torch.manual_seed(0)
    torch.set_num_threads(1)  # several wait for each other by spinning, which takes minutes on a busy machine
    pixels = np.random.default_rng(0).integers(0, 256, (8, size, size, 3)).astype(np.uint8)
    images = (pixels / np.float32(255) - MEAN) / STD
    theirs = torch_side.build(library, model)
    torch_side.draw(theirs)
    torch_side.calibrate(theirs, images)
    wanted = torch_side.logits_of(theirs, images)
    file = tmp_path / "weights.pth"
    # as Lightning's module around a network saves it
    whole = {"state_dict": {f"model.{key}": tensor for key, tensor in theirs.state_dict().items()}}
    torch.save(theirs.state_dict() if size % 2 else whole, file)
    options = {"weights": file, "input_shape": (size, size, 3)}
    if asked:
        with pytest.raises(ConfigError, match="holds one of 2 networks"):
            Model(name, **options)
    ours = Model(name, **options, **({"model_dialect": asked} if asked else {}))
    error = np.abs(ours.logits(pixels) - wanted).max() / np.abs(wanted).max()
    print(f"{library} {model}: off by {error:.1e} of the largest logit")
    assert error < 1e-4
