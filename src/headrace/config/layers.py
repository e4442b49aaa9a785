"""Layers of given values, weakest first: defaults, environment, a recipe or file, the command line.

The strongest wins.

Some options depend on each other (an optimizer and its settings). Where a stronger layer changes one of them, what a
weaker layer said of the other is dropped as far as it no longer fits, with a note. Within one layer nothing is
dropped: the checks refuse what does not fit. A launcher comes last and overrides the number of replicas.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config.field import DEFAULT, Option, Origin
from headrace.config.networks import family_of
from headrace.config.params import known_keys
from headrace.config.section_data import IMAGE_DATASETS, SYNTHETIC_DATASETS
from headrace.config.section_pipeline import stages_of_splits
from headrace.job import ProcessInfo, detect_process_info
from headrace.rows.networks import OPTION_FAMILIES
from headrace.rows.values import format_value


@dataclass(frozen=True, kw_only=True)
class Given:
    """A value as read, and where it came from."""

    value: Any
    origin: Origin


Layer = Mapping[str, Given]
Found = Mapping[str, Given]  # every option with its value and origin


@dataclass(frozen=True, kw_only=True)
class Yields:
    """An option that gives way where a stronger layer gives another one, `to`, beside which it has no meaning.

    `keep(the other's value, its own value)` is what stays; None: the default.
    """

    option: str
    to: str
    keep: Callable[[Any, Any], Any]
    silent: bool = False  # the other one says the same thing, so that nobody misses it


def _only_known(kind: str) -> Callable[[Any, Any], Any]:
    return lambda name, params: {key: value for key, value in params.items() if key in known_keys(kind, name)}


def _nothing(said: object, value: object) -> None:
    """Keep nothing beside the other one."""


def _only_for(*datasets: str) -> Callable[[Any, Any], Any]:
    return lambda dataset, value: value if dataset in datasets else None


# Options about stages, and whether their value fits a number of stages.
STAGES_FIT: Mapping[str, Callable[[int, Any], bool]] = {
    "num_pipeline_stages": lambda count, stages: stages in (1, count),
    "pipeline_splits": lambda count, splits: not splits or stages_of_splits(splits) == count,
    "device_mapping": lambda count, mapping: not mapping or len(mapping) == count > 1,
    "measure_splits": lambda count, on: count > 1 or not on,
    "pipeline_validation_model": lambda count, on: count > 1 or not on,
}


def _stages_yield(to: str, count_of: Callable[[Any], int]) -> tuple[Yields, ...]:
    return tuple(
        Yields(option=name, to=to, keep=lambda said, value, fits=fits: value if fits(count_of(said), value) else None)
        for name, fits in STAGES_FIT.items()
        if name != to
    )


def _family_only(option: str) -> Callable[[Any, Any], Any]:
    """Drop an option of a weaker layer where the network named by a stronger one is of another family."""
    return lambda name, value: value if family_of(name) in (*OPTION_FAMILIES[option], None) else None


YIELDS = (
    # A size alone means a size of the family; a network that says its size itself needs no other.
    Yields(option="model_name", to="model_size", keep=lambda size, name: family_of(name) or name),
    Yields(option="model_size", to="model_name", keep=_nothing),
    *(Yields(option=option, to="model_name", keep=_family_only(option)) for option in OPTION_FAMILIES),
    # Who says how much is kept says it of all steps.
    Yields(option="bn_momentum_start", to="bn_momentum", keep=_nothing, silent=True),
    Yields(option="optimizer_params", to="optimizer", keep=_only_known("optimizer")),
    Yields(option="lr_schedule_params", to="lr_schedule", keep=_only_known("lr_schedule")),
    *(
        Yields(option=option, to="dataset", keep=_only_for(*SYNTHETIC_DATASETS))
        for option in ("num_classes", "num_samples")
    ),
    *(
        Yields(option=option, to="dataset", keep=_only_for(*SYNTHETIC_DATASETS, *IMAGE_DATASETS))
        for option in ("image_size", "num_channels")
    ),
    Yields(option="gradient_accumulation_count", to="global_batch_size", keep=_nothing),
    Yields(option="global_batch_size", to="gradient_accumulation_count", keep=_nothing),
    Yields(option="global_batch_size", to="batch_size", keep=_nothing, silent=True),
    Yields(option="gradient_accumulation_count", to="batch_size", keep=_nothing),
    *(
        Yields(option="batch_size", to=other, keep=_nothing, silent=True)
        for other in ("micro_batch_size", "global_batch_size")
    ),
    *(
        Yields(
            option=option,
            to="accelerator_side_preprocess",
            keep=lambda on_device, value: value if on_device else None,
        )
        for option in ("eight_bit_transfer", "fused_preprocessing")
    ),
    *_stages_yield("num_pipeline_stages", int),
    *_stages_yield("pipeline_splits", stages_of_splits),
)


def merge_layers(
    layers: Sequence[Layer], options: Mapping[str, Option], yields: Sequence[Yields] = YIELDS
) -> tuple[dict[str, Given], tuple[str, ...]]:
    """Return every option's value and origin, and notes on what was dropped."""
    defaults = {name: Given(value=option.read(option.default), origin=DEFAULT) for name, option in options.items()}
    found, rank = dict(defaults), dict.fromkeys(defaults, 0)
    for strength, layer in enumerate(layers, start=1):
        for name, given in layer.items():
            found[name], rank[name] = given, strength
    notes = []
    # In their order: a row sees what those before it have dropped.
    for row in yields:
        other, mine = found[row.to], found[row.option]
        # Given side by side, or mine by the stronger layer: then both are meant, and the checks say whether they fit.
        if rank[row.to] <= rank[row.option] or other.value is None or mine.value is None:
            continue
        kept = row.keep(other.value, mine.value)
        if kept == mine.value:
            continue
        origin = DEFAULT if kept is None else mine.origin if kept else other.origin
        found[row.option] = Given(value=defaults[row.option].value if kept is None else kept, origin=origin)
        if rank[row.option] > 0 and not row.silent:
            given = f"{row.option} {format_value(mine.value)} ({mine.origin})"
            why = f"{row.to} {format_value(other.value)} ({other.origin})"
            notes.append(
                f"{given} does not go with {why}; using {'the default' if kept is None else format_value(kept)}."
            )
    return found, tuple(notes)


