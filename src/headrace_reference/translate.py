"""From options of the reference's applications to ordinary ones, and combinations that cannot work."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.derived import derive
from headrace.config.field import COMMAND_LINE, DEFAULT, TRANSLATED, Origin, RuleOn
from headrace.config.layers import Found, Given, Layer, Yields
from headrace.config.load import build
from headrace.config.networks import find_variant
from headrace.config.params import known_keys
from headrace.config.schema import all_options, config_options, options_in
from headrace.config.section_pipeline import stages_of_splits
from headrace.config.translations import Translated
from headrace.core.errors import ConfigError
from headrace.rows.values import format_value
from headrace_reference.tables import (
    BY_OPTION,
    ROWS,
    SO_ANYWAY,
    TF2_SETTINGS,
    OptionRow,
    Reference,
    tf1_defaults,
    tf2_defaults,
)

# The splits of a tf1 pipeline: they must be named, and the error for missing names lists the possible ones.


def refuse_missing_splits(found: Found) -> None:
    """Refuse what needs stages where their splits are left out, and list those that the network has.

    `--pipeline` needs as many as its shards say, a device mapping stages to map, and so does tf2's recomputation.
    `--pipeline-splits` without a word asks for no stages.
    """
    typed_splits, mapping, recomputation = (
        found[name] for name in ("pipeline_splits", "device_mapping", "recomputation")
    )
    if max(found["num_pipeline_stages"].value, stages_of_splits(typed_splits.value)) == 1:
        name = rule = ""
        if recomputation.value and found["application"].value == "tf2":
            name, rule = "recomputation", "In application tf2, recomputation keeps the inputs of the stages."
        # Of a network that code gives, the options do not know the splits.
        if mapping.value and mapping.origin == COMMAND_LINE:
            name, rule = "device_mapping", "device_mapping is about the stages of a pipeline: two or more."
        if name:
            where = f", in {describe(found, 'application')}" if name == "recomputation" else ""
            raise ConfigError(
                f"{describe(found, name)} without pipeline stages{where}.",
                rule=rule,
                remedy="Name them with --pipeline-splits or --num-pipeline-stages, or leave "
                f"{name} out. {possible_splits(found)}",
            )
    if not found["pipeline"].value:
        return
    shards, splits = found["shards"].value or 1, found["pipeline_splits"].value
    if splits and (shards == 1 or len(splits) == shards - 1):
        return
    needed = (
        f"{shards} shards need {shards - 1} split{'s' * (shards != 2)}" if shards > 1 else "One shard needs a split"
    )
    given = f"--pipeline-splits {' '.join(splits)}" if splits else "no --pipeline-splits"
    raise ConfigError(
        f"--pipeline with --shards {shards} and {given}.",
        rule=f"{needed}: each names the block that starts a new stage.",
        remedy=possible_splits(found),
    )


def possible_splits(found: Found) -> str:
    """Return a sentence with the splits of the network: its blocks, in tf1 under that application's names.

    There, for a ResNet these are the ReLUs after its units, for an EfficientNet its blocks and the parts of those that
    change the shape, for other networks the names of our blocks.
    """
    # Here, since importing JAX takes a second that reading options should not.
    from headrace.model.zoo import build_network

    derived = derive(found)
    config = build({name: derived[name].value for name in config_options()})
    variant = find_variant(config.model.model_name)  # names depend neither on its classes nor on its image size
    network = build_network(config.model, variant.num_classes, (variant.image_size, variant.image_size, 3))
    points = network.split_points()
    theirs = re.compile(r"b\d+/\d+/relu|block\d+[a-z]|block\d+a/(b|SE|c)|Top")
    names = [name for name in points if _is_tf1(found) and theirs.fullmatch(name) and points[name] > (0, 0)]
    names = sorted(names, key=lambda name: points[name]) or list(network.block_names[1:])
    return f"Possible splits of {network.name}: {', '.join(names)}."


LARS_SKIPPED = {"beta", "gamma", "bias"}


ReferenceRule = RuleOn[Found]


def describe(found: Found, name: str) -> str:
    """Return an option with its value and where that comes from."""
    return f"{name} {format_value(found[name].value)} ({found[name].origin})"


def _is_tf1(found: Found) -> bool:
    return found["application"].value == "tf1"


def _schedule_of_several(found: Found) -> bool:
    """Whether one source asks for a pipeline on one device and for a schedule that needs several."""
    one_device = found["pipeline"].value and (found["shards"].value or 1) == 1 and found["pipeline_splits"].value
    says_one = found["shards" if found["shards"].origin.is_given else "pipeline"].origin
    schedule = found["pipeline_schedule"]
    return (
        bool(one_device)
        and schedule.origin.is_given
        and schedule.origin.kind == says_one.kind
        and schedule.value != "Sequential"
    )


def _bad_devices(found: Found) -> bool:
    given = found["select_ipus"].value
    return len(given) > 2 or not all(word.isdecimal() or word.lower() == "auto" for word in given)


BEFORE = (
    ReferenceRule(
        broken=lambda found: _is_tf1(found) and any(value > 1 for value in found["available_memory_proportion"].value),
        problem=lambda found: f"{describe(found, 'available_memory_proportion')} in {describe(found, 'application')}.",
        rule="In application tf1 it is a fraction (0.15), elsewhere a percentage (15).",
        remedy="Divide it by 100, or leave the application out.",
    ),
    ReferenceRule(
        broken=lambda found: _is_tf1(found) and bool(found["pipeline_splits"].value) and not found["pipeline"].value,
        problem=lambda found: f"{describe(found, 'pipeline_splits')} without --pipeline.",
        rule="In application tf1, --pipeline makes the parts a pipeline, on as many devices as --shards says.",
        remedy="Add --pipeline --shards N, or leave the splits out.",
    ),
    ReferenceRule(
        broken=_schedule_of_several,
        problem=lambda found: (
            f"{describe(found, 'pipeline')} on one device with {describe(found, 'pipeline_schedule')}."
        ),
        rule="Stages on one device run one after the other.",
        remedy="Use --pipeline-schedule Sequential, or --shards with more devices.",
    ),
    ReferenceRule(
        broken=lambda found: not set(found["lars_skip_list"].value) <= LARS_SKIPPED,
        problem=lambda found: f"{describe(found, 'lars_skip_list')}.",
        rule="LARS updates beta, gamma and bias at the plain rate, and nothing else.",
        remedy="Leave lars_skip_list out.",
    ),
    ReferenceRule(
        broken=lambda found: found["restore_path"].value is not None,
        problem=lambda found: f"{describe(found, 'restore_path')}.",
        rule="Which run a command works on is given on its command line.",
        remedy="Use `headrace resume RUN_DIR`, `headrace validate RUN_DIR`, or --restore-path with `headrace train`.",
    ),
    ReferenceRule(
        broken=_bad_devices,
        problem=lambda found: f"{describe(found, 'select_ipus')}.",
        rule="It is AUTO or the number of the first device, optionally followed by one for validation.",
        remedy="Leave it out to use the first devices.",
    ),
)

EVENTS = {"logs_per_epoch": "log", "ckpts_per_epoch": "save a checkpoint", "validations_per_epoch": "validate"}


def divides_run(per_epoch: float, num_epochs: int) -> bool:
    """Say whether events every 1/per_epoch epochs divide the run evenly."""
    events = per_epoch * num_epochs
    whole = round(events) >= 1 and math.isclose(events, round(events), rel_tol=1e-6)
    return not 0 < per_epoch < 1 or whole


def _period_rule(name: str, verb: str) -> ReferenceRule:
    def per_epoch(found: Found) -> float:
        return found[name].value or 0.0

    return ReferenceRule(
        broken=lambda found: (
            found["events_divide_epoch"].value and not divides_run(per_epoch(found), found["num_epochs"].value)
        ),
        problem=lambda found: (
            f"It is not possible to {verb} {round(1 / per_epoch(found), 6)} epochs a time for "
            f"{found['num_epochs'].value} epochs: {describe(found, name)}, {describe(found, 'num_epochs')}."
        ),
        rule=f"With events_divide_epoch, as in application tf2, num_epochs must be a multiple of 1/{name}.",
        remedy=f"Change num_epochs or {name}, or add --no-events-divide-epoch; 0 means only at the end of the run.",
    )


AFTER = (*(_period_rule(name, verb) for name, verb in EVENTS.items()),)


def check_before(found: Found) -> None:
    """Refuse what cannot be translated."""
    _check(BEFORE, found)


def check_after(asked: Found, translated: Found) -> None:
    """Refuse what can be translated but not run."""
    _check(AFTER, translated)
    kept = ("application", "shards", "pipeline")
    refuse_missing_splits({**translated, **{name: asked[name] for name in kept}})


def _check(rules: tuple[ReferenceRule, ...], found: Found) -> None:
    for rule in rules:
        rule.check(found)


# From options of the reference's applications to ordinary ones.
#
# The application is given (`application`); an option that only tf1 has is refused without it. Its options become
# ordinary ones (tables.py), names that mean something else in tf1 are moved to where they belong, and its
# defaults are filled in. All that is filled in has an origin of the kind `translated`, so that it is derived again when
# options change.


MAPPINGS = {"lr_schedule_params": "lr_schedule", "optimizer_params": "optimizer"}
# Ordinary options that have rows, too: in tf1 a warm-up starts from 0, and sgd has no momentum.
OTHERWISE_IN_TF1 = ("momentum", "warmup_epochs")
# An option that is given -> defaults that say the same thing another way, and must not contradict it.
DEFAULTS_THAT_YIELD = {
    "abs_learning_rate": ("base_learning_rate",),
    "rmsprop_decay": ("rmsprop_base_decay_exp",),
    "rmsprop_base_decay_exp": ("rmsprop_decay",),
    "epochs_per_ckpt": ("ckpts_per_epoch",),
    "iterations": ("num_epochs", "logs_per_epoch"),
}
# Filled in by a row only where nobody gave a value: the row is about something else.
YIELDS = ("pipeline_schedule", "trace_schedule")
# Two ways to say one thing: refused side by side; otherwise the stronger layer counts, or in a saved run the stronger
# source.
EITHER_OR = (
    ("base_learning_rate", "abs_learning_rate"),
    ("learning_rate", "abs_learning_rate"),
    ("learning_rate", "base_learning_rate"),
    ("epochs_per_ckpt", "ckpts_per_epoch"),
    ("iterations", "num_epochs"),
    ("rmsprop_decay", "rmsprop_base_decay_exp"),
    ("syncs_per_epoch", "epochs_per_sync"),
    ("hostside_norm", "accelerator_side_preprocess"),
    ("disable_variable_offloading", "optimizer_state_offloading"),
)
REFERENCE_YIELDS = tuple(
    Yields(option=option, to=other, keep=lambda said, value: None, silent=True)
    for pair in EITHER_OR
    for other, option in (pair, pair[::-1])
)


def is_given(found: Found, name: str) -> bool:
    """Whether somebody gave an option's value."""
    given = found[name]
    return given.origin.is_given and given.value not in (None, (), {})


