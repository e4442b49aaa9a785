"""What a network says about itself, and what its family does."""

from dataclasses import dataclass
from typing import Literal

SMALL_IMAGE = 64  # pixels: up to here a family's networks for small images come first


@dataclass(frozen=True, kw_only=True)
class NetworkRow:
    """One network: its name, the family and size that also name it, and the images and classes it was made for.

    A family's rows have more: the numbers that its blocks are made of.
    """

    name: str
    family: str
    size: str = ""
    other_sizes: tuple[str, ...] = ()  # as people write it, too
    other_names: tuple[str, ...] = ()
    image_size: int = 224
    num_classes: int = 1000
    norm: Literal["any", "layer_norm", "none"] = "any"  # what an option may choose, or the only one it has
    torch_only: bool = False  # defined by PyTorch's libraries alone: theirs in every dialect
    epsilons: tuple[tuple[str, float], ...] = ()  # of its norms, in the dialects where it has another than most

    @property
    def is_small(self) -> bool:
        """Say whether it was made for small images."""
        return self.image_size <= SMALL_IMAGE


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of networks: its rows, what all of them have in common, and where their blocks are made.

    `module` has `blocks`(row, build), the named blocks of a row, and `aliases`(row, build), other names of its split
    points as pairs with ours.
    """

    name: str
    rows: tuple[NetworkRow, ...]
    sizes: tuple[str, str] = ("", "")  # where none is named: for large and for small images
    module: str
    options: tuple[str, ...] = ()  # those of the section model that not every family has
    groups: tuple[int, int] = (32, 16)  # of group norm, for large and for small images
