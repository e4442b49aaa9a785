"""The keys inside options that are mappings: optimizer, learning-rate curve, warm-up, loss scale and norm layer.

Each variant is a row of keys with kind, limit and default. `complete` checks a mapping against its row and fills the
defaults, both for the checks before a run and for the code that uses it.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.config.field import BOOL, FLOAT, INT, Kind, Limit, above, at_least, fraction, read_float
from headrace.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from headrace.config.section_learning import Learning

# Not None, which is a default of some keys.
REQUIRED = object()


def _read_numbers(raw: object) -> list[float]:
    if isinstance(raw, dict):
        raise ValueError
    return [read_float(item) for item in (raw if isinstance(raw, list | tuple) else [raw])]


def _read_word(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError
    return raw


NUMBERS = Kind(description="a list of numbers", metavar="LIST", read=_read_numbers)
WORD = Kind(description="a word", metavar="WORD", read=_read_word)


@dataclass(frozen=True, kw_only=True)
class Param:
    """One key: its kind, its limit, and its default (REQUIRED when there is none)."""

    name: str
    kind: Kind = FLOAT
    default: Any = REQUIRED
    check: Limit | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """The keys of one variant. Of `one_of` exactly one must be given, and only that one appears."""

    params: tuple[Param, ...]
    one_of: tuple[Param, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Return all keys that the variant knows."""
        return tuple(param.name for param in self.params + self.one_of)

    @property
    def required(self) -> tuple[str, ...]:
        """Return the keys that must be given."""
        return tuple(param.name for param in self.params if param.default is REQUIRED)


def rising(value: Sequence[float]) -> str:
    """Limit a list to rising numbers that are not negative."""
    ordered = all(low < high for low, high in itertools.pairwise(value))
    return "" if ordered and all(item >= 0 for item in value) else "must rise, and not be negative"


def shares(value: Sequence[float]) -> str:
    """Limit a list to rising fractions of the run."""
    return rising(value) or ("" if all(item <= 1 for item in value) else "must be fractions of the run, from 0 to 1")


MOMENTUM = Param(name="momentum", check=fraction)
EPSILON = Param(name="epsilon", check=at_least(0))
RATE = (  # the first rate: for one image, to be multiplied by the global batch size, or as it is
    Param(name="initial_learning_rate", check=at_least(0)),
    Param(name="absolute_learning_rate", check=at_least(0)),
)
DECAY_EPOCHS = Param(name="epochs_to_total_decay", default=None, check=above(0))

OPTIMIZER_PARAMS: dict[str, Row] = {
    "sgd": Row(params=(MOMENTUM, Param(name="nesterov", kind=BOOL, default=False))),
    "momentum": Row(params=(MOMENTUM,)),
    "lars": Row(
        params=(
            MOMENTUM,
            Param(name="weight_decay", check=at_least(0)),
            Param(name="eeta", check=above(0)),
            EPSILON,
        )
    ),
    "rmsprop": Row(
        # initial_accumulator: initial value of the mean square; TensorFlow 1 used 1
        params=(MOMENTUM, EPSILON, Param(name="initial_accumulator", default=0.0, check=at_least(0))),
        one_of=(Param(name="base_decay_exponent"), Param(name="decay", check=fraction)),
    ),
    "adamw": Row(
        params=(
            Param(name="beta1", default=0.9, check=fraction),
            Param(name="beta2", default=0.999, check=fraction),
            Param(name="epsilon", default=1e-8, check=above(0)),
        )
    ),
    "lamb": Row(
        params=(
            Param(name="beta1", default=0.9, check=fraction),
            Param(name="beta2", default=0.999, check=fraction),
            Param(name="epsilon", default=1e-6, check=above(0)),
        )
    ),
}

LR_PARAMS: dict[str, Row] = {
    "const": Row(params=(), one_of=RATE),
    "cosine": Row(params=(DECAY_EPOCHS,), one_of=RATE),
    "stepped": Row(
        params=(Param(name="boundaries", kind=NUMBERS, check=rising), Param(name="values", kind=NUMBERS)),
    ),
    "drops": Row(
        params=(Param(name="drops", kind=NUMBERS, check=shares), Param(name="factor", default=0.1, check=above(0))),
        one_of=RATE,
    ),
    "polynomial": Row(
        params=(
            DECAY_EPOCHS,
            Param(name="end_learning_rate_ratio", check=at_least(0)),
            Param(name="power", check=above(0)),
        ),
        one_of=RATE,
    ),
    "exponential": Row(
        params=(
            Param(name="decay_rate", default=0.97, check=above(0)),
            Param(name="epochs_per_drop", default=2.4, check=above(0)),
        ),
        one_of=RATE,
    ),
}

