"""Combinations of the reference's options that cannot work, refused before anything starts."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from headrace.config.layers import Found
from headrace.config.load import build, derive
from headrace.config.model_table import find_variant
from headrace.config.schema import all_options
from headrace.config.section_pipeline import stages_of_splits
from headrace.config.values import format_value
from headrace.core.errors import ConfigError

# The splits of a tf1 pipeline: they must be named, and the error for missing names lists the possible ones.


def refuse_missing_splits(found: Found) -> None:
    """Refuse `--pipeline` without as many splits as its shards need, and list those that the network has."""
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
    """Return a sentence with the splits of the network, under that application's names.

    For a ResNet these are the ReLUs after its units, for an EfficientNet its blocks and the parts of those that change
    the shape, for other networks the names of our blocks.
    """
    # Here, since importing JAX takes a second that reading options should not.
    from headrace.model.families import build_network

    derived = derive(found)
    config = build({name: derived[name].value for name in all_options()})
    variant = find_variant(config.model.model_name)  # names depend neither on its classes nor on its image size
    network = build_network(config.model, variant.num_classes, (variant.image_size, variant.image_size, 3))
    points = network.split_points()
    theirs = re.compile(r"b\d+/\d+/relu|block\d+[a-z]|block\d+a/(b|SE|c)|Top")
    names = [name for name in points if theirs.fullmatch(name) and points[name] > (0, 0)]
    names = sorted(names, key=lambda name: points[name]) or list(network.block_names[1:])
    return f"Possible splits of {network.name}: {', '.join(names)}."


LARS_SKIPPED = {"beta", "gamma", "bias"}


@dataclass(frozen=True, kw_only=True)
class ReferenceRule:
    """A combination that cannot work: when it occurs, the options to name, the rule and the remedy."""

    broken: Callable[[Found], bool]
    problem: Callable[[Found], str]
    rule: str
    remedy: str


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


AFTER = (
    *(_period_rule(name, verb) for name, verb in EVENTS.items()),
    ReferenceRule(
        broken=lambda found: (
            found["application"].value == "tf2"
            and found["recomputation"].value
            and max(found["num_pipeline_stages"].value, stages_of_splits(found["pipeline_splits"].value)) == 1
        ),
        problem=lambda found: (
            f"{describe(found, 'recomputation')} without pipeline stages, in {describe(found, 'application')}."
        ),
        rule="In application tf2, recomputation keeps the inputs of the stages.",
        remedy="Name stages with --pipeline-splits, or leave the application out.",
    ),
)


def check_before(found: Found) -> None:
    """Refuse what cannot be translated."""
    _check(BEFORE, found)


def check_after(asked: Found, translated: Found) -> None:
    """Refuse what can be translated but not run."""
    _check(AFTER, translated)
    refuse_missing_splits({**translated, "shards": asked["shards"], "pipeline": asked["pipeline"]})


def _check(rules: tuple[ReferenceRule, ...], found: Found) -> None:
    for rule in rules:
        if rule.broken(found):
            raise ConfigError(rule.problem(found), rule=rule.rule, remedy=rule.remedy)
