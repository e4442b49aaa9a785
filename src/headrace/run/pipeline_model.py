"""PipelineModel, the class for custom networks before `Model` took its place; it works, and its use warns."""

from pathlib import Path
from typing import Any

import numpy as np

from headrace.config.load import NO_RECIPE
from headrace.run.model import Model
from headrace.run.model_inputs import positive
from headrace.run.trained_model import RAW, RunResult


class PipelineModel(Model):
    """A custom network with its options and weights, without a recipe. Deprecated: use `Model`."""

    _recipe = NO_RECIPE

    def fit(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        images: object,
        labels: object,
        *,
        num_epochs: int | None = None,
        steps_per_epoch: int | None = None,
        validation_data: tuple[Any, Any] | None = None,
        resume: str | Path | None = None,
    ) -> RunResult:
        """Train on images [N, H, W, C] (uint8 or float32) and labels [N]; return the result of the run.

        `steps_per_epoch` is the number of weight updates of an epoch; without it, what the images fill.
        """
        # one epoch unless told otherwise, as before; `Model` chooses a number for the dataset
        asked: dict[str, Any] = {"num_epochs": 1} | self._options
        if num_epochs is not None:
            asked["num_epochs"] = num_epochs
        if steps_per_epoch is not None:
            asked["weight_updates_per_epoch"] = positive(steps_per_epoch, "steps_per_epoch")
        resolved, custom = self._training_parts(images, labels, validation_data, asked)
        return self._fit(resolved, custom, resume, asked)

    def predict(self, images: object, *, weights: str = RAW) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the logits of these images, float32 [N, num_classes]."""
        return self.logits(images, weights=weights)

    def export(self, path: str | Path, *, format: str | None = "stablehlo", weights: str = RAW) -> Path:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write the network for other programs (stablehlo, onnx, safetensors), checked, and return the file's path."""
        return super().export(path, format=format, weights=weights)

    def load(self, path: str | Path) -> "PipelineModel":  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the weights of a checkpoint, or of a run's best one, made under any plan; return the model."""
        self.load_weights(path)
        return self
