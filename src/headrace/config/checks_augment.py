"""Rules across options about mixed, changed and shrunk training images."""

from collections.abc import Callable

from headrace.config.rule import Facts, Remark, Rule
from headrace.config.schema import Augment
from headrace.config.sections_data import MADE_UP_DATASETS


def _mixing(facts: Facts) -> str:
    """Return the option that asks for mixed images, or an empty text."""
    augment = facts.config.augment
    on = {
        "mixup_alpha": augment.mixup_alpha > 0,
        "cutmix_lambda": augment.cutmix_lambda < 1,
        "cutmix_alpha": augment.cutmix_alpha > 0,
    }
    return next((name for name, is_on in on.items() if is_on), "")


def _without(name: str, owner: str, on: Callable[[Augment], object]) -> Remark:
    """Say that an option does nothing while the one that it belongs to is off."""
    return Remark(
        when=lambda facts: facts.given(name) and not on(facts.config.augment),
        text=lambda facts: f"{facts.told(name)} has no effect without {owner}.",
    )


AUGMENT_RULES = (
    Rule(
        broken=lambda facts: (
            facts.config.data.normalise_input is not None
            and facts.config.data.normalization not in ("auto", facts.config.data.wanted_normalization)
        ),
        problem=lambda facts: f"{facts.told('normalise_input')} with {facts.told('normalization')}.",
        rule="Both say how pixels become numbers for the network.",
        remedy="Leave one of them out.",
    ),
    Rule(
        broken=lambda facts: (
            facts.config.data.fused_preprocessing and not facts.config.data.accelerator_side_preprocess
        ),
        problem=lambda facts: f"{facts.told('fused_preprocessing')} with {facts.told('accelerator_side_preprocess')}.",
        rule="What is fused is the device's preprocessing.",
        remedy="Leave one of them out.",
    ),
    Rule(
        broken=lambda facts: facts.config.data.balanced_sampling and not facts.config.data.shuffle,
        problem=lambda facts: f"{facts.told('balanced_sampling')} with {facts.told('shuffle')}.",
        rule="Which images of a class come, and when, is drawn at random.",
        remedy="Leave one of them out.",
    ),
    Rule(
        broken=lambda facts: facts.config.data.balanced_sampling and facts.config.data.dataset in MADE_UP_DATASETS,
        problem=lambda facts: f"{facts.told('balanced_sampling')} with {facts.told('dataset')}.",
        rule="Made-up images have random labels, about equally many of each.",
        remedy="Leave balanced_sampling out.",
    ),
    Rule(
        broken=lambda facts: facts.config.augment.cutmix_lambda < 1 and facts.config.augment.cutmix_alpha > 0,
        problem=lambda facts: f"Both are given: {facts.told('cutmix_lambda')} and {facts.told('cutmix_alpha')}.",
        rule="They are two formulas for the same box.",
        remedy="Leave one of them out.",
    ),
    Rule(
        broken=lambda facts: bool(_mixing(facts)) and facts.config.batch.micro_batch_size < 2,
        problem=lambda facts: f"{facts.told(_mixing(facts))} with {facts.told('micro_batch_size')}.",
        rule="An image is mixed with another one of its micro-batch.",
        remedy="Use --micro-batch-size 2 or more, or leave mixing out.",
    ),
)

AUGMENT_NOTES = (
    Remark(
        when=lambda facts: facts.config.data.fused_preprocessing,
        text=lambda facts: (
            f"{facts.told('fused_preprocessing')} changes nothing: the device always normalises in one pass, and "
            "images keep their channels (no fourth one is added)."
        ),
    ),
    _without("cutmix_version", "cutmix_lambda", lambda augment: augment.cutmix_lambda < 1),
    _without("rand_augment_magnitude", "rand_augment", lambda augment: augment.rand_augment),
    _without("rand_augment_operations", "rand_augment", lambda augment: augment.rand_augment),
    _without("progressive_resolution_end", "progressive_resolution", lambda augment: augment.progressive_resolution),
    _without("progressive_resolution_sizes", "progressive_resolution", lambda augment: augment.progressive_resolution),
)
