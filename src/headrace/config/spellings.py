"""Second names of options, accepted wherever options are, and never a field of Config.

A `Whole` says all of another option: `--groups 4` is `norm_layer`, with a number of groups. It becomes that option as
its source is read, like an alias. A `Part` says a frequent key of a mapping: `--lr 0.1` is in `lr_schedule_params`. It
is written there when all sources are merged: the stronger source wins (command line over file or recipe over default),
and within one source both are refused if they say different things. A run keeps it as it was given beside its mapping,
to be read again when options change.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.config.field import Option, Origin
from headrace.config.layers import Given, Layer, Yields
from headrace.config.params import known_keys
from headrace.core.errors import ConfigError
from headrace.core.local_path import is_address
from headrace.rows.curves import RATE
from headrace.rows.values import ANYWHERE, BOOL, FLOAT, INT, TEXT, Kind, at_least, format_value, fraction

_RATE_KEYS = tuple(param.name for param in RATE)


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """A second name: an option as it is read, and the options that it says."""

    option: Option
    of: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name itself."""
        return self.option.name


@dataclass(frozen=True, kw_only=True)
class Whole(Spelling):
    """A second name that says all of its options: which values, and what such a value says in its words."""

    write: Callable[[Any], Mapping[str, Any]]
    states: Callable[[Any], Any] = lambda value: None  # None: it cannot be said so
    clash: str = "Both are given"
    rule: str


