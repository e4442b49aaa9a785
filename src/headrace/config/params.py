"""The keys inside options that are mappings: optimizer, learning-rate curve, warm-up, loss scale and norm layer.

Each variant is a row of keys with kind, limit and default. `complete` checks a mapping against its row and fills the
defaults, both for the checks before a run and for the code that uses it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.core.errors import ConfigError, did_you_mean
from headrace.rows.curves import CURVES, rising
from headrace.rows.curves import NUMBERS as FACTORS
from headrace.rows.optimizers import OPTIMIZERS
from headrace.rows.values import BOOL, INT, REQUIRED, Key, Keys, Kind, above, all_positive, at_least, fraction

if TYPE_CHECKING:
    from headrace.config.section_learning import Learning


def _read_word(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError
    return raw


WORD = Kind(description="a word", metavar="WORD", read=_read_word)

_WARMUP = Keys(
    params=(
        Key(name="warmup_mode", kind=WORD),
        Key(name="warmup_epochs", check=at_least(0)),
        Key(name="from_zero", kind=BOOL, default=False),  # the first step's rate is 0, not the first of the ramp
    )
)
WARMUP_PARAMS: Mapping[str, Keys] = {"shift": _WARMUP, "mask": _WARMUP}

LOSS_SCALING_PARAMS: Mapping[str, Keys] = {
    "dynamic": Keys(
        params=(
            Key(name="initial", default=32768.0, check=above(0)),
            Key(name="growth_interval", kind=INT, default=2000, check=at_least(1)),
            Key(name="growth_factor", default=2.0, check=above(1)),
            Key(name="backoff_factor", default=0.5, check=lambda x: "" if 0 < x < 1 else "must be between 0 and 1"),
            Key(name="max", default=2.0**24, check=above(0)),
        )
    ),
    "stepped": Keys(
        params=(
            Key(name="boundaries", kind=FACTORS, check=rising),  # epochs; a factor holds up to its boundary
            Key(name="values", kind=FACTORS, check=lambda value: all_positive(tuple(value))),
        )
    ),
    "doubling": Keys(params=(Key(name="initial", check=above(0)), Key(name="final", check=above(0)))),
}


def _check_loss_scale(name: str | None, params: Mapping[str, Any]) -> None:
    """Refuse a schedule of the loss scale that cannot be meant."""
    if name == "stepped" and len(params["values"]) != len(params["boundaries"]) + 1:
        raise ConfigError(
            f"loss_scaling_params has {len(params['values'])} values for {len(params['boundaries'])} boundaries.",
            rule="A stepped loss scale has one value more than boundaries: the first holds up to the first boundary.",
            remedy=f"Give {len(params['boundaries']) + 1} values.",
        )
    doublings = math.log2(params["final"] / params["initial"]) if name == "doubling" else 0.0
    if doublings < 0 or not doublings.is_integer():
        raise ConfigError(
            f"loss_scaling_params doubles from {params['initial']:g} to {params['final']:g}.",
            rule="final is initial, doubled a whole number of times.",
            remedy=f"Say final={params['initial'] * 8:g}, or choose --loss-scaling stepped.",
        )


_NAME = Key(name="name", kind=WORD)
_BN_MOMENTUM = Key(name="momentum", default=None, check=fraction)
NORM_PARAMS: Mapping[str, Keys] = {
    "batch_norm": Keys(params=(_NAME, _BN_MOMENTUM)),
    "custom_batch_norm": Keys(params=(_NAME, _BN_MOMENTUM)),
    "group_norm": Keys(
        params=(_NAME,),
        one_of=(
            Key(name="num_groups", kind=INT, check=at_least(1)),
            Key(name="channels_per_group", kind=INT, check=at_least(1)),
        ),
        needs_one=False,  # the number that suits the family
    ),
    "layer_norm": Keys(params=(_NAME,)),
    "none": Keys(params=(_NAME,)),
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of one option, and the key that names the row where the mapping itself does so."""

    option: str
    rows: Mapping[str, Keys]
    name_key: str = ""


TABLES: dict[str, Table] = {
    "optimizer": Table(option="optimizer_params", rows={name: row.keys for name, row in OPTIMIZERS.items()}),
    "lr_schedule": Table(option="lr_schedule_params", rows={name: row.keys for name, row in CURVES.items()}),
    "lr_warmup": Table(option="lr_warmup_params", rows=WARMUP_PARAMS, name_key="warmup_mode"),
    "loss_scaling": Table(option="loss_scaling_params", rows=LOSS_SCALING_PARAMS),
    "norm_layer": Table(option="norm_layer", rows=NORM_PARAMS, name_key="name"),
}