def choose_application(found: Found) -> Given:
    """Return the application and where it comes from; refuse an option that the given application does not have."""
    given = found["application"]
    foreign = [row.option for row in ROWS if row.tf1_only and is_given(found, row.option)]
    # A saved run of an earlier version has tf1 as translated from one of its options.
    if given.value == "headrace" and not is_given(found, "application") and foreign:
        raise ConfigError(
            f"{describe(found, foreign[0])} is an option of the reference's first application only.",
            rule="That application has other meanings and defaults; no option brings them in by its name.",
            remedy=f"Use {_ordinary_form(foreign[0])} instead; or for that application, use train.py (with --plan "
            "it plans) or add --application tf1.",
        )
    if given.value != "tf1" and foreign:
        raise ConfigError(
            f"{describe(found, foreign[0])} with {describe(found, 'application')}.",
            rule=f"{foreign[0]} is an option of application tf1 only.",
            remedy=f"Leave the application out, or use {_ordinary_form(foreign[0])} instead.",
        )
    return given


def has_defaults(found: Found) -> bool:
    """Whether the defaults of one of the reference's applications apply."""
    return choose_application(found).value != "headrace"


def translate(found: Found) -> Translated:
    """Return ordinary options, the reference's options as they were given, and remarks on what has no effect."""
    application = choose_application(found)
    asked = _without_weaker(dict(found) | {"application": application})
    check_before(asked)
    moved = _moved(asked) if application.value == "tf1" else asked
    divide = application.value == "tf2" and not is_given(moved, "events_divide_epoch")
    moved, dropped = _without_uneven_events(moved) if divide else (moved, ())
    work = _Work(found=moved, defaults=_defaults(application.value, moved), application=application.value)
    options, notes = work.run()
    check_after(asked, options)
    given = {name: asked[name] for name in THEIRS if is_given(asked, name)}
    source = given if application.value == "headrace" else {"application": application} | given
    # Translated in place: kept as it was given, or a second translation would change it again.
    if options["available_memory_proportion"] != asked["available_memory_proportion"]:
        source["available_memory_proportion"] = asked["available_memory_proportion"]
    ordinary = {name: options[name] for name in all_options() if name in options}
    for name in OTHERWISE_IN_TF1 if application.value == "tf1" else ():
        if is_given(asked, name):
            source[name] = asked[name]
        ordinary[name] = Given(value=None, origin=DEFAULT)
    return Translated(options=ordinary, source=source, notes=(*dropped, *notes, *_no_effect(given), *_so_anyway(asked)))


