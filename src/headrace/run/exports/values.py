"""What an export is asked for, and what it makes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.rows.exports import PLATFORMS

# Of the largest logit. float16 has 11 bits; a resized pixel may differ by a level from the one that validation makes.
TOLERANCES = {"float32": 1e-3, "float16": 2e-2}
RESIZED_TOLERANCE = 1e-2


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is written: the format, its numbers, the names of torch-names, the input of a whole network, the check."""

    format: str
    names: str = ""
    input: str = "uint8"
    platforms: tuple[str, ...] = PLATFORMS
    dtype: str = "float32"
    with_preprocessing: bool = False  # the network takes pixels of any size: resize and crop are part of it
    check_images: tuple[Path, ...] = ()  # [the run's validation images]

    @property
    def as_pixels(self) -> bool:
        """Whether the network takes pixels from 0 to 255."""
        return self.input == "uint8"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file that was written, the description beside it, and remarks on it and on the result of its check."""

    path: Path
    description: Path
    remark: str


@dataclass(frozen=True, kw_only=True)
class Made:
    """The bytes of an export, what its description says besides, and a remark."""

    data: bytes
    more: dict[str, Any]
    remark: str = ""
