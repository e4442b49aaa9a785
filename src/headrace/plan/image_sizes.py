"""Progressive resolution: which image size each step uses, small at first and full at the end."""

from dataclasses import dataclass, replace
from itertools import pairwise

from headrace.config.schema import Augment
from headrace.core.errors import ConfigError
from headrace.model.network import Network
from headrace.plan.steps import StepPlan

_MULTIPLE = 4  # pixels: intermediate sizes are multiples of it, so that strides divide them


@dataclass(frozen=True, kw_only=True)
class SizeSpan:
    """Steps of one image size, starting at `first_step`."""

    first_step: int
    image_hw: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.image_hw[0]}x{self.image_hw[1]} from step {self.first_step:,}"


def describe_sizes(spans: tuple[SizeSpan, ...], network: Network) -> str:
    """Say which sizes training images have; empty if it is that of the network."""
    full = network.input_hwc[:2]
    if len(spans) != 1:
        return f"image sizes: {', '.join(map(str, spans))}"
    height, width = spans[0].image_hw
    return f"training images: {height}x{width}, shrunk from {full[0]}x{full[1]}" if (height, width) != full else ""


def size_spans(augment: Augment, network: Network, steps: StepPlan) -> tuple[SizeSpan, ...]:
    """Return the sizes of training images in order; a single one without progressive resolution."""
    full = network.input_hwc[:2]
    whole_run = (SizeSpan(first_step=0, image_hw=full),)
    if augment.train_image_size is not None and steps.total_steps:
        return (SizeSpan(first_step=0, image_hw=_train_size(augment.train_image_size, network)),)
    first = augment.progressive_resolution
    if first is None or not steps.total_steps:
        return whole_run
    if first >= max(full):
        raise ConfigError(
            f"progressive_resolution is {first}, the images are {full[0]}x{full[1]}.",
            rule="The first size is smaller than the full one.",
            remedy=f"Use --progressive-resolution {max(_MULTIPLE, max(full) // 2)}, or omit it.",
        )
    # Fewer than asked for where two of them round to the same size.
    sizes = _sizes(first, full, augment.progressive_resolution_sizes)
    spans = tuple(
        SizeSpan(first_step=_begin(number, len(sizes), augment, steps), image_hw=size)
        for number, size in enumerate(sizes)
    )
    if any(after.first_step <= before.first_step for before, after in pairwise(spans)):
        raise ConfigError(
            f"{len(sizes)} image sizes do not fit {steps.total_steps} steps.",
            rule="Every image size needs a step of its own.",
            remedy="Use more --num-epochs, or fewer --progressive-resolution-sizes.",
        )
    for span in spans:
        _refuse_misfit(network, span.image_hw)
    return spans


def _train_size(side: int, network: Network) -> tuple[int, int]:
    """Return the size of all training images, whose longer side is given."""
    full = network.input_hwc[:2]
    if side > max(full):
        raise ConfigError(
            f"train_image_size is {side}, image_size {max(full)}.",
            rule="Training images are shrunk on the device from image_size, with which validation is done.",
            remedy=f"Use --image-size {side} or more, or a smaller --train-image-size.",
        )
    size = max(1, round(full[0] * side / max(full))), max(1, round(full[1] * side / max(full)))
    _refuse_misfit(network, size)
    return size


def _sizes(first: int, full: tuple[int, int], count: int) -> list[tuple[int, int]]:
    """Return the distinct sizes from `first` (the longer side) to the full one."""
    longest = max(full)
    sides = [first + (longest - first) * number / (count - 1) for number in range(count)]
    between = [round(side / _MULTIPLE) * _MULTIPLE for side in sides[1:-1]]
    ordered = sorted({first, *(side for side in between if first < side < longest)})
    return [(max(1, round(full[0] * s / longest)), max(1, round(full[1] * s / longest))) for s in ordered] + [full]


def _begin(number: int, count: int, augment: Augment, steps: StepPlan) -> int:
    """Return the step at which a size begins."""
    exact = steps.total_steps * augment.progressive_resolution_end * number / (count - 1)
    # At the latest the last step: whatever the rounding, a run ends with the full size.
    return min(round(exact), steps.total_steps - 1)


def _refuse_misfit(network: Network, hw: tuple[int, int]) -> None:
    """Raise ConfigError for a network whose weights depend on the image size."""
    small = replace(network, input_hwc=(*hw, network.input_hwc[2]))
    if small.total_cost().params != network.total_cost().params:
        raise ConfigError(
            f"{network.name} has different weights for {hw[0]}x{hw[1]} images.",
            rule="With progressive resolution one set of weights serves all sizes: no layer may flatten an image.",
            remedy="Choose a network that ends in a global pool, such as a ResNet.",
        )
