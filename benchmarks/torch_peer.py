"""PyTorch's side of the benchmarks: its networks, a fixed batch, a training step and a forward pass.

networks.py, cpu_duel.py, torch_step.py and torch_job.py share it, so that all compare with the same thing: channels
last, SGD with momentum, gradients set to none. It needs a Python with torch, and torchvision or timm for networks.
"""
# pyright: reportMissingImports=false

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "weights"))
from torch_side import CifarResNet, build  # noqa: F401

# Where torchvision has another name than Headrace; networks that it does not have are measured in Headrace alone.
TORCHVISION = {"resnext50": "resnext50_32x4d", "resnext101": "resnext101_32x4d"}


def build_network(name: str) -> Any:
    """Return a network by Headrace's name: a CIFAR ResNet, or torchvision's."""
    if name.startswith("cifar_resnet"):
        return build("cifar", name.removeprefix("cifar_resnet") + "-end")
    return build("torchvision", TORCHVISION.get(name, name))


def fixed_batch(batch: int, size: int, classes: int, device: str = "cpu") -> tuple[Any, Any]:
    """Return random images, channels last, and labels."""
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    return images, torch.randint(0, classes, (batch,), device=device)


def update(
    forward: Callable[[Any], Any],
    optimizer: Any,
    images: Any,
    labels: Any,
    cast: AbstractContextManager[Any] | None = None,
    label_smoothing: float = 0.0,
) -> Any:
    """Change the weights by one batch; return its loss. `cast` is an autocast, around the forward pass alone."""
    with cast or nullcontext():
        loss = torch.nn.functional.cross_entropy(forward(images), labels, label_smoothing=label_smoothing)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def training_step(
    net: Any, forward: Callable[[Any], Any], batch: tuple[Any, Any], cast: AbstractContextManager[Any] | None = None
) -> Callable[[], Any]:
    """Return a function that takes a step on the same batch; `forward` is the network, or the compiled one."""
    net.train()
    fused = batch[0].device.type == "cuda"
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=fused)
    return lambda: update(forward, optimizer, *batch, cast)


def forward_pass(
    net: Any, forward: Callable[[Any], Any], images: Any, cast: AbstractContextManager[Any] | None = None
) -> Callable[[], Any]:
    """Return a function that evaluates the batch."""
    net.eval()

    def infer() -> Any:
        with torch.inference_mode(), cast or nullcontext():
            return forward(images)

    return infer