_KNOWN = {**all_options(), **options_in({"reference": Reference})}
THEIRS = tuple(options_in({"reference": Reference}))


def _no_effect(given: Mapping[str, Given]) -> tuple[str, ...]:
    """Return the sentence that lists the options without effect, with the reason for each."""
    rows = [row for row in ROWS if row.no_effect and row.option in given]
    listed = "; ".join(f"{row.option} ({row.no_effect.rstrip('.')})" for row in rows)
    alike = [
        f"{row.option} {given[row.option].value} is the same as {row.option} alone: {row.same[given[row.option].value]}"
        for row in ROWS
        if row.option in given and given[row.option].value in row.same
    ]
    return (*((f"without effect: {listed}",) if rows else ()), *alike)


def _so_anyway(asked: Found) -> list[str]:
    """Return a note on each typed option of tf1 that says what is so without it."""
    return [
        f"{describe(asked, name)} changes nothing: {why}."
        for name, (value, why) in (SO_ANYWAY.items() if _is_tf1(asked) else ())
        if asked[name].origin == COMMAND_LINE and asked[name].value is value and not asked["hostside_norm"].value
    ]


def _defaults(application: str, found: Found) -> dict[str, Any]:
    def value_of(name: str) -> Any:
        return found[name].value if is_given(found, name) or name == "dataset_path" else None

    if application != "tf1":
        return tf2_defaults(value_of) if application == "tf2" else {}
    defaults = tf1_defaults(value_of)
    for name, yields in DEFAULTS_THAT_YIELD.items():
        if is_given(found, name):
            defaults = {key: value for key, value in defaults.items() if key not in yields}
    return defaults