_WARMUP = Row(
    params=(
        Param(name="warmup_mode", kind=WORD),
        Param(name="warmup_epochs", check=at_least(0)),
        Param(name="from_zero", kind=BOOL, default=False),  # the first step's rate is 0, not the first of the ramp
    )
)
WARMUP_PARAMS: dict[str, Row] = {"shift": _WARMUP, "mask": _WARMUP}

LOSS_SCALING_PARAMS: dict[str, Row] = {
    "dynamic": Row(
        params=(
            Param(name="initial", default=32768.0, check=above(0)),
            Param(name="growth_interval", kind=INT, default=2000, check=at_least(1)),
            Param(name="growth_factor", default=2.0, check=above(1)),
            Param(name="backoff_factor", default=0.5, check=lambda x: "" if 0 < x < 1 else "must be between 0 and 1"),
            Param(name="max", default=2.0**24, check=above(0)),
        )
    )
}

_NAME = Param(name="name", kind=WORD)
_BN_MOMENTUM = Param(name="momentum", default=None, check=fraction)
NORM_PARAMS: dict[str, Row] = {
    "batch_norm": Row(params=(_NAME, _BN_MOMENTUM)),
    "custom_batch_norm": Row(params=(_NAME, _BN_MOMENTUM)),
    "group_norm": Row(
        params=(_NAME,),
        one_of=(
            Param(name="num_groups", kind=INT, check=at_least(1)),
            Param(name="channels_per_group", kind=INT, check=at_least(1)),
        ),
    ),
    "layer_norm": Row(params=(_NAME,)),
    "none": Row(params=(_NAME,)),
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of one option, and the key that names the row where the mapping itself does so."""

    option: str
    rows: dict[str, Row]
    name_key: str = ""


TABLES: dict[str, Table] = {
    "optimizer": Table(option="optimizer_params", rows=OPTIMIZER_PARAMS),
    "lr_schedule": Table(option="lr_schedule_params", rows=LR_PARAMS),
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
    if kind == "lr_schedule" and name == "stepped":
        _check_stepped(result)
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
    return row.keys if row else ()


def _row(table: Table, name: str | None, given: Mapping[str, Any]) -> Row:
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


def _check_keys(table: Table, row: Row, name: str, given: Mapping[str, object]) -> None:
    either = [f"either {' or '.join(param.name for param in row.one_of)}"] if row.one_of else []
    optional = [f"{param.name} (optional)" for param in row.params if param.default is not REQUIRED]
    rule = f"{name} takes: {', '.join([*row.required, *either, *optional])}."
    for key in given:
        if key not in row.keys:
            remedy = did_you_mean(key, row.keys)
            raise ConfigError(
                f"{table.option} has the key {key!r}, which {name} does not know.", rule=rule, remedy=remedy
            )
    missing = [key for key in row.required if key not in given]
    if missing:
        problem = f"{table.option} lacks {', '.join(missing)} for {name}: found {_listed(given)}."
        raise ConfigError(problem, rule=rule, remedy=f"Add {', '.join(missing)} to {table.option}.")
    chosen = [param.name for param in row.one_of if param.name in given]
    if row.one_of and len(chosen) != 1:
        found = f"both {' and '.join(chosen)}" if chosen else f"none of {', '.join(param.name for param in row.one_of)}"
        raise ConfigError(f"{table.option} has {found}.", rule=rule, remedy="Give exactly one of them.")


def _read(table: Table, param: Param, raw: object) -> Any:
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


def _check_stepped(params: dict[str, Any]) -> None:
    num_values, num_boundaries = len(params["values"]), len(params["boundaries"])
    if num_values != num_boundaries + 1:
        raise ConfigError(
            f"lr_schedule_params has {num_values} values for {num_boundaries} boundaries.",
            rule="A stepped curve has one value more than it has boundaries: the first holds up to the first boundary.",
            remedy=f"Give {num_boundaries + 1} values.",
        )


def _listed(given: Mapping[str, object]) -> str:
    return ", ".join(given) if given else "no keys"
