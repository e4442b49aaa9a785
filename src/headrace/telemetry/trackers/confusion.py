"""A confusion matrix as an image."""

from collections.abc import Mapping
from typing import Any

import numpy as np

_LEGIBLE, _NAME = 12, 24  # pixels of a cell with a name; letters of a name
_RIGHT, _WRONG = np.array((0, 114, 178)), np.array((213, 94, 0))  # safe for color-blind eyes


def draw_confusion(report: Mapping[str, Any]) -> np.ndarray:
    """Return the confusion matrix as an image: true classes down, predicted ones across, mistakes in orange."""
    from PIL import Image, ImageDraw  # here: most runs draw nothing, and it is 18 ms of every start

    matrix = np.array(report["confusion_matrix"], np.float64)
    # The root of the share, as in the report: few mistakes, which one looks for, would be invisible otherwise.
    shares = np.sqrt(matrix / np.maximum(matrix.sum(1, keepdims=True), 1))[..., None]
    colors = np.where(np.eye(len(matrix), dtype=bool)[..., None], _RIGHT, _WRONG)
    side = max(2, 360 // len(matrix))
    cells = (255 + shares * (colors - 255)).repeat(side, 0).repeat(side, 1)
    names = [row["name"][:_NAME] for row in report["classes"]]
    margin = 8 + 6 * max(map(len, names)) if side >= _LEGIBLE else 0
    sheet = Image.new("RGB", (cells.shape[1] + margin, cells.shape[0] + margin), "white")
    sheet.paste(Image.fromarray(np.rint(cells).astype(np.uint8)), (margin, margin))
    if margin:
        across = Image.new("RGB", (margin, cells.shape[1]), "white")  # drawn down, then turned
        for image, first in ((sheet, margin), (across, 0)):
            draw = ImageDraw.Draw(image)
            for k, name in enumerate(names):
                draw.text((4, first + (k + 0.5) * side), name, fill="black", anchor="lm")
        sheet.paste(across.transpose(Image.Transpose.ROTATE_90), (margin, 0))
    return np.asarray(sheet)