@dataclass(frozen=True, kw_only=True)
class Part(Spelling):
    """A second name for keys of a mapping: what they state, and how a value is written there.

    `write` is given the value, the mapping, and the value of the option that names the mapping's variant.
    """

    keys: tuple[str, ...]
    states: Callable[[Mapping[str, Any]], Any]
    write: Callable[[Any, Mapping[str, Any], str], dict[str, Any] | None]
    variant: str = ""

    @property
    def mapping(self) -> str:
        """The option that it is a part of."""
        return self.of[0]

    def stated(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the mapping's keys that say the same thing."""
        return {key: params[key] for key in self.keys if key in params}


def _option(section: str, name: str, kind: Kind, help: str, **more: Any) -> Option:
    usual = {"default": None, "optional": True, "no_value": False if kind is BOOL else None}
    return Option(**{**usual, **more}, section=section, name=name, kind=kind, help=help)


def _stated_rate(params: Mapping[str, Any]) -> float | None:
    """Return the peak rate; None for a rate per image, as the batch that it is multiplied by is not known here."""
    if "values" in params:
        return max(params["values"]) if _are_numbers(params["values"]) else None
    return params.get("absolute_learning_rate")


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
    if largest == rate:  # written before: a saved run's mapping must not change by a rounding
        return kept
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


def _of_norm(norm: object, key: str) -> Any:
    return norm.get(key) if isinstance(norm, Mapping) else None


def _above(path: str) -> str:
    """Return the directory that a run's is in; as a Path, an address would lose a slash."""
    return path.rstrip("/").rpartition("/")[0] if is_address(path) else str(Path(path).parent)


_OFF = {"default": False, "optional": False}
_ONE_NORM = "A network has one kind of norm; groups says group norm."
_NORMALIZATIONS = {"per-channel": True, "centred": False}

WHOLES = (
    Whole(
        option=_option("model", "batch_norm", BOOL, "Use batch norm; short for norm_layer.", **_OFF),
        of=("norm_layer",),
        write=lambda on: {"norm_layer": {"name": "batch_norm"}} if on else {},
        states=lambda norm: _of_norm(norm, "name") in ("batch_norm", "custom_batch_norm"),
        clash="Two norms are asked for",
        rule=_ONE_NORM,
    ),
    Whole(
        option=_option(
            "model",
            "groups",
            INT,
            "Use group norm with this number of groups; short for norm_layer.",
            check=at_least(1),
        ),
        of=("norm_layer",),
        write=lambda groups: {"norm_layer": {"name": "group_norm", "num_groups": groups}},
        states=lambda norm: _of_norm(norm, "num_groups"),
        clash="Two norms are asked for",
        rule=_ONE_NORM,
    ),
    Whole(
        option=_option(
            "model",
            "group_norm",
            BOOL,
            "Use group norm with the number of groups that suits the family; off is batch norm. Short for norm_layer.",
            **_OFF,
        ),
        of=("norm_layer",),
        write=lambda on: {"norm_layer": {"name": "group_norm" if on else "batch_norm"}},
        states=lambda norm: _of_norm(norm, "name") == "group_norm",
        clash="Two norms are asked for",
        rule=_ONE_NORM,
    ),
    Whole(
        option=_option(
            "data",
            "normalise_input",
            BOOL,
            "On means normalization per-channel, off means centred (only the mean is subtracted).",
            aliases=("normalize_input",),
        ),
        of=("normalization",),
        write=lambda on: {"normalization": next(name for name, means in _NORMALIZATIONS.items() if means is on)},
        states=lambda value: _NORMALIZATIONS.get(str(value)),
        rule="Both say how pixels become numbers for the network.",
    ),
    Whole(
        option=_option(
            "logging",
            "output",
            ANYWHERE,
            "Directory of the run, here or in a store (s3://, gs://, az://); the short form of log_dir and run_name.",
            aliases=("output_dir",),
            check=lambda path: "" if Path(path).name not in ("", "..") else "must end in the name of a directory",
        ),
        of=("log_dir", "run_name"),
        write=lambda path: {"log_dir": _above(path), "run_name": Path(path).name},
        rule="output is the directory of the run: log_dir/run_name.",
    ),
)
PARTS = (
    Part(
        option=_option(
            "learning",
            "learning_rate",
            FLOAT,
            "Peak learning rate of a step, whatever the curve and the batch size; unset means the one of "
            "lr_schedule_params, if that has one.",
            aliases=("lr",),
            check=at_least(0),
            chosen="chosen for the batch size",
        ),
        of=("lr_schedule_params",),
        keys=(*_RATE_KEYS, "values"),
        states=_stated_rate,
        write=_write_rate,
        variant="lr_schedule",
    ),
    Part(
        option=_option(
            "learning",
            "momentum",
            FLOAT,
            "Momentum, for optimizers that have one; unset means the one of optimizer_params.",
            check=fraction,
        ),
        of=("optimizer_params",),
        keys=("momentum",),
        states=lambda params: params.get("momentum"),
        write=_write_momentum,
        variant="optimizer",
    ),
    Part(
        option=_option(
            "learning",
            "warmup_epochs",
            FLOAT,
            "Epochs over which the learning rate rises to its peak, 0 for none; unset means those of lr_warmup_params.",
            check=at_least(0),
            chosen="a tenth of num_epochs",
        ),
        of=("lr_warmup_params",),
        keys=("warmup_epochs",),
        states=lambda params: params.get("warmup_epochs"),
        write=_write_warmup,
    ),
)
# A family and a size make a name once the images are known: derived.py does it.
SIZE = Spelling(
    option=_option(
        "model", "model_size", TEXT, "Size of the network where model_name names a family: 50, B4, v3_small."
    ),
    of=("model_name",),
)
SPELLINGS: Mapping[str, Spelling] = {row.name: row for row in (SIZE, *WHOLES, *PARTS)}

PARTS_YIELD = (
    Yields(
        option="momentum",
        to="optimizer",
        keep=lambda optimizer, momentum: momentum if "momentum" in known_keys("optimizer", optimizer) else None,
    ),
    *(
        Yields(
            option=row.name,
            to=row.mapping,
            keep=lambda params, value, row=row: None if row.stated(params) else value,
        )
        for row in PARTS
    ),
)


def read_wholes(layer: Layer) -> dict[str, Given]:
    """Return a source's options, those that say all of another under its name; refuse what says different things."""
    found, said = dict(layer), {name: (name, given) for name, given in layer.items()}
    for row in WHOLES:
        given = found.pop(row.name, None)
        for name, value in row.write(given.value).items() if given and given.value is not None else ():
            assert given is not None
            if name in found and row.states(found[name].value) != given.value:
                other, its = said[name]
                raise ConfigError(
                    f"{row.clash}: {_described(row.name, given)} and {_described(other, its)}.",
                    rule=row.rule,
                    remedy="Leave one of them out.",
                )
            said.setdefault(name, (row.name, given))
            found.setdefault(name, Given(value=value, origin=given.origin))
    return found


def refuse_conflicts(layer: Layer) -> None:
    """Refuse a part beside a mapping of the same source that states something else."""
    for row in PARTS:
        given, mapping = layer.get(row.name), layer.get(row.mapping)
        if given is None or given.value is None or mapping is None or mapping.value is None:
            continue
        stated = row.stated(mapping.value)
        if stated and row.states(mapping.value) != given.value:
            said = ", ".join(f"{key} {format_value(value)}" for key, value in stated.items())
            raise ConfigError(
                f"Both are given: {_described(row.name, given)} and {row.mapping} with {said}.",
                rule=f"{row.name} is the short form of what {row.mapping} says.",
                remedy=f"Leave one of them out: {row.name}, or {' and '.join(stated)} in {row.mapping}.",
            )


def join_layers(weaker: Layer, stronger: Layer) -> Layer:
    """Return both as one layer, without the parts of the weaker one that a mapping of the stronger one states."""
    mappings = {row.name: stronger[row.mapping].value for row in PARTS if row.mapping in stronger}
    overruled = {row.name for row in PARTS if mappings.get(row.name) and row.stated(mappings[row.name])}
    return {**{name: given for name, given in weaker.items() if name not in overruled}, **stronger}


def _described(name: str, given: Given) -> str:
    return f"{name} {format_value(given.value)} ({given.origin})"


def write_parts(found: Mapping[str, Given]) -> dict[str, Given]:
    """Return options with the parts that were given written into their mappings, and no parts beside them."""
    written = {name: given for name, given in found.items() if not isinstance(SPELLINGS.get(name), Part)}
    for row in PARTS:
        given = found.get(row.name)
        if given is not None and given.value is not None and given.origin.is_given:
            mapping, variant = written[row.mapping], written[row.variant].value if row.variant else ""
            value = row.write(given.value, mapping.value or {}, variant)
            written[row.mapping] = Given(value=value, origin=_mentioning(mapping.origin, row.name))
    return written


def _mentioning(origin: Origin, option: str) -> Origin:
    """Return the mapping's origin with a mention of the option. A default stays one, to be derived again."""
    mention = f"with {option}"
    if mention in origin.where:
        return origin
    return replace(origin, where=f"{origin.where}, {mention}" if origin.where else mention)


def given_parts(found: Mapping[str, Given]) -> dict[str, Given]:
    """Return the parts that were given, as they were."""
    parts = {row.name: found[row.name] for row in PARTS if row.name in found}
    return {name: given for name, given in parts.items() if given.value is not None and given.origin.is_given}


def said_by(name: str) -> set[str]:
    """Return the options that a second name says; none for another option."""
    return set(SPELLINGS[name].of) if name in SPELLINGS else set()


def shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for people and trackers: each mapping with what it states of its parts.

    `values` may be those of a run of an earlier version, which saved second names beside the options that they say.
    """
    found = {name: value for name, value in values.items() if name not in SPELLINGS}
    for row in WHOLES:
        if (value := values.get(row.name, row.option.default)) != row.option.default:
            stated = row.states(found.get(row.of[0])) == value
            found |= {} if stated else row.write(value)
    for row in PARTS:
        mapping = found.get(row.mapping)
        found[row.name] = row.states(mapping) if isinstance(mapping, Mapping) else values.get(row.name)
    return found
