"""Datasets that worker processes can make again: at the top level of a module."""

import os
import time
from typing import Any

import numpy as np
from PIL import Image

from tests.data.image_files import smooth


class Pictures:
    """Pictures that say which process made them, by their label's second half."""

    classes = ("ant", "bee")

    def __init__(self, count: int = 16, *, seconds: float = 0.0) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[Any, int]:
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:  # Python code, which holds its lock
            pass
        return Image.fromarray(smooth(40, 50, seed=number)), number % 2


class Pixels:
    """Arrays whose values are the number of the process that made them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"image": np.full((1,), os.getpid(), np.int64), "label": number}


class Failing(Pictures):
    """The fifth item cannot be made; the sixth ends its process."""

    def __getitem__(self, number: int) -> tuple[Any, int]:
        if number == 5:
            raise KeyError("no such row")
        if number == 6:
            os._exit(9)
        return super().__getitem__(number)


class OnlyHere(Pictures):
    """It can be sent, and not be made again."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise OSError("the disk is not mounted")
