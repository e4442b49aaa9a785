"""How images become the input of a network: what a checkpoint says of it, so that no dataset is needed to predict."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.config.schema import Config
from headrace.data.augmentation.preprocess import Preprocess
from headrace.data.dataset import DataInfo
from headrace.data.decoding.crop import uncropped_side, usual_shorter_side


@dataclass(frozen=True, kw_only=True)
class InputForm:
    """The shape and the normalization of the input, and how images of other sizes are resized to it in evaluation."""

    image_hwc: tuple[int, int, int]
    normalization: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shorter_side: int | None  # of a resized image, before the centre is cropped; None: the size x 256 / 224
    antialias: bool
    interpolation: str = "bilinear"

    @classmethod
    def of_data(cls, info: DataInfo, config: Config) -> "InputForm":
        """Return how a configuration makes the input of the images of its dataset."""
        return cls(
            image_hwc=info.image_hwc,
            normalization=info.normalization,
            mean=info.channel_mean,
            std=info.channel_std,
            shorter_side=config.data.eval_resize_size or uncropped_side(info.image_hwc[0]),
            antialias=config.data.resize_antialias,
            interpolation=config.data.eval_interpolation,
        )

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> "InputForm":
        """Return what `saved` gave to a manifest; older ones do not name the interpolation."""
        height, width, channels = saved["image_hwc"]
        return cls(
            image_hwc=(height, width, channels),
            normalization=saved["normalization"],
            mean=tuple(saved["mean"]),
            std=tuple(saved["std"]),
            shorter_side=saved["shorter_side"],
            antialias=saved["antialias"],
            interpolation=saved.get("interpolation", "bilinear"),
        )

    def saved(self) -> dict[str, Any]:
        """Return the form as plain values, for a checkpoint's manifest."""
        return {
            "image_hwc": list(self.image_hwc),
            "normalization": self.normalization,
            "mean": list(self.mean),
            "std": list(self.std),
            "shorter_side": self.shorter_side,
            "antialias": self.antialias,
            "interpolation": self.interpolation,
        }

    def at_size(self, image_hwc: tuple[int, int, int]) -> "InputForm":
        """Return the form of images of another shape."""
        return replace(self, image_hwc=image_hwc)

    @property
    def resized_side(self) -> int:
        """The shorter side of a resized image, before the centre is cropped."""
        return self.shorter_side or usual_shorter_side(self.image_hwc[0])

    @property
    def preprocess(self) -> Preprocess:
        """How pixels of that size become the input."""
        return Preprocess(
            augmentation="none",
            normalization=self.normalization,
            mean=self.mean,
            std=self.std,
            seed=0,  # nothing is drawn: every run has the same program
            image_hwc=self.image_hwc,
        )
