"""Values that nobody gave and that follow from others, as a list of rows in their order.

`DERIVED` follows from options alone: the network's full name, its image size, ... What follows from the dataset, the
devices and the weights are rows of the same kind in run/choices.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from headrace.config.field import DEFAULT, Origin
from headrace.config.layers import Given, Layer
from headrace.config.networks import find_variant
from headrace.config.section_data import GREY_DATASETS, IMAGE_DATASETS, IMAGE_SIZES, SYNTHETIC_DATASETS
from headrace.config.spellings import SIZE, write_parts
from headrace.config.task_rules import refused_options
from headrace.core.errors import ConfigError
from headrace.rows.network import NetworkRow
from headrace.rows.tasks import CLASSIFICATION, MULTILABEL, REGRESSION, TASKS

ALL_CHECKPOINTS = 1_000_000  # more than any run saves
PIXEL_OPTIONS = ("normalization", "pixel_mean", "pixel_std")
_ANY_SIZE = (*SYNTHETIC_DATASETS, "imagenet")


class DerivedOptions:
    """All options while values are derived: their values so far, and what was derived."""

    def __init__(self, found: Mapping[str, Given]) -> None:
        self.found = dict(found)
        self.derived: dict[str, Given] = {}
        self.said: list[str] = []

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option so far."""
        return self.found[name].value

    def origin(self, name: str) -> Origin:
        """Return where an option's value comes from so far; a second name that nobody used is not there."""
        return self.found[name].origin if name in self.found else DEFAULT

    def is_open(self, *names: str) -> bool:
        """Say whether nobody gave any of these options, and none of them was chosen."""
        return all(self.origin(name).kind == DEFAULT.kind for name in names)

    def is_free(self, *names: str) -> bool:
        """Say whether nobody but a recipe gave any of these options, and none of them was chosen."""
        return all(self.origin(name).kind in (DEFAULT.kind, "recipe") for name in names)

    def set(self, name: str, given: Given) -> None:
        """Set a value that was derived."""
        self.found[name] = self.derived[name] = given


Facts = TypeVar("Facts", bound=DerivedOptions)


@dataclass(frozen=True, kw_only=True)
class Derived(Generic[Facts]):
    """A value that nobody gave: of which option, when, which (None: none after all), and where it comes from.

    `says` is what a note tells of it.
    """

    option: str
    when: Callable[[Facts], object]
    value: Callable[[Facts], Any]
    origin: Origin | Callable[[Facts], Origin]
    says: Callable[[Facts], str] = lambda facts: ""


def apply_rows(rows: Sequence[Derived[Facts]], facts: Facts) -> None:
    """Set what the rows derive, one after the other: a row sees what those before it have set."""
    for row in rows:
        if not row.when(facts):
            continue
        value = row.value(facts)
        if value is not None:
            origin = row.origin if isinstance(row.origin, Origin) else row.origin(facts)
            facts.set(row.option, Given(value=value, origin=origin))
            facts.said += [text] if (text := row.says(facts)) else []


def derive(found: Mapping[str, Given], weights: Layer | None = None, *, detects: bool = False) -> dict[str, Given]:
    """Return all options with those filled in that follow from others.

    `weights` are the options that come with named weights. `detects` says whether a path that is given makes the
    dataset one to be detected.
    """
    facts = _Facts(write_parts(found), weights or {}, detects=detects)
    apply_rows(DERIVED, facts)
    return facts.found


class _Facts(DerivedOptions):
    def __init__(self, found: Mapping[str, Given], weights: Layer, *, detects: bool) -> None:
        super().__init__(found)
        self.weights, self.detects = weights, detects

    @property
    def named_place(self) -> str:
        """The option by which somebody says where the images are; a variable is a place to search for sets by name."""
        named = [
            name for name in ("dataset_path", "labels") if self.origin(name).kind not in ("default", "environment")
        ]
        return named[0] if named else ""

    @cached_property
    def input_of_weights(self) -> Layer:
        """The pixels that named weights expect, where nobody says how images are prepared."""
        dataset, mean = self["dataset"], self.weights.get("pixel_mean")
        if not self.weights or dataset in SYNTHETIC_DATASETS or not all(map(self.is_free, PIXEL_OPTIONS)):
            return {}
        channels = 1 if dataset in GREY_DATASETS else self["num_channels"]
        return self.weights if mean is None or len(mean.value) in (0, channels) else {}

    @property
    def size_of_weights(self) -> int:
        """The size of images that named weights were trained with; 0 where the dataset is not one of image files."""
        if self["dataset"] not in IMAGE_DATASETS or "image_size" not in self.weights:
            return 0
        return self.weights["image_size"].value

    @cached_property
    def image_size(self) -> int | None:
        """The size of images, None where it is open."""
        return self["image_size"] or IMAGE_SIZES.get(self["dataset"])

    @property
    def model_size(self) -> str | None:
        """The size of the network where its name is that of a family."""
        return self[SIZE.name] if SIZE.name in self.found else None

    @cached_property
    def variant(self) -> NetworkRow | None:
        """The network; None where it is none of the table: refused, or found elsewhere, when it is built."""
        try:
            return find_variant(self["model_name"], self.model_size, self.image_size)
        except ConfigError:
            if self.model_size is not None:
                raise
            return None


