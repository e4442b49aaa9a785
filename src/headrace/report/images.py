"""Images in pages: thumbnails as addresses, and the validation images of a run's report."""

import base64
import io
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.report.markup import Html, element, section
from headrace.report.run_files import RunFiles

if TYPE_CHECKING:
    from PIL import Image

THUMBNAIL = 128  # pixels of a side, at most


def thumbnail(pixels: np.ndarray, side: int = THUMBNAIL) -> str:
    """Return an image of 0..255, reduced, as the address of an image; JPEG where PNG would be large."""
    from PIL import Image  # here: most reports at the end of a run have no images

    levels = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
    image = Image.fromarray(levels[..., 0] if levels.shape[-1] == 1 else levels[..., :3])
    image.thumbnail((side, side))
    # Small images, such as digits, are smaller as PNG and keep their sharp pixels.
    return image_address(image, "JPEG" if image.width * image.height > 48 * 48 else "PNG")


def image_address(image: "Image.Image", form: str) -> str:
    """Return an image as an address that contains it."""
    out = io.BytesIO()
    image.save(out, form, quality=80)  # the quality is JPEG's; PNG ignores it
    return f"data:image/{form.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


def draw_images(files: RunFiles) -> Html:
    """Return the section of notable images, and the mosaic of training images."""
    found = files.images
    if not found:
        return Html("")
    parts: list[Html] = []
    root = _root([row["file"] for name in ("mistakes", "hardest") for row in found[name]])
    mistakes = "The furthest from right" if "task" in found else "The most confident mistakes"
    for name, title in (("mistakes", mistakes), ("hardest", "Correct, but barely")):
        if found[name]:
            parts += [
                element("h3", title),
                element("div", *(_figure(row, root) for row in found[name]), class_="images"),
            ]
    if not found["mistakes"]:
        parts.append(element("p", f"There is no mistake among {found['num_images']:,} images."))
    if root:
        parts.append(element("p", f"Files are below {root}", class_="note"))
    if _is_image(found.get("mosaic")):
        sheet = Html(f'<img src="{found["mosaic"]}" alt="training images">')
        note = "Some training images as the network gets them in the first epoch, before any mixing."
        parts += [element("h3", "Training images"), element("div", sheet, class_="mosaic")]
        parts.append(element("p", note, class_="note"))
    return section("images", "Images", *parts)


def _is_image(address: object) -> bool:
    """Say whether an address is an image in itself: the file may have been written by anyone."""
    return isinstance(address, str) and address.startswith("data:image/") and not set(address) & set("\"'<> ")


def _root(files: Sequence[str]) -> str:
    """Return the directory that all files are in, to be shown once; '' for none."""
    levels = zip(*(file.split("/")[:-1] for file in files), strict=False)
    return "".join(f"{names[0]}/" for names in takewhile(lambda names: len(set(names)) == 1, levels))


def _figure(row: Mapping[str, Any], root: str) -> Html:
    picture = Html(f'<img src="{row["image"]}" alt="">' if _is_image(row["image"]) else "")
    if "text" in row:  # of labels or numbers
        lines = [element("b", row["text"]), Html("<br>"), f"is {row['truth']}"]
        file = element("div", row["file"].removeprefix(root), class_="faint", title=row["file"])
        return element("figure", picture, element("figcaption", *lines, file))
    text = f"{row['predicted']} {100 * row['probability']:.1f} %"
    if row["predicted"] == row["true"]:
        lines = [element("b", text)]
    else:
        lines = [element("b", text), Html("<br>"), f"is {row['true']} ({100 * row['true_probability']:.1f} %)"]
    file = element("div", row["file"].removeprefix(root), class_="faint", title=row["file"])
    return element("figure", picture, element("figcaption", *lines, file))
