"""The side of torch in the parity tests, run by a Python that has torch, torchvision and timm.

`torch_side.py make LIBRARY MODEL SIZE FOLDER` draws weights and images and writes weights.pth, images.npy, logits.npy.
`torch_side.py check LIBRARY MODEL SIZE FOLDER` loads back.pth strictly and writes the logits of images.npy to back.npy.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]


def torchvision_models() -> Any:
    """Return torchvision.models; where its operators do not fit torch, they are declared, since none is used here."""
    try:
        import torchvision  # pyright: ignore[reportMissingImports]
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for module in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[module]
        import torchvision  # pyright: ignore[reportMissingImports]

        globals()["_kept"] = library  # it undeclares what it declared when it goes
    return torchvision.models


class OptionA(torch.nn.Module):
    """The CIFAR ResNets' shortcut without parameters: every second pixel, zero channels on both sides or at the end."""

    def __init__(self, more: int, both: bool) -> None:
        super().__init__()
        self.pads = (more // 2, more - more // 2) if both else (0, more)

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, *self.pads))


class Unit(torch.nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, inside: int, width: int, stride: int, both: bool) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(width)
        self.conv2 = torch.nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(width)
        self.shortcut = OptionA(width - inside, both) if stride > 1 else torch.nn.Identity()

    def forward(self, x: Any) -> Any:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class CifarResNet(torch.nn.Module):
    """A CIFAR ResNet of depth 6n+2 in the common names."""

    def __init__(self, n: int, both: bool) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(16)
        inside = 16
        for number, width in enumerate((16, 32, 64), start=1):
            units = []
            for unit in range(n):
                units.append(Unit(inside, width, 2 if number > 1 and unit == 0 else 1, both))
                inside = width
            setattr(self, f"layer{number}", torch.nn.Sequential(*units))
        self.linear = torch.nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def build(library: str, model: str) -> Any:
    """Return a model for evaluation."""
    if library == "torchvision":
        return getattr(torchvision_models(), model)(weights=None).eval()
    if library == "timm":
        torchvision_models()
        import timm  # pyright: ignore[reportMissingImports]

        return timm.create_model(model).eval()
    depth, _, side = model.partition("-")
    return CifarResNet((int(depth) - 2) // 6, side == "both").eval()


def draw(model: Any) -> None:
    """Give every norm its own scale, shift and statistics: a fresh model would not tell them apart."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for tensor, low, high in (
                (module.weight.data, 0.5, 1.5),
                (module.bias.data, -0.3, 0.3),
                (module.running_mean, -0.3, 0.3),
                (module.running_var, 0.5, 1.5),
            ):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)


def main(command: str, library: str, name: str, size: str, folder: str) -> None:
    """Run one command."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    place, model = Path(folder), build(library, name)
    if command == "make":
        draw(model)
        images = np.random.default_rng(0).normal(size=(2, int(size), int(size), 3)).astype(np.float32)
        np.save(place / "images.npy", images)
        torch.save(model.state_dict(), place / "weights.pth")
    else:
        model.load_state_dict(torch.load(place / "back.pth", weights_only=True), strict=True)
        images = np.load(place / "images.npy")
    with torch.no_grad():
        logits = model(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
    np.save(place / ("logits.npy" if command == "make" else "back.npy"), logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