def reword(layers: list[Layer]) -> list[Layer]:
    """Return layers with the names that mean something else in tf1 under ours, if it is for tf1.

    Its batch is a replica's, its weight decay coupled. This is done within each layer: what a saved run had translated
    is no longer there under tf1's name, and gives way to what is typed now like any other option.
    """
    said = next((layer["application"].value for layer in reversed(layers) if "application" in layer), None)
    return [_reworded(layer) for layer in layers] if said == "tf1" else layers


def _reworded(layer: Layer) -> Layer:
    moved = dict(layer)
    decay, batch = layer.get("weight_decay"), layer.get("batch_size")
    if decay is not None and decay.value is not None:
        if decay.value and "l2_regularization" in layer:
            raise _conflict(layer, "weight_decay", "l2_regularization")
        moved = {"l2_regularization": decay} | moved
        if decay.value:
            moved["weight_decay"] = Given(value=0.0, origin=Origin(kind=TRANSLATED, where="to l2_regularization"))
    if batch is not None and batch.value is not None:
        if "micro_batch_size" in layer:
            raise _conflict(layer, "batch_size", "micro_batch_size")
        del moved["batch_size"]
        moved["micro_batch_size"] = batch
    return moved


def application_defaults(application: str, given: Layer) -> dict[str, Any]:
    """Return the defaults of an application, its own options included, beside what somebody gave."""
    found = {name: Given(value=option.read(option.default), origin=DEFAULT) for name, option in _KNOWN.items()}
    return _defaults(application, {**found, **given})