def complete(kind: str, name: str | None, given: Mapping[str, object]) -> dict[str, Any]:
    """Check the keys of `given` for the variant `name` of `kind`, and return them with the defaults filled in.

    Where the mapping itself names the variant (lr_warmup, norm_layer), `name` may be None.
    """
    table = TABLES[kind]
    row = _row(table, name, given)
    _check_keys(table, row, name or str(given.get(table.name_key)), given)
    result = {}
    for param in row.params + row.one_of:
        if param.name in given:
            result[param.name] = _read(table, param, given[param.name])
        elif param not in row.one_of:
            result[param.name] = param.default
    if kind == "lr_schedule":
        CURVES[str(name)].check(result)
    if kind == "loss_scaling":
        _check_loss_scale(name, result)
    return result


def complete_lr(learning: "Learning", num_epochs: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the settings of the learning-rate curve and of its warm-up, complete.

    Where the curve decays to its end and no `epochs_to_total_decay` is given, it decays over the whole run, less the
    epochs that a shifting warm-up takes from it.
    """
    curve = complete("lr_schedule", learning.lr_schedule, learning.lr_schedule_params)
    warmup = None if learning.lr_warmup_params is None else complete("lr_warmup", None, learning.lr_warmup_params)
    if "epochs_to_total_decay" in curve and curve["epochs_to_total_decay"] is None:
        shift = warmup["warmup_epochs"] if warmup and warmup["warmup_mode"] == "shift" else 0.0
        # A warm-up as long as the run leaves no decay; any length will do then, since it is never reached.
        curve["epochs_to_total_decay"] = float(num_epochs - shift if num_epochs > shift else num_epochs)
    return curve, warmup


def known_keys(kind: str, name: str) -> tuple[str, ...]:
    """Return the keys that the variant `name` of `kind` knows, none for an unknown variant."""
    row = TABLES[kind].rows.get(name)
    return row.names if row else ()


def _row(table: Table, name: str | None, given: Mapping[str, Any]) -> Keys:
    name = name if name is not None else given.get(table.name_key)
    if name is None:
        found = _listed(given)
        raise ConfigError(
            f"{table.option} has no {table.name_key}: found {found}.",
            rule=f"{table.name_key} is one of {', '.join(table.rows)}.",
            remedy=f"Add {table.name_key}.",
        )
    if not isinstance(name, str) or name not in table.rows:
        key = f" {table.name_key}" if table.name_key else ""
        raise ConfigError(
            f"{table.option}{key} is {name!r}.",
            rule=f"It must be one of {', '.join(table.rows)}.",
            remedy=did_you_mean(str(name), table.rows),
        )
    return table.rows[name]


def _check_keys(table: Table, row: Keys, name: str, given: Mapping[str, object]) -> None:
    optionally = "" if row.needs_one else " (optional)"
    either = [f"either {' or '.join(param.name for param in row.one_of)}{optionally}"] if row.one_of else []
    optional = [f"{param.name} (optional)" for param in row.params if param.default is not REQUIRED]
    rule = f"{name} takes: {', '.join([*row.required, *either, *optional])}."
    for key in given:
        if key not in row.names:
            remedy = did_you_mean(key, row.names)
            raise ConfigError(
                f"{table.option} has the key {key!r}, which {name} does not know.", rule=rule, remedy=remedy
            )
    missing = [key for key in row.required if key not in given]
    if missing:
        problem = f"{table.option} lacks {', '.join(missing)} for {name}: found {_listed(given)}."
        raise ConfigError(problem, rule=rule, remedy=f"Add {', '.join(missing)} to {table.option}.")
    chosen = [param.name for param in row.one_of if param.name in given]
    if row.one_of and len(chosen) != 1 and (chosen or row.needs_one):
        found = f"both {' and '.join(chosen)}" if chosen else f"none of {', '.join(param.name for param in row.one_of)}"
        raise ConfigError(f"{table.option} has {found}.", rule=rule, remedy="Give exactly one of them.")


def _read(table: Table, param: Key, raw: object) -> Any:
    if raw is None and param.default is None:
        return None
    try:
        value = param.kind.read(raw)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"{table.option}: {param.name} is {raw!r}, which is not {param.kind.description}.") from None
    broken = param.check(value) if param.check else ""
    if broken:
        raise ConfigError(f"{table.option}: {param.name} is {raw!r}.", rule=f"{param.name} {broken}.")
    return value


def _listed(given: Mapping[str, object]) -> str:
    return ", ".join(given) if given else "no keys"
