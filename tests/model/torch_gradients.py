"""The side of torch in the gradient parity tests, run by a Python that has torch, torchvision and timm.

`torch_gradients.py LIBRARY MODEL SIZE FOLDER` draws weights and images, takes one training step's loss and gradients in
float64, and writes weights.pth, images.npy, labels.npy, logits.npy and gradients.pth (named as the weights) to FOLDER.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))
from torch_side import build, draw  # pyright: ignore[reportMissingImports]

NUM_IMAGES = 8


def decide(model: Any) -> None:
    """Shift norms so far that nearly every relu after one is clearly on or clearly off.

    A number within rounding of zero would open the relu on one side and not on the other, and one such among the few
    pixels of the last units moves gradients by per cents. Which relus are right is the logits' matter.
    """
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            on = torch.rand(module.bias.shape, generator=generator) < 0.7
            module.bias.data.copy_(torch.where(on, 4.0, -4.0) + module.bias.data)


def without_chance(model: Any) -> Any:
    """Switch dropout and stochastic depth off, and batch statistics on."""
    model.train()
    for module in model.modules():
        if type(module).__name__ in ("Dropout", "StochasticDepth", "DropPath"):
            for name in ("p", "drop_prob"):
                if hasattr(module, name):
                    setattr(module, name, 0.0)
    return model


def main(library: str, name: str, size: str, folder: str) -> None:
    """Compute and write everything."""
    torch.manual_seed(0)
    place, model = Path(folder), build(library, name)
    draw(model)
    decide(model)
    torch.save(model.state_dict(), place / "weights.pth")
    rng = np.random.default_rng(0)
    images = rng.normal(size=(NUM_IMAGES, int(size), int(size), 3)).astype(np.float32)
    labels = rng.integers(0, 10, NUM_IMAGES)
    model = without_chance(model.double())
    logits = model(torch.from_numpy(images).double().permute(0, 3, 1, 2))
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels)).backward()
    gradients = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    gradients |= {key: value.grad for key, value in model.named_parameters()}
    torch.save({key: value.float() for key, value in gradients.items()}, place / "gradients.pth")
    for key, value in (("images", images), ("labels", labels), ("logits", logits.detach().numpy())):
        np.save(place / f"{key}.npy", value)


if __name__ == "__main__":
    main(*sys.argv[1:])
