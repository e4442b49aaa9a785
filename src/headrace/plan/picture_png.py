"""Placed schedules as a PNG: the marks of the SVG, drawn by Pillow at twice the size."""

import io
from collections.abc import Mapping
from typing import Any

from headrace.plan.picture_files import Box, Text, draw_marks
from headrace.plan.table import Table

SCALE = 2  # for sharp letters on today's screens


def draw_png(tables: Mapping[str, Table]) -> bytes:
    """Return a PNG with one panel for each table."""
    from PIL import Image, ImageDraw

    drawing = draw_marks(tables)
    image = Image.new("RGB", (round(drawing.width * SCALE), round(drawing.height * SCALE)), "#ffffff")
    pen = ImageDraw.Draw(image)
    for mark in drawing.marks:
        if isinstance(mark, Box):
            _draw_box(pen, mark)
        else:
            _draw_text(pen, mark)
    # A schedule has few colours: a palette is a quarter of the size.
    out = io.BytesIO()
    image.quantize(64).save(out, "PNG", optimize=True)
    return out.getvalue()


def _draw_box(pen: Any, box: Box) -> None:
    corners = [value * SCALE for value in (box.x, box.y, box.x + box.width, box.y + box.height)]
    pen.rounded_rectangle(corners, radius=box.radius * SCALE, fill=box.fill, outline=box.stroke)


def _draw_text(pen: Any, text: Text) -> None:
    from PIL import ImageFont

    font = ImageFont.load_default(text.size * SCALE)
    anchor = {"start": "ls", "middle": "ms"}[text.anchor]
    pen.text((text.x * SCALE, text.y * SCALE), text.words, fill=text.fill, font=font, anchor=anchor)
