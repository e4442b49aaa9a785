"""The section of the schema about augmentation: random changes, mixing and progressive sizes of training images."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.config.field import Remark, Rule, option
from headrace.config.section_data import SYNTHETIC_DATASETS
from headrace.config.values import at_least, between

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


def _without(name: str, owner: str, on: Callable[[Augment], object]) -> Remark:
    """Say that an option does nothing while the one that it belongs to is off."""
    return Remark(
        when=lambda facts: facts.given(name) and not on(facts.config.augment),
        text=lambda facts: f"{facts.describe(name)} has no effect without {owner}.",
    )


AUGMENT_RULES = (
    Rule(
        broken=lambda facts: (
            facts.config.data.normalise_input is not None
            and facts.config.data.normalization not in ("auto", facts.config.data.wanted_normalization)
        ),
        problem=lambda facts: f"{facts.describe('normalise_input')} with {facts.describe('normalization')}.",
        rule="Both say how pixels become numbers for the network.",
        remedy="Leave one of them out.",
    ),
    Rule(
        broken=lambda facts: (
            facts.config.data.fused_preprocessing and not facts.config.data.accelerator_side_preprocess
        ),
        problem=lambda facts: (
            f"{facts.describe('fused_preprocessing')} with {facts.describe('accelerator_side_preprocess')}."
        ),
        rule="What is fused is the device's preprocessing.",
        remedy="Leave one of them out.",
    ),
    Rule(
        broken=lambda facts: facts.config.data.balanced_sampling and not facts.config.data.shuffle,
        problem=lambda facts: f"{facts.describe('balanced_sampling')} with {facts.describe('shuffle')}.",
        rule="Which images of a class come, and when, is drawn at random.",
        remedy="Leave one of them out.",
    ),
    Rule(
        broken=lambda facts: facts.config.data.balanced_sampling and facts.config.data.dataset in SYNTHETIC_DATASETS,
        problem=lambda facts: f"{facts.describe('balanced_sampling')} with {facts.describe('dataset')}.",
        rule="Synthetic images have random labels, about equally many of each.",
        remedy="Leave balanced_sampling out.",
    ),
    Rule(
        broken=lambda facts: facts.config.data.repeated_augmentation > 1 and not facts.config.data.shuffle,
        problem=lambda facts: f"{facts.describe('repeated_augmentation')} with {facts.describe('shuffle')}.",
        rule="An epoch sees only a part of the images, which must be another one each time.",
        remedy="Leave one of them out.",
    ),
    Rule(
        broken=lambda facts: facts.config.data.repeated_augmentation > 1 and facts.config.data.balanced_sampling,
        problem=lambda facts: f"{facts.describe('repeated_augmentation')} with {facts.describe('balanced_sampling')}.",
        rule="Both say how often an image occurs in an epoch.",
        remedy="Leave one of them out.",
    ),
    Rule(
        broken=lambda facts: (
            facts.config.augment.train_image_size is not None
            and facts.config.augment.progressive_resolution is not None
        ),
        problem=lambda facts: (
            f"Both are given: {facts.describe('train_image_size')} and {facts.describe('progressive_resolution')}."
        ),
        rule="Training images have one size, or sizes that grow to image_size.",
        remedy="Leave one of them out.",
    ),
    Rule(
        broken=lambda facts: facts.config.augment.cutmix_lambda < 1 and facts.config.augment.cutmix_alpha > 0,
        problem=lambda facts: (
            f"Both are given: {facts.describe('cutmix_lambda')} and {facts.describe('cutmix_alpha')}."
        ),
        rule="They are two formulas for the same box.",
        remedy="Leave one of them out.",
    ),
    Rule(
        broken=lambda facts: bool(facts.config.augment.mixing) and facts.config.batch.micro_batch_size == 1,
        problem=lambda facts: (
            f"{facts.describe(facts.config.augment.mixing)} with {facts.describe('micro_batch_size')}."
        ),
        rule="An image is mixed with another one of its micro-batch.",
        remedy="Use --micro-batch-size 2 or more, or leave mixing out.",
    ),
)

AUGMENT_NOTES = (
    Remark(
        when=lambda facts: facts.config.data.fused_preprocessing,
        text=lambda facts: (
            f"{facts.describe('fused_preprocessing')} changes nothing: the device always normalises in one pass, and "
            "images keep their channels (no fourth one is added)."
        ),
    ),
    *(
        Remark(
            when=lambda facts, name=name: (
                facts.given(name) and facts.config.data.train_augmentation in ("none", "flip")
            ),
            text=lambda facts, name=name: (
                f"{facts.describe(name)} has no effect with {facts.describe('train_augmentation')}."
            ),
        )
        for name in ("crop_padding", "crop_fill")
    ),
    _without("cutmix_version", "cutmix_lambda", lambda augment: augment.cutmix_lambda < 1),
    _without("rand_augment_magnitude", "rand_augment", lambda augment: augment.rand_augment),
    _without("rand_augment_std", "rand_augment", lambda augment: augment.rand_augment),
    _without("rand_augment_probability", "rand_augment", lambda augment: augment.rand_augment),
    _without(
        "mixup_switch_prob",
        "mixup_alpha and cutmix",
        lambda augment: augment.mixup_alpha and (augment.cutmix_alpha or augment.cutmix_lambda < 1),
    ),
    _without("rand_augment_operations", "rand_augment", lambda augment: augment.rand_augment),
    _without("progressive_resolution_end", "progressive_resolution", lambda augment: augment.progressive_resolution),
    _without("progressive_resolution_sizes", "progressive_resolution", lambda augment: augment.progressive_resolution),
)
