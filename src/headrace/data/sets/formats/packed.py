"""Packed files, as `headrace data pack` makes them."""

from pathlib import Path

from headrace.config.schema import Data
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.mirror import open_file
from headrace.data.sets.pack import MAGIC, open_pack


def fits(path: Path) -> bool:
    if not path.is_file():
        return False
    with open_file(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def open_set(path: Path, data: Data) -> ImageSet:
    """List the images of both splits."""
    pack = open_pack(path)
    remark = (
        f"Validation images are {pack.split_by}: encoded once more, they are other pixels than those of the original "
        "files, and so is the accuracy."
    )
    return ImageSet(
        kind="packed",
        place=str(path),
        class_names=pack.class_names,
        train=pack.train,
        validation=pack.validation,
        split_by=pack.split_by,
        remarks=(remark,) if len(pack.validation) else (),
    )