def _moved(found: dict[str, Given]) -> dict[str, Given]:
    """Return options with those put right whose meaning in tf1 depends on others, or on being translated once."""
    moved = dict(found)
    if found["hostside_norm"].value and found["eight_bit_transfer"].value:
        origin = Origin(kind=TRANSLATED, where=f"from {describe(found, 'hostside_norm')}")
        moved["eight_bit_transfer"] = Given(value=None, origin=origin)
    schedule = found["lr_schedule"]
    if is_given(found, "lr_schedule") and schedule.value == "stepped" and not is_given(found, "lr_schedule_params"):
        moved["lr_schedule"] = Given(value="drops", origin=schedule.origin)
    if is_given(found, "available_memory_proportion"):
        origin = Origin(kind=TRANSLATED, where=f"from {describe(found, 'available_memory_proportion')}")
        percent = tuple(round(100 * value, 9) for value in found["available_memory_proportion"].value)
        moved["available_memory_proportion"] = Given(value=percent, origin=origin)
    return moved


@dataclass(frozen=True, kw_only=True)
class _Key:
    """A key of a mapping that a row fills in: its value, where it comes from, and whether somebody gave it."""

    value: Any
    origin: Origin
    given: bool


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A configuration while it is translated."""

    found: dict[str, Given]
    defaults: dict[str, Any]
    application: str

    def value_of(self, name: str) -> Any:
        """Return the value of an option so far."""
        if not is_given(self.found, name) and name in self.defaults:
            value = self.defaults[name]
            return "drops" if name == "lr_schedule" and value == "stepped" else value
        return self.found[name].value

    def run(self) -> tuple[dict[str, Given], tuple[str, ...]]:
        notes: list[str] = []
        settled = dict(self.found)
        for name in self.defaults:
            if name not in THEIRS and not is_given(self.found, name) and self.value_of(name) != self.found[name].value:
                settled[name] = Given(value=self.value_of(name), origin=self.of_defaults)
        for choice, (mapping, settings) in TF2_SETTINGS.items() if self.application == "tf2" else ():
            if chosen := settings.get(self.value_of(choice)):
                given = settled[mapping]
                origin = given.origin if given.origin.is_given else self.of_defaults
                settled[mapping] = Given(value={**chosen, **given.value}, origin=origin)
        keys: dict[str, dict[str, _Key]] = {name: {} for name in MAPPINGS}
        for row in ROWS:
            self._apply(row, settled, keys, notes)
        for name, collected in keys.items():
            if collected:
                settled[name] = self._mapping(name, collected, settled)
        return settled, tuple(notes)

    @property
    def of_defaults(self) -> Origin:
        return Origin(kind=TRANSLATED, where=f"from {self.application}'s defaults")

    def _apply(
        self, row: OptionRow, settled: dict[str, Given], keys: dict[str, dict[str, _Key]], notes: list[str]
    ) -> None:
        if row.option in OTHERWISE_IN_TF1 and self.application != "tf1":
            return
        value, given = self.value_of(row.option), is_given(self.found, row.option)
        if row.convert is None or value is None or not (given or self.application == "tf1"):
            return
        described = f"from {describe(self.found, row.option)}"
        origin = Origin(kind=TRANSLATED, where=described) if given else self.of_defaults
        for setting, converted in row.convert(value, self.value_of).items():
            name, _, key = setting.partition(".")
            if given:
                self._refuse_conflict(row, name)
            if name in YIELDS and is_given(self.found, name):
                continue
            if not key:
                if given or not is_given(self.found, name):
                    settled[name] = Given(value=converted, origin=origin)
            elif key in self._keys_of(name) and row.of in ("", self.value_of(MAPPINGS[name])):
                if given or not is_given(self.found, name):
                    keys[name][key] = _Key(value=converted, origin=origin, given=given)
            elif given:
                notes.append(
                    f"{describe(self.found, row.option)} has no effect with "
                    f"{MAPPINGS[name]} {self.value_of(MAPPINGS[name])}."
                )

    def _keys_of(self, name: str) -> tuple[str, ...]:
        chosen = self.value_of(MAPPINGS[name])
        if self.application == "tf1" and chosen == "sgd":
            return ()  # plain SGD there: momentum is an optimizer of its own
        return known_keys(MAPPINGS[name], chosen)

    def _mapping(self, name: str, collected: dict[str, _Key], settled: Found) -> Given:
        base = dict(settled[name].value) if is_given(self.found, name) or self.application != "tf1" else {}
        if self.application == "tf1" and self.value_of("optimizer") == "rmsprop" and name == "optimizer_params":
            base.setdefault("initial_accumulator", 1.0)
        first = next((key for key in collected.values() if key.given), next(iter(collected.values())))
        return Given(value=base | {name: key.value for name, key in collected.items()}, origin=first.origin)

    def _refuse_conflict(self, row: OptionRow, name: str) -> None:
        """Refuse an option next to the setting it stands for."""
        if name in YIELDS or not is_given(self.found, name):
            return
        same = self.found[name].origin.kind == self.found[row.option].origin.kind
        if row.tf1_only or same:
            raise _conflict(self.found, row.option, name)


def _without_weaker(found: dict[str, Given]) -> dict[str, Given]:
    """Refuse two options of one source that say the same thing; of two sources, drop the weaker one's."""
    left = dict(found)
    for pair in EITHER_OR:
        if not all(is_given(left, name) for name in pair):
            continue
        kinds = [left[name].origin.kind for name in pair]
        if kinds[0] == kinds[1]:
            raise ConfigError(
                f"Both are given: {describe(left, pair[0])} and {describe(left, pair[1])}.",
                rule="They are two ways to say the same thing.",
                remedy="Leave one of them out.",
            )
        weaker = pair[0] if kinds[1] == COMMAND_LINE.kind else pair[1]
        left[weaker] = Given(value=_KNOWN[weaker].default, origin=DEFAULT)
    return left