LAUNCHER = "launcher"  # the kind of origin of what comes from here


def launcher_layer(layers: Sequence[Layer], environ: Mapping[str, str]) -> tuple[Layer, tuple[str, ...]]:
    """Return the layer over all others, and warnings about what it overrules. A process alone has an empty one."""
    distributed = _find(layers, "distributed")
    place = detect_process_info(environ, distributed=bool(distributed and distributed.value))
    if place is None:
        return {}, ()
    written = _find(layers, "num_replicas")
    written = written if written and written.value else None  # auto leaves it to the launcher
    number = _replicas(place, written)
    if number is None:
        return {}, ()
    layer = {"num_replicas": Given(value=number, origin=Origin(kind=LAUNCHER, where=place.detected_by))}
    if place.num_replicas is None or written is None or written.origin.kind == LAUNCHER or written.value == number:
        return layer, ()
    note = (
        f"num_replicas {written.value} ({written.origin}) is ignored: the launcher says {number} replicas, "
        f"{number // place.num_processes} in each of {place.num_processes} processes"
    )
    return layer, (note,)


def _replicas(place: ProcessInfo, written: Given | None) -> int | None:
    """Return the replicas of the whole job, or None where what is written holds."""
    if place.num_replicas is not None:
        return place.num_replicas
    if written is None:
        # One in each of the processes that share a host; one that has its host for itself may have many devices.
        return place.num_processes if place.num_processes and place.num_local_processes != 1 else None
    if place.replicas_per_process and written.origin.kind != LAUNCHER:
        return written.value * place.num_processes
    return None


def _find(layers: Sequence[Layer], name: str) -> Any:
    return next((layer[name] for layer in reversed(layers) if name in layer), None)
