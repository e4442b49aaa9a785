"""The section of the schema about augmentation: random changes, mixing and progressive sizes of training images."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.config.field import Remark, both_given, idle, option
from headrace.rows.values import at_least, between

# The operations of rand_augment, in the order of the table in rand_augment.py; `equalize` only where it is named.
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

AUTO_AUGMENT_POLICIES = ("imagenet", "trivial", "3-augment", "augmix")


def known_operations(words: tuple[str, ...]) -> str:
    """Limit to operations that there are, each once."""
    unknown = [word for word in words if word not in RAND_AUGMENT_OPERATIONS]
    if unknown:
        return f"{unknown[0]!r} is none of {', '.join(RAND_AUGMENT_OPERATIONS)}"
    return "" if len(set(words)) == len(words) else "must name each operation once"


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Random changes, mixing and shrinking of training images; all off by default."""

    color_jitter: float = option(
        0.0,
        "Strength of random brightness, contrast and saturation: each factor lies between 1 - x and 1 + x; 0 is off.",
        aliases=("colour_jitter",),
        check=between(0, 1),
    )
    hue_jitter: float = option(
        0.0, "Largest random shift of the hue, as a fraction of the colour circle; 0 is off.", check=between(0, 0.5)
    )
    grayscale: float = option(
        0.0, "Fraction of training images that lose their colours; 0 is off.", check=between(0, 1)
    )
    gaussian_blur: float = option(
        0.0,
        "Fraction of training images that are blurred, by a Gaussian of 0.1 to 2 pixels; 0 is off.",
        check=between(0, 1),
    )
    vertical_flip: bool = option(False, "Turn half of the training images upside down, at random.")
    rotation: float = option(
        0.0, "Rotate training images by up to this many degrees, either way; 0 is off.", check=between(0, 180)
    )
    random_erasing: float = option(
        0.0, "Fraction of training images in which a random rectangle is set to zero; 0 is off.", check=between(0, 1)
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
    rand_augment_std: float = option(
        0.0,
        "Standard deviation of rand_augment_magnitude, drawn for each image and operation; 0 keeps it fixed.",
        check=between(0, 30),
    )
    rand_augment_probability: float = option(
        1.0, "Probability that each operation of rand_augment is applied.", check=between(0, 1)
    )
    rand_augment_operations: tuple[str, ...] = option(
        (),
        "Operations that rand_augment chooses from; unset means all but equalize, which needs a histogram.",
        check=known_operations,
    )
    auto_augment: str | None = option(
        None,
        "A policy without settings: imagenet is AutoAugment's, trivial is TrivialAugment (wide), 3-augment one of "
        "grey, inverted light and blur (DeiT III), augmix a mixture of chains; unset is off.",
        aliases=("autoaugment",),
        choices=AUTO_AUGMENT_POLICIES,
        synonyms=(
            ("autoaugment", "imagenet"),
            ("ta_wide", "trivial"),
            ("trivialaugment", "trivial"),
            ("3", "3-augment"),
        ),
    )
    alternating_flip: bool = option(
        False,
        "Mirror each image in every second epoch, half of them in the first, instead of at random: no image comes the "
        "same way twice running.",
    )
    mixup_alpha: float = option(
        0.0,
        "Mixup: each image is mixed with its neighbour in the micro-batch by a factor from Beta(x, x); 0 is off.",
        check=between(0, 100),
    )
    cutmix_lambda: float = option(
        1.0,
        "Cutmix: fraction of an image that is kept when a box of another is pasted in (see cutmix_version); 1 is off.",
        check=between(0, 1),
    )
    cutmix_version: int = option(
        1,
        "Meaning of cutmix_lambda: 1 draws a fraction for each micro-batch, 2 uses cutmix_lambda itself.",
        check=between(1, 2),
    )
    cutmix_alpha: float = option(
        0.0,
        "Cutmix by its usual formula, instead of cutmix_lambda: the fraction kept is drawn from Beta(x, x); 0 is off.",
        check=between(0, 100),
    )
    mixup_switch_prob: float | None = option(
        None,
        "With mixup and cutmix: probability that a micro-batch gets cutmix, else it gets mixup; unset applies both.",
        check=between(0, 1),
    )
    train_image_size: int | None = option(
        None,
        "Height and width of training images, shrunk on the device from image_size; unset means image_size, with "
        "which validation is always done.",
        check=at_least(4),
    )
    progressive_resolution: int | None = option(
        None,
        "Height and width of training images at the start of the run, growing to full size; unset is off.",
        check=at_least(4),
    )
    progressive_resolution_end: float = option(
        0.8, "Fraction of the run after which images have their full size.", check=between(0.01, 1)
    )
    progressive_resolution_sizes: int = option(
        4, "Number of different sizes, from the first to the full one; each is compiled once.", check=between(2, 32)
    )

    @property
    def mixing(self) -> str:
        """The option that asks for mixed images, or an empty text."""
        on = {
            "mixup_alpha": self.mixup_alpha > 0,
            "cutmix_lambda": self.cutmix_lambda < 1,
            "cutmix_alpha": self.cutmix_alpha > 0,
        }
        return next((name for name, is_on in on.items() if is_on), "")


AUGMENT_RULES = (
    both_given(
        "train_image_size",
        "progressive_resolution",
        lambda facts: None not in (facts.config.augment.train_image_size, facts.config.augment.progressive_resolution),
        "Training images have one size, or sizes that grow to image_size.",
    ),
    both_given(
        "rand_augment",
        "auto_augment",
        lambda facts: facts.config.augment.rand_augment and facts.config.augment.auto_augment,
        "Each is a whole policy: an image gets one.",
    ),
    both_given(
        "cutmix_lambda",
        "cutmix_alpha",
        lambda facts: facts.config.augment.cutmix_lambda < 1 and facts.config.augment.cutmix_alpha > 0,
        "They are two formulas for the same box.",
    ),
)


def _without(name: str, owner: str, on: Callable[[Augment], object]) -> Remark:
    """Note that an option does nothing while the one that it belongs to is off."""
    return idle(name, f"without {owner}", lambda facts: facts.given(name) and not on(facts.config.augment))


AUGMENT_NOTES = (
    _without("cutmix_version", "cutmix_lambda", lambda augment: augment.cutmix_lambda < 1),
    *(
        _without(f"rand_augment_{name}", "rand_augment", lambda augment: augment.rand_augment)
        for name in ("magnitude", "std", "probability", "operations")
    ),
    _without(
        "mixup_switch_prob",
        "mixup_alpha and cutmix",
        lambda augment: augment.mixup_alpha and (augment.cutmix_alpha or augment.cutmix_lambda < 1),
    ),
    *(
        _without(name, "progressive_resolution", lambda augment: augment.progressive_resolution)
        for name in ("progressive_resolution_end", "progressive_resolution_sizes")
    ),
)
