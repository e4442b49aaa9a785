"""The side of torch in the parity tests: models of torchvision, timm and CIFAR ResNets, with drawn weights."""

import sys
from typing import Any

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

    def __init__(self, n: int, both: bool, channels: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(16)
        inside = 16
        for number, width in enumerate((16, 32, 64), start=1):
            units = []
            for unit in range(n):
                units.append(Unit(inside, width, 2 if number > 1 and unit == 0 else 1, both))
                inside = width
            setattr(self, f"layer{number}", torch.nn.Sequential(*units))
        self.linear = torch.nn.Linear(64, num_classes)

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
    """Give every norm its own scale, shift and statistics, and layer scales size: a fresh model tells none apart."""
    generator = torch.Generator().manual_seed(1)
    drawn = []
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d | torch.nn.LayerNorm):
            drawn += [(module.weight.data, 0.5, 1.5), (module.bias.data, -0.3, 0.3)]
        if isinstance(module, torch.nn.BatchNorm2d):
            drawn += [(module.running_mean, -0.3, 0.3), (module.running_var, 0.5, 1.5)]
    drawn += [(p.data, 0.1, 0.5) for name, p in model.named_parameters() if name.endswith(("layer_scale", ".gamma"))]
    for tensor, low, high in drawn:
        tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)


def calibrate(model: Any, images: Any) -> None:
    """Give the norms the statistics of these images [N, H, W, C], or larger variances.

    With others a deep network's numbers grow so large that its logits are rounding: those of timm's EfficientNetV2-S
    were off by a half between torch's own float32 and float64.
    """
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    model.train()
    logits_of(model, images)
    model.eval()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.running_var.clamp_(min=0.5)  # a channel that is nearly constant would be blown up


def decide(model: Any) -> None:
    """Scale and shift norms so that nearly every relu after one is clearly on or clearly off.

    A number within rounding of zero would open the relu on one side and not on the other, and one such among the few
    pixels of the last units moves gradients by per cents. The same goes for 3, where a hard swish bends, and for 6.
    Which of them are right is the logits' matter.
    """
    if not any(kind in type(module).__name__.lower() for module in model.modules() for kind in ("relu", "hard")):
        return
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            # By the width alone, so that a channel's shifts do not cancel where a branch and its shortcut are added.
            generator = torch.Generator().manual_seed(len(module.bias))
            on = torch.rand(module.bias.shape, generator=generator) < 0.7
            module.weight.data *= 0.2
            module.bias.data.copy_(torch.where(on, 1.5, -1.5) + 0.2 * module.bias.data)


def without_chance(model: Any) -> Any:
    """Switch dropout and stochastic depth off, and batch statistics on."""
    model.train()
    for module in model.modules():
        if type(module).__name__ in ("Dropout", "StochasticDepth", "DropPath"):
            for name in ("p", "drop_prob"):
                if hasattr(module, name):
                    setattr(module, name, 0.0)
    if hasattr(model, "drop_rate"):  # timm's rate before the classifier
        model.drop_rate = 0.0
    return model


def logits_of(model: Any, images: Any) -> Any:
    """Return the logits of images [N, H, W, C], in evaluation."""
    with torch.no_grad():
        return model(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()


def step_of(model: Any, images: Any, labels: Any) -> tuple[Any, dict[str, Any]]:
    """Return logits and all gradients of one training step in float64; the model stays changed."""
    model = without_chance(model.double())
    logits = model(torch.from_numpy(images).double().permute(0, 3, 1, 2))
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels)).backward()
    return logits.detach().numpy(), {name: p.grad.numpy() for name, p in model.named_parameters()}