def _takes_own_size(dataset: str, variant: NetworkRow) -> bool:
    """Say whether images get the network's own size: synthetic ones do, and all image files for an EfficientNet."""
    return dataset in _ANY_SIZE or (dataset in IMAGE_DATASETS and variant.family == "efficientnet")


def _shorter_side(facts: _Facts) -> int:
    """Return it in the proportion of the weights' own crop, and never less than what is cut out of it."""
    size = facts["image_size"]
    return max(facts.weights["eval_resize_size"].value * size // facts.size_of_weights, size)


def _norm_momentum(facts: _Facts) -> float | None:
    """Return what norm_layer says of bn_momentum."""
    momentum = facts["norm_layer"].get("momentum")
    if momentum is None or not isinstance(momentum, int | float):
        return None
    if facts.origin("bn_momentum").is_given and facts["bn_momentum"] != momentum:
        raise ConfigError(
            f"norm_layer says momentum {momentum}, bn_momentum says {facts['bn_momentum']}.",
            remedy="Leave one of them out.",
        )
    return float(momentum)


def _of_weights(name: str) -> Derived[_Facts]:
    return Derived(
        option=name,
        when=lambda facts: name in facts.input_of_weights,
        value=lambda facts: facts.weights[name].value,
        origin=lambda facts: facts.weights[name].origin,
    )


def _default(where: str) -> Origin:
    return Origin(kind=DEFAULT.kind, where=where)


DERIVED: tuple[Derived[_Facts], ...] = (
    Derived(  # training on the embedded digits would ignore the path in silence
        option="dataset",
        when=lambda f: f.detects and not f.origin("dataset").is_given and f.named_place,
        value=lambda f: "auto",
        origin=lambda f: _default(f"of {f.named_place}"),
    ),
    *map(_of_weights, PIXEL_OPTIONS),
    Derived(
        option="image_size",
        when=lambda f: f.size_of_weights and not f["image_size"],
        value=lambda f: f.size_of_weights,
        origin=lambda f: f.weights["image_size"].origin,
    ),
    Derived(
        option="eval_resize_size",
        when=lambda f: f.size_of_weights and f.is_free("eval_resize_size"),
        value=_shorter_side,
        origin=lambda f: f.weights["image_size"].origin,
    ),
    Derived(
        option="eval_interpolation",
        when=lambda f: f.size_of_weights and f.is_free("eval_interpolation") and f["resize_antialias"],
        value=lambda f: f.weights["eval_interpolation"].value,
        origin=lambda f: f.weights["eval_interpolation"].origin,
    ),
    Derived(
        option="max_ckpts_to_keep",
        when=lambda f: (f["average_last_epochs"] or f["average_decays"]) and not f.origin("max_ckpts_to_keep").is_given,
        value=lambda f: ALL_CHECKPOINTS,
        origin=_default("with averages of checkpoints"),
    ),
    Derived(
        option="model_name",
        when=lambda f: f.variant,
        value=lambda f: f.variant and f.variant.name,
        origin=lambda f: f.origin("model_name" if f.model_size is None else SIZE.name),
    ),
    Derived(
        option="image_size",
        when=lambda f: f.variant and f.image_size is None and _takes_own_size(f["dataset"], f.variant),
        value=lambda f: f.variant and f.variant.image_size,
        origin=lambda f: _default(f"of {f['model_name']}"),
    ),
    *(
        Derived(
            option=name,
            when=lambda f, name=name: f["task"] != CLASSIFICATION.name and f.is_free(name),
            value=lambda f, field=field: getattr(TASKS[f["task"]], field)[0 if field == "losses" else slice(None)],
            origin=lambda f: _default(f"of the task {f['task']}"),
        )
        for name, field in (("loss", "losses"), ("monitor", "monitor"))
    ),
    # What a recipe gives for classes is off where there are none.
    *(
        Derived(
            option=name,
            when=lambda f, name=name: (
                f.origin(name).kind == "recipe"
                and (name in refused_options(f["task"]) or (name == "label_smoothing" and f["task"] == MULTILABEL.name))
            ),
            value=lambda f, default=default: default,
            origin=lambda f: _default(f"of the task {f['task']}"),
        )
        for name, default in refused_options(REGRESSION.name).items()
    ),
    Derived(option="bn_momentum", when=lambda f: True, value=_norm_momentum, origin=lambda f: f.origin("norm_layer")),
)
