"""Which operations change an image, and how strongly: RandAugment, AutoAugment, TrivialAugment, 3-Augment, AugMix.

A policy is a value that draws, for each image and each of its layers, an operation and a strength. Strengths that vary
come from a few equally likely ones, so that all of them can be computed on the host.
"""

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Protocol, Self

import numpy as np

from headrace.config.section_augment import RAND_AUGMENT_OPERATIONS, Augment
from headrace.core.rng import Seed, array_module, draw, name_id
from headrace.data.augmentation.colors import Array, Epoch
from headrace.data.augmentation.operations import RANGES, Ranges

FULL = 30.0  # the greatest magnitude
_NUM_LEVELS = 16  # strengths, where they vary
_BY_DEFAULT = tuple(name for name in RAND_AUGMENT_OPERATIONS if name != "equalize")


class Policy(Protocol):
    """What draws operations."""

    @property
    def count(self) -> int:
        """The number of layers: operations one after the other."""
        ...

    @property
    def operations(self) -> tuple[str, ...]:
        """Their names, in the order of their numbers."""
        ...

    @property
    def levels(self) -> tuple[float, ...]:
        """The strengths, from 0 to 1."""
        ...

    @property
    def ranges(self) -> Ranges:
        """What the operations do at a level."""
        ...

    def names_of(self, layer: int) -> tuple[str, ...]:
        """Return the operations that a layer may draw."""
        ...

    def choose(self, index: Array, epoch: Epoch, layer: int) -> tuple[Array, Array]:
        """Return (number of the operation, number of its strength) of each sample, int32 [n] each.

        An operation that is not applied has the number behind the last one. Strengths are numbered by level and sign:
        2 level + 1 is the negative one.
        """
        ...


def moves_pixels(policy: Policy) -> bool:
    """Say whether an operation of a policy moves pixels."""
    return any(name in policy.ranges.moves for name in policy.operations)


@dataclass(frozen=True, kw_only=True)
class RandAugment:
    """Operations drawn independently of each other, of one strength or of strengths around it, or of any strength."""

    count: int
    magnitude: float
    operations: tuple[str, ...]
    seed: Seed
    std: float = 0.0  # of the magnitude
    probability: float = 1.0  # that an operation is applied
    num_even: int = 0  # instead of the magnitude: so many strengths from nothing to all, equally likely
    range_name: str = "usual"
    purpose: str = "rand_augment"  # of the draws
    varies_count: bool = False  # from 1 on, equally likely

    @property
    def ranges(self) -> Ranges:
        """What the operations do at a level."""
        return RANGES[self.range_name]

    @property
    def levels(self) -> tuple[float, ...]:
        """Return the equally likely strengths, from 0 to 1."""
        if self.num_even:
            return tuple(at / (self.num_even - 1) for at in range(self.num_even))
        if not self.std:
            return (self.magnitude / FULL,)
        normal = NormalDist(self.magnitude, self.std)
        drawn = [normal.inv_cdf((at + 0.5) / _NUM_LEVELS) for at in range(_NUM_LEVELS)]
        return tuple(min(max(magnitude, 0.0), FULL) / FULL for magnitude in drawn)

    def with_seed(self, seed: Seed) -> Self:
        """Return the same with other draws."""
        return replace(self, seed=seed)

    def names_of(self, layer: int) -> tuple[str, ...]:
        """Return all operations."""
        return self.operations

    def choose(self, index: Array, epoch: Epoch, layer: int) -> tuple[Array, Array]:
        """Draw for each sample."""
        word = draw(self.seed, epoch, index, name_id(f"{self.purpose}/{layer}"))
        # The high bits choose the operation and the lowest one the sign, so that one draw serves both.
        number = ((word >> np.uint32(16)) * np.uint32(len(self.operations))) >> np.uint32(16)
        strength = word & np.uint32(1)
        none = np.uint32(len(self.operations))
        if self.num_even or self.std or self.probability < 1:
            more = draw(self.seed, epoch, index, name_id(f"{self.purpose}/{layer}/strength"))
            if self.num_even:
                strength = strength + 2 * (((more >> np.uint32(16)) * np.uint32(self.num_even)) >> np.uint32(16))
            else:
                applied = (more >> np.uint32(8)) < np.uint32(round(self.probability * 2**24))
                number = array_module(number).where(applied, number, none)
                strength = strength + 2 * ((more & np.uint32(0xFF)) * np.uint32(len(self.levels)) >> np.uint32(8))
        if self.varies_count and layer:
            depth = draw(self.seed, epoch, index, name_id(f"{self.purpose}/count")) >> np.uint32(16)
            applied = ((depth * np.uint32(self.count)) >> np.uint32(16)) >= np.uint32(layer)
            number = array_module(number).where(applied, number, none)
        return number.astype(np.int32), strength.astype(np.int32)


Step = tuple[str, float, int]  # an operation, its probability, its level from 0 to 9


