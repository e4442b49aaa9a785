"""Options for one frequent key of a mapping: `learning_rate`, `momentum`, `warmup_epochs`.

What wins: the stronger source (command line over file or recipe over default). Within one source, an option and a
mapping that states something else are refused side by side. `fold` writes the option into the mapping, so that a run
reads the mapping only; folding twice changes nothing, as a saved run needs when options change.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.config.field import Origin
from headrace.config.layers import Found, Given, Layer, Tie
from headrace.config.params import known_keys
from headrace.core.errors import ConfigError
from headrace.rows.curves import RATE
from headrace.rows.values import format_value

_RATE_KEYS = tuple(param.name for param in RATE)


@dataclass(frozen=True, kw_only=True)
class Shortcut:
    """An option, the mapping it is folded into, what the mapping itself states, and how to write the option there."""

    option: str
    mapping: str
    stated: Callable[[Mapping[str, Any]], Mapping[str, Any]]  # the mapping's keys that say the same thing
    same: Callable[[Any, Mapping[str, Any]], bool]  # whether they say the option's value
    write: Callable[[Any, Mapping[str, Any], str], dict[str, Any] | None]  # value, mapping, variant -> mapping
    variant: str = ""  # the option that names the mapping's variant


def _stated(*keys: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    return lambda params: {key: params[key] for key in keys if key in params}


def _same_rate(rate: float, stated: Mapping[str, Any]) -> bool:
    """A rate per image is never the same: the batch that it is multiplied by is not known here."""
    if "values" in stated:
        return _are_numbers(stated["values"]) and max(stated["values"]) == rate
    return stated.get("absolute_learning_rate") == rate


def _are_numbers(values: object) -> bool:
    """Say whether these are a list's numbers; the checks refuse anything else later."""
    return isinstance(values, list | tuple) and bool(values) and all(isinstance(value, int | float) for value in values)


def _write_rate(rate: float, params: Mapping[str, object], schedule: str) -> dict[str, Any]:
    """State the rate for the global batch. The values of a stepped curve are scaled so that `rate` is the largest."""
    kept = {key: value for key, value in params.items() if key not in _RATE_KEYS}
    if schedule != "stepped":
        return kept | {"absolute_learning_rate": rate}
    values: Any = kept.get("values")
    if not _are_numbers(values) or not max(values) > 0:
        return dict(params)  # refused by the checks, which say what is missing
    largest = max(values)
    # The largest exactly: scaled, it might be off by a rounding, and not be the rate that was asked for.
    return kept | {"values": [rate if value == largest else value * rate / largest for value in values]}


def _write_momentum(momentum: float, params: Mapping[str, object], optimizer: str) -> dict[str, Any]:
    if "momentum" not in known_keys("optimizer", optimizer):
        raise ConfigError(
            f"momentum {format_value(momentum)} with optimizer {optimizer}.",
            rule=f"{optimizer} takes: {', '.join(known_keys('optimizer', optimizer))}.",
            remedy="Leave momentum out, or choose another optimizer, such as sgd.",
        )
    return {**params, "momentum": momentum}


def _write_warmup(epochs: float, params: Mapping[str, object], variant: str) -> dict[str, Any] | None:
    return {"warmup_mode": "shift", **params, "warmup_epochs": epochs} if epochs else None


SHORTCUTS = (
    Shortcut(
        option="learning_rate",
        mapping="lr_schedule_params",
        stated=_stated(*_RATE_KEYS, "values"),
        same=_same_rate,
        write=_write_rate,
        variant="lr_schedule",
    ),
    Shortcut(
        option="momentum",
        mapping="optimizer_params",
        stated=_stated("momentum"),
        same=lambda momentum, stated: stated["momentum"] == momentum,
        write=_write_momentum,
        variant="optimizer",
    ),
    Shortcut(
        option="warmup_epochs",
        mapping="lr_warmup_params",
        stated=_stated("warmup_epochs"),
        same=lambda epochs, stated: stated["warmup_epochs"] == epochs,
        write=_write_warmup,
    ),
)

SHORTCUT_TIES = (
    Tie(
        owner="optimizer",
        dependent="momentum",
        keep=lambda optimizer, momentum: momentum if "momentum" in known_keys("optimizer", optimizer) else None,
    ),
    *(
        Tie(
            owner=row.mapping,
            dependent=row.option,
            keep=lambda params, value, row=row: None if row.stated(params) else value,
        )
        for row in SHORTCUTS
    ),
)


def refuse_conflicts(layer: Layer) -> None:
    """Refuse an option beside a mapping of the same source that states something else."""
    for row in SHORTCUTS:
        option, mapping = layer.get(row.option), layer.get(row.mapping)
        if option is None or option.value is None or mapping is None or mapping.value is None:
            continue
        stated = row.stated(mapping.value)
        if stated and not row.same(option.value, stated):
            said = ", ".join(f"{key} {format_value(value)}" for key, value in stated.items())
            raise ConfigError(
                f"Both are given: {row.option} {format_value(option.value)} ({option.origin}) and "
                f"{row.mapping} with {said}.",
                rule=f"{row.option} is the short form of what {row.mapping} says.",
                remedy=f"Leave one of them out: {row.option}, or {' and '.join(stated)} in {row.mapping}.",
            )


def join_layers(weaker: Layer, stronger: Layer) -> Layer:
    """Return both as one layer, without the options of the weaker one that a mapping of the stronger one states."""
    overruled = {
        row.option
        for row in SHORTCUTS
        if row.mapping in stronger and stronger[row.mapping].value and row.stated(stronger[row.mapping].value)
    }
    return {**{name: given for name, given in weaker.items() if name not in overruled}, **stronger}


def fold(found: Found) -> dict[str, Given]:
    """Return all options with the given short forms written into their mappings."""
    folded = dict(found)
    for row in SHORTCUTS:
        given, mapping = found[row.option], folded[row.mapping]
        # Only what somebody gave: a default must not overrule the mapping.
        if given.origin.is_given and given.value is not None:
            variant = found[row.variant].value if row.variant else ""
            value = row.write(given.value, mapping.value or {}, variant)
            folded[row.mapping] = Given(value=value, origin=_origin(mapping.origin, row.option))
    return folded


def _origin(origin: Origin, option: str) -> Origin:
    """Return the mapping's origin with a mention of the option. A default stays one, to be derived again."""
    mention = f"with {option}"
    if mention in origin.where:
        return origin
    return replace(origin, where=f"{origin.where}, {mention}" if origin.where else mention)