def _without_uneven_events(found: dict[str, Given]) -> tuple[dict[str, Given], tuple[str, ...]]:
    """Drop frequencies of a recipe or file that do not divide the command line's number of epochs."""
    epochs, left, notes = found["num_epochs"], dict(found), []
    for name in EVENTS:
        given = found[name]
        weaker = epochs.origin == COMMAND_LINE and is_given(found, name) and given.origin != COMMAND_LINE
        if weaker and not divides_run(given.value, epochs.value):
            left[name] = Given(value=all_options()[name].default, origin=DEFAULT)
            why = f"{describe(found, name)} does not go with {describe(found, 'num_epochs')}"
            notes.append(f"{why}; using the default.")
    return left, tuple(notes)


def _conflict(found: Found, theirs: str, ours: str) -> ConfigError:
    return ConfigError(
        f"Options of two applications are mixed: {describe(found, theirs)} and {describe(found, ours)}.",
        rule=f"In application tf1, {theirs} means what {ours} means elsewhere.",
        remedy=f"Leave one of them out. {_ordinary_form(theirs)}".strip(),
    )


def _ordinary_form(option: str) -> str:
    row = BY_OPTION.get(option)
    if row is None or not row.sets:
        return ""
    if row.instead:
        return row.instead
    return f"{', '.join(row.sets)}{f' ({row.description})' if row.description else ''}"
