"""The section of the schema that says how training images are changed at random, mixed and shrunk."""

from dataclasses import dataclass

from headrace.config.field import option
from headrace.config.values import at_least, between

# The operations of rand_augment, in the order of the table in data/rand_augment.py; `equalize` only where it is named.
RAND_AUGMENT_OPERATIONS = (
    "identity",
    "brightness",
    "contrast",
    "color",
    "sharpness",
    "posterize",
    "solarize",
    "autocontrast",
    "invert",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "equalize",
)


def known_operations(words: tuple[str, ...]) -> str:
    """Limit to operations that there are, each once."""
    unknown = [word for word in words if word not in RAND_AUGMENT_OPERATIONS]
    if unknown:
        return f"{unknown[0]!r} is none of {', '.join(RAND_AUGMENT_OPERATIONS)}"
    return "" if len(set(words)) == len(words) else "must name each operation once"


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Training images changed at random, mixed with others, small at first. All off by default."""

    color_jitter: float = option(
        0.0,
        "Strength of random brightness, contrast and saturation: each factor is from 1 - x to 1 + x; 0 is off.",
        aliases=("colour_jitter",),
        check=between(0, 1),
    )
    hue_jitter: float = option(
        0.0, "Greatest random turn of the hue, as a share of the colour circle; 0 is off.", check=between(0, 0.5)
    )
    random_erasing: float = option(
        0.0, "Share of the training images in which a random rectangle is set to zero; 0 is off.", check=between(0, 1)
    )
    rand_augment: int = option(
        0,
        "Random operations applied to each training image, one after the other (RandAugment); 0 is off.",
        aliases=("randaugment",),
        check=between(0, 8),
    )
    rand_augment_magnitude: float = option(
        9.0, "Strength of the operations of rand_augment, from 0 to 30.", check=between(0, 30)
    )
    rand_augment_operations: tuple[str, ...] = option(
        (),
        "Operations that rand_augment chooses from; none given means all but equalize, which costs a histogram.",
        check=known_operations,
    )
    mixup_alpha: float = option(
        0.0,
        "Mixup: each image is mixed with its neighbour in the micro-batch by a share from Beta(x, x); 0 is off.",
        check=between(0, 100),
    )
    cutmix_lambda: float = option(
        1.0,
        "Cutmix: share of an image that is kept when a box of another is put in (see cutmix_version); 1 is off.",
        check=between(0, 1),
    )
    cutmix_version: int = option(
        1,
        "How cutmix_lambda is meant: 1 draws a share for each micro-batch, 2 is that share itself.",
        check=between(1, 2),
    )
    cutmix_alpha: float = option(
        0.0,
        "Cutmix by its usual formula, given instead of cutmix_lambda: the share kept is from Beta(x, x); 0 is off.",
        check=between(0, 100),
    )
    progressive_resolution: int | None = option(
        None,
        "Height and width of training images at the start of the run, growing to full size; unset is off.",
        check=at_least(4),
    )
    progressive_resolution_end: float = option(
        0.8, "Share of the run after which images have their full size.", check=between(0.01, 1)
    )
    progressive_resolution_sizes: int = option(
        4, "Different sizes, from the first to the full one; each is compiled once.", check=between(2, 32)
    )
