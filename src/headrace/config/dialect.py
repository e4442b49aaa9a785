"""The dialect of a configuration: whose meanings and defaults hold where the two reference applications differ.

It is said (`dialect`), or follows from options that only one dialect has. Then options of the section `legacy` become
settings of the others (legacy_table.py), and names that mean something else in dialect tf1 are put where they belong.
All that is filled in has an origin of the kind `dialect`, so that it is worked out again when options change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.field import COMMAND_LINE, DEFAULT, Origin
from headrace.config.layers import Given
from headrace.config.legacy_table import ROWS, Legacy
from headrace.config.params import known_keys
from headrace.config.schema import all_options
from headrace.config.tf1_defaults import TF2_DEFAULTS, tf1_defaults
from headrace.config.values import shown
from headrace.core.errors import ConfigError

Found = Mapping[str, Given]
MAPPINGS = {"lr_schedule_params": "lr_schedule", "optimizer_params": "optimizer"}
NORM_CHOICES = ("batch_norm", "group_norm", "groups", "norm_layer")
# Filled in by a row only where nobody gave a value: the row is about something else.
YIELDS = ("pipeline_schedule", "max_ckpts_to_keep", "trace_schedule")
# Two ways to say one thing: refused side by side; else the stronger source counts.
BOTH = (
    ("base_learning_rate", "abs_learning_rate"),
    ("epochs_per_ckpt", "ckpts_per_epoch"),
    ("iterations", "num_epochs"),
    ("rmsprop_decay", "rmsprop_base_decay_exp"),
    ("syncs_per_epoch", "epochs_per_sync"),
)


def is_given(found: Found, name: str) -> bool:
    """Say whether somebody wrote an option's value."""
    given = found[name]
    return given.origin.is_given and given.value not in (None, (), {})


def choose_dialect(found: Found) -> tuple[str, Origin]:
    """Return the dialect and where it comes from; refuse an option that the dialect said does not have."""
    said = found["dialect"]
    selecting = [row.option for row in ROWS if row.selects and is_given(found, row.option)]
    if not is_given(found, "dialect"):
        if not selecting:
            return said.value, said.origin
        return "tf1", Origin(kind="dialect", where=f"of {_describe(found, selecting[0])}")
    if said.value != "tf1" and selecting:
        raise ConfigError(
            f"{_describe(found, selecting[0])} with {_describe(found, 'dialect')}.",
            rule=f"{selecting[0]} is an option of dialect tf1 only.",
            remedy=f"Leave the dialect out, or say it as {_in_ours(selecting[0])}.",
        )
    return said.value, said.origin


def settle_dialect(found: Found) -> tuple[dict[str, Given], tuple[str, ...]]:
    """Return all options with the dialect chosen and its options put into ours, and notes on what does nothing."""
    dialect, origin = choose_dialect(found)
    settled = dict(found) | {"dialect": Given(value=dialect, origin=origin)}
    settled = _without_weaker(settled)
    if dialect == "tf1":
        settled = _moved(settled)
    work = _Work(found=settled, defaults=_defaults(dialect, settled), dialect=dialect)
    settled, notes = work.run()
    return settled, (*_announced(origin), *notes)


def _announced(origin: Origin) -> tuple[str, ...]:
    """Say whose meanings and defaults hold where nobody named the dialect: one option brings them all."""
    if origin.kind != "dialect":
        return ()
    return (f"dialect tf1 (because {origin.where}): meanings and defaults of the reference's first application hold.",)


def _defaults(dialect: str, found: Found) -> dict[str, Any]:
    def look(name: str) -> Any:
        return found[name].value if is_given(found, name) or name == "dataset_path" else None

    if dialect != "tf1":
        return dict(TF2_DEFAULTS) if dialect == "tf2" else {}
    defaults = tf1_defaults(look)
    if any(is_given(found, name) for name in NORM_CHOICES):
        defaults.pop("group_norm")
    if is_given(found, "normalization"):
        defaults.pop("normalise_input", None)
    if is_given(found, "abs_learning_rate"):
        defaults.pop("base_learning_rate")
    if is_given(found, "rmsprop_decay"):
        defaults.pop("rmsprop_base_decay_exp", None)
    if is_given(found, "rmsprop_base_decay_exp"):
        defaults.pop("rmsprop_decay", None)
    if is_given(found, "epochs_per_ckpt"):
        defaults.pop("ckpts_per_epoch")
    if is_given(found, "iterations"):
        defaults.pop("num_epochs")
        defaults.pop("logs_per_epoch")
    return defaults


