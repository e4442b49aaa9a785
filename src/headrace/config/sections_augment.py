"""The section of the schema that says how training images are mixed."""

from dataclasses import dataclass

from headrace.config.field import option
from headrace.config.values import between


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Training images mixed with others. All off by default."""

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
