"""Which weights are trained, and with which fraction of the learning rate, as functions of a weight's name."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.config.schema import WeightsSection
from headrace.core.errors import ConfigError, did_you_mean

BACKBONE = "backbone"  # in place of a regular expression: all weights but those of the head


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """What is trained, by a weight's name (`conv2_block1/1_conv/kernel`)."""

    freeze: tuple[str, ...] = ()  # expressions
    only: tuple[str, ...] = ()
    factors: tuple[tuple[str, float], ...] = ()
    by_block: tuple[tuple[str, float], ...] = ()  # more factors, by the first part of the name
    summary: str = ""  # what is frozen, in a sentence

    @property
    def everything(self) -> bool:
        """Say whether all weights are trained alike."""
        return not (self.freeze or self.only or self.factors or self.by_block)

    @property
    def any_frozen(self) -> bool:
        """Say whether some weights may be frozen."""
        return bool(self.freeze or self.only) or any(factor == 0 for _, factor in self.factors)

    def frozen(self, name: str) -> bool:
        """Say whether a weight keeps its value."""
        if self.only and not any(text in name for text in self.only):
            return True
        return any(re.search(pattern, name) for pattern in self.freeze) or self._factor(name) == 0

    def rate_factor(self, name: str) -> float:
        """Return the factor on the learning rate of a weight; 0 for a frozen one."""
        return 0.0 if self.frozen(name) else self._factor(name)

    def _factor(self, name: str) -> float:
        factor = next((factor for pattern, factor in self.factors if re.search(pattern, name)), 1.0)
        return factor * dict(self.by_block).get(name.split("/")[0], 1.0)


EVERYTHING = Trainable()


def make_trainable(
    weights: WeightsSection,
    network: Callable[[], Mapping[str, Any]],
    head: Callable[[Iterable[str]], str],
    block_names: Sequence[str] = (),
) -> Trainable:
    """Return what the options describe; `network()` returns all weights by name, `head(names)` the layer that scores
    the classes. Both are called only if needed. A pattern that matches no name is refused.
    """
    if not (weights.freeze or weights.variable_filter or weights.layer_lr or weights.layer_decay < 1):
        return EVERYTHING
    arrays = network()
    sizes = {name: array.size for name, array in arrays.items()}

    def spelled_out(pattern: str) -> str:
        return _but_head(head(sizes), sizes) if pattern == BACKBONE else pattern

    found = Trainable(
        freeze=tuple(spelled_out(pattern) for pattern in weights.freeze),
        only=weights.variable_filter,
        factors=tuple((spelled_out(pattern), float(factor)) for pattern, factor in weights.layer_lr.items()),
        by_block=decayed_by_layer(weights.layer_decay, block_names, arrays) if weights.layer_decay < 1 else (),
    )
    for pattern in (*found.freeze, *(pattern for pattern, _ in found.factors)):
        if not any(re.search(pattern, name) for name in sizes):
            option = "freeze" if pattern in found.freeze else "layer_lr"
            raise _matches_nothing(option, pattern, list(sizes))
    for text in found.only:
        if not any(text in name for name in sizes):
            raise _matches_nothing("variable_filter", text, list(sizes))
    frozen = [name for name in sizes if found.frozen(name)]
    if len(frozen) == len(sizes):
        raise ConfigError(
            "Every weight is frozen.",
            rule="freeze, variable_filter and layer_lr must leave something to train.",
            remedy="To validate alone: --no-training.",
        )
    numbers = f"{sum(sizes[name] for name in frozen):,} of {sum(sizes.values()):,} weights"
    return replace(found, summary=f"frozen: {len(frozen)} of {len(sizes)} tensors, {numbers}" if frozen else "")


def decayed_by_layer(
    decay: float, block_names: Sequence[str], arrays: Mapping[str, Any]
) -> tuple[tuple[str, float], ...]:
    """Return the factor decay^n of each block with weights, n layers before the last one.

    A block that has vectors alone, such as a norm, is of the layer before it.
    """
    # First parts of names: a block that a pipeline splits remains one layer.
    firsts = dict.fromkeys(name.split("/")[0] for name in block_names)
    layers: list[list[str]] = []
    for first in firsts:
        shapes = [array.shape for name, array in arrays.items() if name.split("/")[0] == first]
        if any(len(shape) > 1 for shape in shapes) or (shapes and not layers):
            layers.append([first])
        elif shapes:
            layers[-1].append(first)
    if len(layers) < 2:
        raise ConfigError(
            f"layer_decay is {decay:g}, and the network has one block with weights.",
            rule="The rate decays from block to block; a custom network made of one function is one block.",
            remedy="Build the network from several blocks, or give factors by name with layer_lr.",
        )
    return tuple((name, decay ** (len(layers) - 1 - at)) for at, names in enumerate(layers) for name in names)


def _but_head(head: str, names: Iterable[str]) -> str:
    """Return the expression for all weights but those of the head."""
    if all(name.startswith(f"{head}/") for name in names):
        raise ConfigError(
            f"{BACKBONE} is everything before the head, and there are no weights before {head}.",
            rule="The head is the last layer with weights; a custom network made of one function has one layer.",
            remedy="Name weights by regular expressions, or build the network from several blocks.",
        )
    return f"^(?!{re.escape(head)}/)"


def _matches_nothing(option: str, text: str, names: list[str]) -> ConfigError:
    plain = re.sub(r"[^\w/]", "", text)
    blocks = list(dict.fromkeys([*(name.split("/")[0] for name in names), *names]))
    return ConfigError(
        f"{option} {text!r} matches no weight of the network.",
        rule="It is searched for in names such as " + " and ".join(names[:2]) + ".",
        remedy=did_you_mean(plain, blocks) if len(did_you_mean(plain, blocks)) < 200 else "",
    )