def _moved(found: dict[str, Given]) -> dict[str, Given]:
    """Put names that dialect tf1 means otherwise where they belong: weight decay is coupled, stepped has shares."""
    moved = dict(found)
    if is_given(found, "weight_decay") and found["weight_decay"].value:
        if is_given(found, "l2_regularization"):
            raise _conflict(found, "weight_decay", "l2_regularization")
        moved["l2_regularization"] = found["weight_decay"]
        moved["weight_decay"] = Given(value=0.0, origin=Origin(kind="dialect", where="tf1: see l2_regularization"))
    elif is_given(found, "weight_decay") and not is_given(found, "l2_regularization"):
        moved["l2_regularization"] = found["weight_decay"]
    if found["hostside_norm"].value and found["eight_bit_transfer"].value:
        moved["eight_bit_transfer"] = Given(value=None, origin=Origin(kind="dialect", where="tf1: see hostside_norm"))
    schedule = found["lr_schedule"]
    if is_given(found, "lr_schedule") and schedule.value == "stepped" and not is_given(found, "lr_schedule_params"):
        moved["lr_schedule"] = Given(value="drops", origin=schedule.origin)
    return moved


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A configuration while its dialect is settled."""

    found: dict[str, Given]
    defaults: dict[str, Any]
    dialect: str

    def look(self, name: str) -> Any:
        """Return the value of an option so far."""
        if not is_given(self.found, name) and name in self.defaults:
            value = self.defaults[name]
            return "drops" if name == "lr_schedule" and value == "stepped" else value
        return self.found[name].value

    def run(self) -> tuple[dict[str, Given], tuple[str, ...]]:
        notes: list[str] = []
        origin = Origin(kind="dialect", where=self.dialect)
        settled = dict(self.found)
        legacy = {row.option for row in ROWS}
        for name in self.defaults:
            if name not in legacy and not is_given(self.found, name) and self.look(name) != self.found[name].value:
                settled[name] = Given(value=self.look(name), origin=origin)
        keys: dict[str, dict[str, tuple[Any, Origin]]] = {name: {} for name in MAPPINGS}
        for row in ROWS:
            self._apply(row, settled, keys, notes)
        for name, collected in keys.items():
            if collected:
                settled[name] = self._mapping(name, collected, settled)
        return settled, tuple(notes)

    def _apply(self, row: Legacy, settled: dict[str, Given], keys: dict[str, Any], notes: list[str]) -> None:
        value, given = self.look(row.option), is_given(self.found, row.option)
        if row.convert is None or value is None or not (given or self.dialect == "tf1"):
            return
        origin = Origin(kind="dialect", where=f"from {_describe(self.found, row.option)}" if given else self.dialect)
        for setting, converted in row.convert(value, self.look).items():
            name, _, key = setting.partition(".")
            if given:
                self._refuse_conflict(row, name)
            if name in YIELDS and is_given(self.found, name):
                continue
            if not key:
                if given or not is_given(self.found, name):
                    settled[name] = Given(value=converted, origin=origin)
            elif key in self._keys_of(name) and row.of in ("", self.look(MAPPINGS[name])):
                if given or not is_given(self.found, name):
                    keys[name][key] = (converted, origin)
            elif given:
                notes.append(
                    f"{_describe(self.found, row.option)} has no effect with "
                    f"{MAPPINGS[name]} {self.look(MAPPINGS[name])}."
                )

    def _keys_of(self, name: str) -> tuple[str, ...]:
        chosen = self.look(MAPPINGS[name])
        if self.dialect == "tf1" and chosen == "sgd":
            return ()  # plain SGD there: momentum is an optimizer of its own
        return known_keys(MAPPINGS[name], chosen)

    def _mapping(self, name: str, collected: dict[str, tuple[Any, Origin]], settled: Found) -> Given:
        own = settled[name]
        base = dict(own.value) if is_given(self.found, name) or self.dialect != "tf1" else {}
        if self.dialect == "tf1" and self.look("optimizer") == "rmsprop" and name == "optimizer_params":
            base.setdefault("initial_accumulator", 1.0)
        given = [origin for _, origin in collected.values() if origin.where.startswith("from ")]
        values = {key: value for key, (value, _) in collected.items()}
        origin = given[0] if given else next(iter(collected.values()))[1]
        return Given(value=base | values, origin=origin)

    def _refuse_conflict(self, row: Legacy, name: str) -> None:
        """Refuse an option and the setting it stands for side by side."""
        if name in YIELDS or not is_given(self.found, name):
            return
        same = self.found[name].origin.kind == self.found[row.option].origin.kind
        if row.selects or same:
            raise _conflict(self.found, row.option, name)


def _without_weaker(found: dict[str, Given]) -> dict[str, Given]:
    """Refuse two options of one source that say one thing; of two sources, let the weaker one's go."""
    left = dict(found)
    for pair in BOTH:
        if not all(is_given(left, name) for name in pair):
            continue
        kinds = [left[name].origin.kind for name in pair]
        if kinds[0] == kinds[1]:
            raise ConfigError(
                f"Both are given: {_describe(left, pair[0])} and {_describe(left, pair[1])}.",
                rule="They say the same thing in two ways.",
                remedy="Leave one of them out.",
            )
        weaker = pair[0] if kinds[1] == COMMAND_LINE.kind else pair[1]
        left[weaker] = Given(value=all_options()[weaker].default, origin=DEFAULT)
    return left


def _conflict(found: Found, legacy: str, ours: str) -> ConfigError:
    return ConfigError(
        f"Two dialects are mixed: {_describe(found, legacy)} and {_describe(found, ours)}.",
        rule=f"In dialect tf1, {legacy} says what {ours} says elsewhere.",
        remedy=f"Leave one of them out. {_in_ours(legacy)}".strip(),
    )


def _in_ours(option: str) -> str:
    row = next((row for row in ROWS if row.option == option), None)
    if row is None or not row.sets:
        return ""
    return f"{', '.join(row.sets)}{f' ({row.words})' if row.words else ''}"


def _describe(found: Found, name: str) -> str:
    return f"{name} {shown(found[name].value)} ({found[name].origin})"


def options_of_dialect() -> tuple[str, ...]:
    """Return the options that are of dialect tf1 alone."""
    return tuple(name for name, option in all_options().items() if option.section == "legacy")