@dataclass(frozen=True, kw_only=True)
class AutoAugment:
    """Pairs of operations that were found together, one pair for each image; each is applied with its probability."""

    pairs: tuple[tuple[Step, Step], ...]
    seed: Seed

    @property
    def count(self) -> int:
        """Return the operations of a pair."""
        return 2

    @property
    def operations(self) -> tuple[str, ...]:
        """Return the names of all operations, once each."""
        return tuple(dict.fromkeys(name for pair in self.pairs for name, _, _ in pair))

    @property
    def levels(self) -> tuple[float, ...]:
        """Return the ten strengths."""
        return tuple(at / 9 for at in range(10))

    @property
    def ranges(self) -> Ranges:
        """What the operations do at a level."""
        return RANGES["usual"]

    def with_seed(self, seed: Seed) -> Self:
        """Return the same with other draws."""
        return replace(self, seed=seed)

    def names_of(self, layer: int) -> tuple[str, ...]:
        """Return the operations at that place of a pair."""
        return tuple(dict.fromkeys(pair[layer][0] for pair in self.pairs))

    def choose(self, index: Array, epoch: Epoch, layer: int) -> tuple[Array, Array]:
        """Draw a pair for each sample, and for each place of it whether it is applied, and its sign."""
        xp = array_module(index)
        place = draw(self.seed, epoch, index, name_id("auto_augment/pair")) >> np.uint32(16)
        pair = ((place * np.uint32(len(self.pairs))) >> np.uint32(16)).astype(np.int32)
        word = draw(self.seed, epoch, index, name_id(f"auto_augment/{layer}"))
        steps = [each[layer] for each in self.pairs]
        limits = np.array([round(probability * 2**24) for _, probability, _ in steps], np.uint32)
        numbers = np.array([self.operations.index(name) for name, _, _ in steps], np.int32)
        strengths = np.array([2 * level for _, _, level in steps], np.int32)
        applied = (word >> np.uint32(8)) < xp.asarray(limits)[pair]
        number = xp.where(applied, xp.asarray(numbers)[pair], np.int32(len(self.operations)))
        return number, xp.asarray(strengths)[pair] + (word & np.uint32(1)).astype(np.int32)


# Cubuk et al. 2019 (arXiv 1805.09501), table 9.
IMAGENET_PAIRS: tuple[tuple[Step, Step], ...] = (
    (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
    (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
    (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
    (("equalize", 0.4, 4), ("rotate", 0.8, 8)),
    (("solarize", 0.6, 3), ("equalize", 0.6, 7)),
    (("posterize", 0.8, 5), ("equalize", 1.0, 2)),
    (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
    (("equalize", 0.6, 8), ("posterize", 0.4, 6)),
    (("rotate", 0.8, 8), ("color", 0.4, 0)),
    (("rotate", 0.4, 9), ("equalize", 0.6, 2)),
    (("equalize", 0.0, 7), ("equalize", 0.8, 8)),
    (("invert", 0.6, 4), ("equalize", 1.0, 8)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("rotate", 0.8, 8), ("color", 1.0, 2)),
    (("color", 0.8, 8), ("solarize", 0.8, 7)),
    (("sharpness", 0.4, 7), ("invert", 0.6, 8)),
    (("shear_x", 0.6, 5), ("equalize", 1.0, 9)),
    (("color", 0.4, 0), ("equalize", 0.6, 3)),
    (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("invert", 0.6, 4), ("equalize", 1.0, 8)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
)


@dataclass(frozen=True, kw_only=True)
class AugMix:
    """Chains of operations, whose results are mixed with each other and with the image (Hendrycks et al. 2020)."""

    chains: tuple[RandAugment, ...]
    seed: Seed

    def with_seed(self, seed: Seed) -> Self:
        """Return the same with other draws."""
        return replace(self, chains=tuple(chain.with_seed(seed) for chain in self.chains), seed=seed)


def policy_of(augment: Augment, seed: Seed) -> RandAugment | AutoAugment | None:
    """Return the policy that the options ask for, or None; AugMix is none of them."""
    if augment.rand_augment:
        return RandAugment(
            count=augment.rand_augment,
            magnitude=augment.rand_augment_magnitude,
            operations=augment.rand_augment_operations or _BY_DEFAULT,
            seed=seed,
            std=augment.rand_augment_std,
            probability=augment.rand_augment_probability,
        )
    if augment.auto_augment == "imagenet":
        return AutoAugment(pairs=IMAGENET_PAIRS, seed=seed)
    if augment.auto_augment == "trivial":
        names = tuple(name for name in RAND_AUGMENT_OPERATIONS if name != "invert")
        return _even(count=1, names=names, number=31, range_name="wide", purpose="trivial_augment", seed=seed)
    if augment.auto_augment == "3-augment":
        names = ("grayscale", "solarize", "blur")
        return _even(count=1, names=names, number=16, range_name="three", purpose="3-augment", seed=seed)
    return None


def augmix_of(augment: Augment, seed: Seed) -> AugMix | None:
    """Return AugMix where the options ask for it: three chains of one to three operations each."""
    if augment.auto_augment != "augmix":
        return None
    names = (*RANGES["mixed"].colors, *RANGES["mixed"].moves)

    def chain(number: int) -> RandAugment:
        made = _even(count=3, names=names, number=16, range_name="mixed", purpose=f"augmix/{number}", seed=seed)
        return replace(made, varies_count=True)

    return AugMix(chains=tuple(map(chain, range(3))), seed=seed)


def _even(*, count: int, names: tuple[str, ...], number: int, range_name: str, purpose: str, seed: Seed) -> RandAugment:
    return RandAugment(
        count=count,
        magnitude=0.0,
        operations=names,
        seed=seed,
        num_even=number,
        range_name=range_name,
        purpose=purpose,
    )
