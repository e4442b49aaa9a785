"""Draw docs/plots/augmentation.png: every random change of training images, made by the code that training runs.

    python benchmarks/augmentation_sheet.py docs/plots/augmentation.png

The scenes are drawn here, so that the image has no other source.
"""

import sys
from typing import Any

import jax
import numpy as np
from PIL import Image, ImageDraw

from headrace.config.load import config_from
from headrace.config.section_augment import AUTO_AUGMENT_POLICIES, RAND_AUGMENT_OPERATIONS
from headrace.data.augmentation.preprocess import preprocess_spec
from headrace.data.dataset import describe_dataset
from headrace.data.feeding.fetch import fetch

SIZE, COLUMNS, LABEL, GAP = 72, 8, 170, 4
MICRO = 4  # scenes in a micro-batch


def scene(number: int) -> np.ndarray:
    """Return one of four drawn scenes, uint8 [SIZE, SIZE, 3]."""
    big = 4 * SIZE
    sky = [(120, 180, 235), (250, 190, 120), (60, 70, 120), (180, 215, 190)][number]
    ground = [(90, 150, 70), (190, 150, 90), (50, 90, 110), (150, 110, 70)][number]
    things = [(200, 60, 50), (120, 70, 160), (230, 200, 60), (40, 120, 90)][number]
    image = Image.new("RGB", (big, big), sky)
    draw = ImageDraw.Draw(image)
    shade = np.linspace(1.15, 0.85, big)[:, None, None]
    image = Image.fromarray(np.clip(np.asarray(image) * shade, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    draw.ellipse((big * 0.68, big * 0.08, big * 0.88, big * 0.28), fill=(255, 240, 170))
    draw.polygon([(0, big * 0.7), (big * 0.4, big * 0.45), (big, big * 0.72), (big, big), (0, big)], fill=ground)
    if number % 2 == 0:
        draw.rectangle((big * 0.25, big * 0.5, big * 0.6, big * 0.85), fill=things)
        draw.polygon([(big * 0.2, big * 0.5), (big * 0.42, big * 0.3), (big * 0.65, big * 0.5)], fill=(90, 50, 40))
        draw.rectangle((big * 0.38, big * 0.65, big * 0.48, big * 0.85), fill=(240, 230, 210))
    else:
        draw.rectangle((big * 0.42, big * 0.5, big * 0.5, big * 0.88), fill=(100, 70, 40))
        draw.ellipse((big * 0.25, big * 0.2, big * 0.67, big * 0.6), fill=things)
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.LANCZOS))


ROWS: list[tuple[str, dict[str, Any]]] = [
    ("(as stored)", {}),
    ("train_augmentation flip-crop", {"train_augmentation": "flip-crop"}),
    ("color_jitter 0.4", {"color_jitter": 0.4}),
    ("hue_jitter 0.2", {"hue_jitter": 0.2}),
    ("grayscale 0.5", {"grayscale": 0.5}),
    ("gaussian_blur 1", {"gaussian_blur": 1.0}),
    ("vertical_flip", {"vertical_flip": True}),
    ("rotation 30", {"rotation": 30.0}),
    ("random_erasing 1", {"random_erasing": 1.0}),
    *(
        (f"rand_augment {name}", {"rand_augment": 1, "rand_augment_magnitude": 20, "rand_augment_operations": [name]})
        for name in RAND_AUGMENT_OPERATIONS
        if name != "identity"
    ),
    ("rand_augment 2", {"rand_augment": 2}),
    *((f"auto_augment {name}", {"auto_augment": name}) for name in AUTO_AUGMENT_POLICIES),
    ("mixup_alpha 1", {"mixup_alpha": 1.0}),
    ("cutmix_alpha 1", {"cutmix_alpha": 1.0}),
    ("mixup_alpha, cutmix_alpha", {"mixup_alpha": 1.0, "cutmix_alpha": 1.0}),
    ("progressive_resolution 24", {"size": 24}),
]


def row_of(options: dict[str, Any]) -> np.ndarray:
    """Return what the network would see of the scenes, before normalisation, in two epochs."""
    size = options.get("size")
    given = {key: value for key, value in options.items() if key != "size"}
    shown = {"dataset": "synthetic", "image_size": SIZE, "normalization": "none", "micro_batch_size": MICRO}
    config = config_from(shown | given)
    spec = preprocess_spec(config.data, config.augment, describe_dataset(config.data), 8)
    spec = spec.at_size((size, size)) if size else spec
    index = np.arange(MICRO, dtype=np.int32)
    block = {"images": np.stack([scene(number) for number in range(MICRO)]), "labels": index, "index": index}
    run = jax.jit(lambda block: fetch(None, block, spec, train=True)[0])
    seen = np.concatenate([np.asarray(run(block | {"epoch": np.uint32(epoch)})) for epoch in range(COLUMNS // MICRO)])
    return np.clip(np.round(seen), 0, 255).astype(np.uint8)


def main(path: str) -> None:
    """Draw the sheet."""
    step = SIZE + GAP
    sheet = Image.new("RGB", (LABEL + COLUMNS * step, len(ROWS) * step), (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    for y, (name, options) in enumerate(ROWS):
        draw.text((4, y * step + SIZE // 2 - 6), name, fill=(0, 0, 0))
        for x, image in enumerate(row_of(options)):
            sheet.paste(Image.fromarray(image), (LABEL + x * step, y * step))
    sheet.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
