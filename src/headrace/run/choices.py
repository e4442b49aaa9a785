"""Options that nobody gave, chosen from dataset, devices and weights before a run; a resumed run keeps them.

They are rows in their order, of the same kind as those that follow from options alone (config/derived.py); the numbers
are in choice_rules.py.
"""

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from headrace.config.checks import check
from headrace.config.derived import Derived, DerivedOptions, apply_rows
from headrace.config.field import CHOSEN, DEFAULT, Origin
from headrace.config.layers import Given
from headrace.config.load import IMAGES_RECIPE, NO_RECIPE, Resolved, build, options_of, with_values
from headrace.config.networks import find_variant
from headrace.config.schema import Config, Data, ModelSection
from headrace.config.section_data import IMAGE_DATASETS
from headrace.config.section_learning import CURRENT_TIME
from headrace.config.section_model import norm_choice, variant_of
from headrace.config.section_run import DRAWN_SEED
from headrace.config.translations import translation
from headrace.core.errors import ConfigError
from headrace.core.units import format_duration
from headrace.data.dataset import DataInfo
from headrace.data.sets.image_views import crop_rule
from headrace.engine.trainable import BACKBONE
from headrace.engine.visible import Visible, visible_devices
from headrace.job import current_group, devices_of_this_process, is_watched
from headrace.plan.batch import make_batch_plan
from headrace.rows.networks import OPTION_FAMILIES
from headrace.rows.tasks import CLASSIFICATION, REGRESSION
from headrace.run.choice_rules import (
    FEWEST_PHOTOGRAPHS,
    FINE_TUNING,
    LARGEST_MUON_BATCH,
    MOST_EPOCHS_IN_TIME,
    MOST_PHOTOGRAPHS,
    MOST_SHORT_EPOCHS,
    MUON,
    QUICK_CROPS,
    QUICK_PARTS,
    RANGER,
    SHORT_CROPS,
    USUAL_MOMENTUM,
    choose_batch,
    choose_epochs,
    choose_micro_batch,
    choose_muon_rate,
    choose_precision,
    choose_ranger_rate,
    choose_rate,
    choose_short_batch,
    choose_short_rate,
    choose_statistics_momentum,
    choose_warmup,
    memory_allowed,
)
from headrace.run.design import NOTHING, CustomParts, described, design_run, with_set
from headrace.run.expected_time import expected_time
from headrace.run.weight_options import weight_options
from headrace.weights.definitions import OPTIONS, find_definition, has_definitions, refuse_another
from headrace.weights.named import find_file, is_path, path_of
from headrace.weights.weight_file import read_shapes

T = TypeVar("T")

# Options of which one settles the matter.
BATCH = ("batch_size", "micro_batch_size", "global_batch_size")
RATE = ("learning_rate", "lr_schedule_params")
WARMUP = ("warmup_epochs", "lr_warmup_params")
OPTIMIZER = ("optimizer", "optimizer_params", "momentum")
TRAINED_PARTS = ("layer_lr", "layer_decay", "freeze", "variable_filter")
_SAID = 5  # targets named in a note
BATCH_WITHOUT_TRAINING = 32  # images per replica


def settle(resolved: Resolved, custom: CustomParts = NOTHING) -> Resolved:
    """Return the configuration with all that is left open chosen: whose definition of the network, a seed, the
    replicas, then what `with_choices` chooses.
    """
    return _with_choices(_with_rows(with_definition(resolved, custom), (*DRAWN, *REPLICAS, *TARGETS), custom), custom)


def with_drawn(resolved: Resolved) -> Resolved:
    """Return the configuration with a seed drawn and the time put into a path, where it asks for them.

    The processes of a job must have joined it: they all get the same.
    """
    return _with_rows(resolved, DRAWN)


def with_replicas(resolved: Resolved, custom: CustomParts = NOTHING) -> Resolved:
    """Return the configuration with as many replicas as there are devices, if their number is left open.

    Virtual CPU devices are counted only where `auto` is asked for, or where somebody else has connected JAX and thereby
    said what it has. In a job every process has the same number of replicas, one at least. The number becomes part of
    the configuration, for a resumed run.
    """
    return _with_rows(resolved, REPLICAS, custom)


def with_choices(resolved: Resolved, custom: CustomParts = NOTHING) -> Resolved:
    """Return the configuration with what nobody gave of batch, rate, epochs, warm-up, statistics and precision.

    A note says what was chosen. Nothing is chosen for another application that has defaults of its own.
    """
    return _with_choices(with_definition(resolved, custom), custom)


def with_chosen_decoding(resolved: Resolved, info: DataInfo) -> Resolved:
    """Return the configuration to save: what `decode_once auto` chose, which decides the pixels of a resumed run."""
    if not _decoding_is_open(resolved.config.data):
        return resolved
    # Crops of images that were decoded once have other pixels than crops of files: a resumed run must make the same.
    chosen = Given(value="on" if info.decoded_once else "off", origin=_chosen("for this dataset"))
    return with_values(resolved, {"decode_once": chosen})


def _with_rows(resolved: Resolved, rows: tuple[Derived["Settled"], ...], custom: CustomParts = NOTHING) -> Resolved:
    """Return the configuration with what the rows choose, a note for each that says something."""
    facts = Settled(resolved, custom)
    apply_rows(rows, facts)
    return facts.applied(notes=facts.said)


def _with_choices(resolved: Resolved, custom: CustomParts) -> Resolved:
    facts = Settled(resolved, custom)
    # A run that only validates needs a batch, and nothing else of these.
    wanted = any(facts.were_open) if facts["training"] else facts.were_open[0]
    if not wanted or not translation().chooses(resolved.source):
        return resolved
    if facts["training"] and not facts.data.num_train:
        return resolved  # refused when the run is designed
    apply_rows(CHOICES, facts)
    said = ", ".join(sorted(facts.said, key=lambda text: text.startswith("precision")))  # it is decided first
    return facts.applied(notes=[f"{CHOSEN}: {said}"] if said else [])


def with_definition(resolved: Resolved, custom: CustomParts = NOTHING) -> Resolved:
    """Return the configuration with the network that is in the weights it starts from, where libraries define several.

    A note says what was chosen. Options that make another network of it are refused, or with `init_min_loaded` 0, which
    accepts any weights, warned of.
    """
    config, name = resolved.config, resolved.config.weights.weights
    chosen_before = resolved.origins["model_dialect"].kind == CHOSEN
    if name is None or chosen_before or custom.network is not None or not has_definitions(config.model):
        return resolved
    given = {option for option in OPTIONS if resolved.origins[option].kind not in (DEFAULT.kind, "recipe")}
    try:
        found = _definition_in(name, config, given)
    except ConfigError as error:
        if config.weights.init_min_loaded or not given:
            raise
        warning = f"{error.problem} They start from it all the same, as init_min_loaded is 0."
        return resolved if warning in resolved.warnings else replace(resolved, warnings=(*resolved.warnings, warning))
    if not found:
        return resolved
    origin = Origin(kind=CHOSEN, where=f"by the names in {name}")
    settled = with_values(resolved, {key: Given(value=value, origin=origin) for key, value in found.items()})
    said = " and ".join(f"{key} is {value}" for key, value in found.items())
    return replace(settled, notes=(*resolved.notes, f"{said}, {origin}"))


def definition_remarks(before: Resolved, after: Resolved) -> tuple[str, ...]:
    """Return what `with_definition` added to be said, in lines, where no run says it."""
    new = (("warning", after.warnings[len(before.warnings) :]), ("note", after.notes[len(before.notes) :]))
    return tuple(f"{kind}: {text}" for kind, texts in new for text in texts)


def _definition_in(name: str, config: Config, given: Collection[str]) -> Mapping[str, str]:
    """Return the options of the definition that weights are of; {} where they are those of the configuration."""
    known = weight_options(name)
    if "model_name" in known:  # what came with them holds unless options say something else
        is_same = find_variant(known["model_name"]) == variant_of(config.model)
        if given and is_same:
            defaults = ModelSection()
            refuse_another(config.model, given, {key: known.get(key, getattr(defaults, key)) for key in OPTIONS}, name)
        return {}
    if is_path(name) and not path_of(name).is_file():  # a run without a description, or nothing at all
        return {}
    return find_definition(config.model, given, read_shapes(find_file(name), config.weights.init_ema), name)


def with_some_batch(config: Config) -> Config:
    """Return a configuration to evaluate with, whose batch and replicas may have been left open."""
    batch = config.batch
    if batch.batch_size is batch.micro_batch_size is batch.global_batch_size is None:
        batch = replace(batch, micro_batch_size=BATCH_WITHOUT_TRAINING)
    if batch.num_replicas is None and not current_group().is_alone:
        batch = replace(batch, num_replicas=current_group().num_processes)
    return replace(config, batch=batch)


class _Replicas(NamedTuple):
    """A number of replicas, and the devices that it comes from."""

    number: int
    where: str


class Settled(DerivedOptions):
    """A configuration while values are chosen for it, with its dataset and devices, which are looked at once."""

    def __init__(self, resolved: Resolved, custom: CustomParts) -> None:
        super().__init__(options_of(resolved) | dict(resolved.source))
        self.resolved, self.custom = resolved, custom
        names = (BATCH, RATE, ("num_epochs",), ("precision",))
        self.were_open = [self.is_open(*each) for each in names]

    @cached_property
    def config(self) -> Config:
        """The configuration so far, unchecked."""
        return build({name: given.value for name, given in self.found.items()})

    def set(self, name: str, given: Given) -> None:
        """Set a value that was derived; the configuration is another one from here on."""
        super().set(name, given)
        self.__dict__.pop("config", None)

    def applied(self, notes: list[str]) -> Resolved:
        """Return the configuration with what was chosen, checked."""
        settled = with_values(self.resolved, self.derived) if self.derived else self.resolved
        return replace(settled, notes=(*self.resolved.notes, *notes)) if notes else settled

    @cached_property
    def parts(self) -> CustomParts:
        """What code gave, with the set that options name."""
        return with_set(self.config, self.custom, absent_ok=True)

    @cached_property
    def data(self) -> DataInfo:
        """The facts of the dataset."""
        return described(self.config, self.parts)

    @cached_property
    def devices(self) -> Visible:
        """The devices, with their memory and number formats."""
        return visible_devices(self["platform"])

    @cached_property
    def counted_devices(self) -> Visible:
        """The devices, as far as it takes no time to know of them."""
        return visible_devices(self["platform"], details=False)

    @property
    def fine_tuning(self) -> bool:
        """Whether training starts from trained weights."""
        return self["weights"] is not None or self.custom.weights is not None

    @cached_property
    def learns_photographs(self) -> bool:
        """Whether a ResNet learns photographs from nothing, as many as the way for it was measured with, and nobody
        says how.
        """
        if not self["training"] or self.fine_tuning or self.custom.network is not None:
            return False
        if self["task"] != CLASSIFICATION.name:  # what it was measured with
            return False
        variant = variant_of(self.config.model)
        return (
            self.resolved.name == IMAGES_RECIPE
            and variant is not None
            and variant.family in OPTION_FAMILIES["downsample"]
            and not variant.is_small
            and self.is_free(*RATE, *WARMUP, *OPTIMIZER, *RANGER)
            and FEWEST_PHOTOGRAPHS <= self.data.num_train <= MOST_PHOTOGRAPHS
        )

    @cached_property
    def takes_muon(self) -> bool:
        """Whether photographs are learned from nothing by Muon: not on a CPU, where its products take too long."""
        return self.learns_photographs and self.counted_devices.platform != "cpu"

    @property
    def photograph_crops(self) -> tuple[float, float]:
        """The least and the most of a photograph's area that a random crop keeps."""
        few = not self.is_open("num_epochs") and self["num_epochs"] <= MOST_SHORT_EPOCHS
        return SHORT_CROPS if self.takes_muon and few else QUICK_CROPS

    @cached_property
    def takes_quick_parts(self) -> bool:
        """Whether the network may have the parts that learn photographs in fewer epochs: it is the recipe's own."""
        return self.learns_photographs and self.is_free("model_name", "norm_layer", *QUICK_PARTS)

    @property
    def crops_photographs(self) -> bool:
        """Whether photographs to be learned from nothing are cropped at random, and nobody says how."""
        if not self.learns_photographs or not self.is_open("crop_area", "crop_aspect"):
            return False
        rule = crop_rule(self.config.data, self.data.image_hwc[0])
        return rule is not None and not rule.reference

    @property
    def step_images(self) -> int:
        """The images of a weight update."""
        return make_batch_plan(self.config.batch).global_batch_size

    @property
    def steps_per_epoch(self) -> int:
        """The weight updates of an epoch."""
        updates = self["weight_updates_per_epoch"]
        return max(1, self.data.num_train // self.step_images if updates == -1 else updates)

    @property
    def epochs(self) -> float:
        """The number of epochs, that which will be chosen where nobody gave it."""
        if not self.is_open("num_epochs"):
            return self["num_epochs"]
        if self.epochs_in_time is not None:
            return self.epochs_in_time
        return choose_epochs(self.steps_per_epoch, fine_tuning=self.fine_tuning)

    @cached_property
    def epochs_in_time(self) -> int | None:
        """About how many epochs fit the time budget; None without one, and on devices like none that were measured."""
        if not self["time_budget"]:
            return None
        batch = replace(self.config.batch, num_epochs=1)
        design = design_run(replace(self.config, batch=batch), self.parts, absent_ok=True)
        expected = expected_time(design, self.devices.platform, self.devices.name)
        return expected and min(max(1, round(self["time_budget"] / expected.seconds)), MOST_EPOCHS_IN_TIME)

    @property
    def steps(self) -> int:
        """The weight updates of the run."""
        return max(1, round(self.epochs * self.steps_per_epoch))

    @property
    def usual_rate(self) -> float:
        """The peak learning rate of a long run from scratch."""
        return choose_rate(self["optimizer"], self["optimizer_params"].get("momentum"), self.step_images)

    @cached_property
    def replicas(self) -> _Replicas | None:
        """The replicas for the devices that are there, None where their number is given or one process has one."""
        config, batch = self.config, self.config.batch
        asked, processes = self.origin("num_replicas").is_given, current_group().num_processes
        if batch.num_replicas or config.run.first_device is not None:
            return None
        devices = self.counted_devices
        platform, count = devices.platform, devices_of_this_process(devices.count)
        if platform == "cpu" and not asked and (current_group().is_alone or is_watched()):
            count = 1
        if not asked and count * processes == 1:
            return None
        # The batch may be open, too, and is chosen for the number of replicas: any that can be planned will do here.
        some_batch = replace(
            batch,
            num_replicas=processes,
            micro_batch_size=batch.micro_batch_size or (2 if batch.batch_size is None else None),
        )
        wide = design_run(replace(config, batch=some_batch), self.parts, absent_ok=True).plan.devices_per_replica
        parts, most = batch.gradient_accumulation_count or 1, max(1, count // wide)
        # batch_size is exact: replicas that do not divide it would change what was asked for.
        fitting = [
            each
            for each in range(1, most + 1)
            if not batch.batch_size or batch.batch_size % (each * processes * parts) == 0
        ]
        each = max(fitting, default=1)
        where = f"from {count} {platform} device{'s' * (count != 1)}"
        where += f" in each of {processes} processes" if processes > 1 else ""
        if count < wide:
            where += f", fewer than the {wide} for the stages of each"
        else:
            where += f", {wide} for the stages of each" if wide > 1 else ""
            idle = count - each * wide
            where += f", {idle} of them unused" if idle else ""
            where += f": --batch-size {batch.batch_size} has to divide" if each < most else ""
        return _Replicas(each * processes, where)

    @cached_property
    def precision(self) -> tuple[str, str]:
        """The precision that suits the devices, and why."""
        return choose_precision(self.devices.platform, bfloat16=self.devices.bfloat16)


def _time_of(facts: "Settled") -> str:
    """Return the time budget as a reason; nothing without one."""
    return f"for {format_duration(facts['time_budget'])}" if facts["time_budget"] else ""


def _chosen(where: str) -> Origin:
    return Origin(kind=CHOSEN, where=where)


def _drawn(draw: Callable[[], T]) -> T:
    """Return what process 0 draws, in every process of the job."""
    group = current_group()
    return group.broadcast(group.on_first_process(draw))


def _exact_time() -> str:
    """Return the time to the microsecond: runs that a script starts together must not share it."""
    now = time.time()
    return f"{time.strftime('%d_%m_%Y_%H_%M_%S', time.localtime(now))}_{int(now % 1 * 1e6):06}"


def _decoding_is_open(data: Data) -> bool:
    return data.decode_once == "auto" and data.dataset in IMAGE_DATASETS and not data.synthetic_on


def _say_targets(facts: Settled) -> str:
    """Say on which scale the targets are learned."""
    scale, names = facts.data.scale, facts.data.class_names
    parts = [
        f"{name} {mean:.4g} +- {std:.4g}" for name, mean, std in zip(names[:_SAID], scale.mean, scale.std, strict=False)
    ]
    more = f" and {len(names) - _SAID} more" if len(names) > _SAID else ""
    return f"targets are learned as (target - mean) / deviation: {', '.join(parts)}{more}"


def _batch(facts: Settled) -> int:
    """Return the images of a step by the number of images: a small dataset needs small batches to have enough steps."""
    replicas, count = facts["num_replicas"] or 1, facts["gradient_accumulation_count"] or 1
    if not facts["training"]:
        return BATCH_WITHOUT_TRAINING * replicas * count
    batch = choose_batch(facts.data.num_train, replicas, count)
    if facts.takes_muon:
        batch = min(batch, max(1, LARGEST_MUON_BATCH // (replicas * count)) * replicas * count)
    if not facts.learns_photographs or facts.is_open("num_epochs"):
        return batch
    short = choose_short_batch(batch, facts.data.num_train, facts["num_epochs"])
    return short if short % (replicas * count) == 0 else batch


def _micro_batch(facts: Settled) -> int | None:
    """Return the images of a micro batch where a step's do not fit the memory.

    With a given accumulation it is determined already; without a known memory there is nothing to fit.
    """
    allowed = memory_allowed(facts.devices.platform, facts.devices.memory_bytes)
    if facts["gradient_accumulation_count"] or allowed is None or facts["batch_size"] > facts.data.num_train:
        return None
    config, whole = facts.config, facts["batch_size"] // (facts["num_replicas"] or 1)
    check(config, {name: given.origin for name, given in facts.found.items()})  # what is wrong is not to be designed

    def needs(micro: int) -> int:
        # The plan's own estimate: the same arithmetic that `headrace plan` prints.
        changed = replace(config, batch=replace(config.batch, micro_batch_size=micro))
        return design_run(changed, facts.parts, absent_ok=True).plan.memory.total_bytes

    micro = choose_micro_batch(whole, lambda micro: needs(micro) <= allowed)
    return None if micro == whole else micro


def _rate(facts: Settled) -> float:
    """Return the peak learning rate, for the batch and, from scratch, for the number of steps.

    From trained weights, only the last layer learns at it; a network that code gives may have none to tell apart.
    """
    if facts.takes_muon:
        return choose_muon_rate(facts.step_images)
    if facts.learns_photographs:
        return choose_ranger_rate(facts.step_images)
    if not facts.fine_tuning:
        return choose_short_rate(facts.usual_rate, facts.steps)
    if facts.is_open(*TRAINED_PARTS):
        return float(f"{FINE_TUNING * facts.usual_rate:.2g}")
    return facts.usual_rate


def _why_rate(facts: Settled) -> str:
    why = f"for a batch of {facts.step_images:,}"
    if facts.learns_photographs:
        return why
    if not facts.fine_tuning:
        return f"{why} and {facts.steps:,} steps" if _rate(facts) < facts.usual_rate else why
    return f"{why}, from trained weights" if "layer_lr" in facts.derived or facts.is_open(*TRAINED_PARTS) else why


def _say_rate(facts: Settled) -> str:
    rate = facts["learning_rate"]
    if "layer_lr" not in facts.derived:
        return f"learning rate {rate:g}"
    less = float(f"{FINE_TUNING * rate:.2g}")
    return f"learning rate {rate:g} for the last layer and {less:g} for the others (trained weights)"


def _statistics(facts: Settled) -> float | None:
    """Return how fast batch norm's running statistics move, for the length of the run."""
    if norm_choice(facts.config.model)["name"] not in ("batch_norm", "custom_batch_norm"):
        return None
    keep = choose_statistics_momentum(facts.steps)
    return None if keep == facts["bn_momentum"] else keep


DRAWN: tuple[Derived[Settled], ...] = (
    Derived(
        option="seed",
        when=lambda f: f["seed"] == DRAWN_SEED,
        value=lambda f: _drawn(lambda: secrets.randbits(32)),  # seeds address random bits as uint32
        origin=_chosen("drawn for this run"),
    ),
    Derived(
        option="checkpoint_dir",
        when=lambda f: CURRENT_TIME in (f["checkpoint_dir"] or ""),
        value=lambda f: f["checkpoint_dir"].replace(CURRENT_TIME, _drawn(_exact_time)),
        origin=_chosen("for this run"),
    ),
)
# Of a regression: part of the configuration, so that whoever uses the weights answers in the same units.
TARGETS: tuple[Derived[Settled], ...] = (
    *(
        Derived(
            option=f"target_{name}",
            when=lambda f, name=name: f["task"] == REGRESSION.name and f["training"] and f[f"target_{name}"] is None,
            value=lambda f, name=name: getattr(f.data.scale, name),
            origin=_chosen("of the training images"),
            says=_say_targets if name == "std" else lambda f: "",
        )
        for name in ("mean", "std")
    ),
)
REPLICAS: tuple[Derived[Settled], ...] = (
    # A CPU's crop costs as much as decoding the image again, or more: benchmarks/dated/2026-11-16-image-files.md.
    Derived(
        option="decode_once",
        when=lambda f: _decoding_is_open(f.config.data) and f.counted_devices.platform == "cpu",
        value=lambda f: "off",
        origin=_chosen("without an accelerator"),
    ),
    Derived(
        option="num_replicas",
        when=lambda f: f.replicas,
        value=lambda f: f.replicas and f.replicas.number,
        origin=lambda f: _chosen(f.replicas.where if f.replicas else ""),
        says=lambda f: f"num_replicas is {f['num_replicas']}, {f.origin('num_replicas')}",
    ),
)
PHOTOGRAPHS: tuple[Derived[Settled], ...] = (
    *(
        Derived(
            option=name,
            when=lambda f: f.takes_quick_parts,
            value=lambda f, value=value: value,
            origin=_chosen("for photographs from nothing"),
            says=lambda f, name=name: "a deep stem, blurred strides and mish" if name == "stem" else "",
        )
        for name, value in QUICK_PARTS.items()
    ),
    *(
        Derived(
            option=name,
            when=lambda f, muon=muon: f.learns_photographs and f.takes_muon == muon,
            value=lambda f, value=value: value,
            origin=lambda f: _chosen(f"for {f.data.num_train:,} photographs from nothing"),
            says=lambda f, name=name, says=says: says if name == "optimizer" else "",
        )
        for muon, way, says in (
            (True, MUON, "Muon, a rate that falls in a line"),
            (False, RANGER, "RAdam with lookahead, flat then cosine"),
        )
        for name, value in {**way, "warmup_epochs": 0.0}.items()
    ),
    Derived(
        option="crop_area",
        when=lambda f: f.crops_photographs,
        value=lambda f: f.photograph_crops,
        origin=_chosen("for photographs from nothing"),
        says=lambda f: f"crops of at least {f.photograph_crops[0]:.0%} of an image",
    ),
)
CHOICES: tuple[Derived[Settled], ...] = (
    *PHOTOGRAPHS,
    Derived(
        option="precision",
        # Who asks for float16 has to choose the precision as well: it needs a loss scale to train.
        when=lambda f: (
            f["training"]
            and f.is_open("precision")
            and f["half_type"] == "bfloat16"
            and (f.precision[0] != f["precision"] or f.is_open(*BATCH))  # else there is nothing new to say
        ),
        value=lambda f: f.precision[0],
        origin=lambda f: _chosen(f"for a {f.precision[1]}"),
        says=lambda f: f"precision {f.precision[0]} ({f.precision[1]})",
    ),
    Derived(
        option="batch_size",
        when=lambda f: f.is_open(*BATCH),
        value=_batch,
        origin=lambda f: _chosen(
            f"for {f.data.num_train:,} images" if f["training"] else "for a run that does not train"
        ),
        says=lambda f: f"batch size {f['batch_size']}" + f" ({f.data.num_train:,} images)" * bool(f["training"]),
    ),
    Derived(
        option="micro_batch_size",
        when=lambda f: f["training"] and "batch_size" in f.derived,
        value=_micro_batch,
        origin=_chosen("for the device's memory"),
        says=lambda f: f"micro batch {f['micro_batch_size']} (memory)",
    ),
    # With the rate alone: who gives a rate, and no recipe, asks for plain SGD at that rate.
    Derived(
        option="optimizer_params",
        when=lambda f: f["training"] and f.is_open(*RATE, *OPTIMIZER),
        value=lambda f: {"momentum": USUAL_MOMENTUM, "nesterov": True},
        origin=_chosen("with the learning rate"),
        says=lambda f: f"SGD with momentum {USUAL_MOMENTUM}",
    ),
    Derived(
        option="lr_schedule",
        when=lambda f: f["training"] and f.is_open(*RATE, "lr_schedule"),
        value=lambda f: "cosine",
        origin=_chosen("with the learning rate"),
        says=lambda f: "cosine schedule",
    ),
    Derived(
        option="layer_lr",
        when=lambda f: (
            f["training"] and f.fine_tuning and f.is_open(*RATE, *TRAINED_PARTS) and f.custom.network is None
        ),
        value=lambda f: {BACKBONE: FINE_TUNING},
        origin=lambda f: _chosen(_why_rate(f)),
    ),
    Derived(
        option="learning_rate",
        when=lambda f: f["training"] and f.is_open(*RATE),
        value=_rate,
        origin=lambda f: _chosen(_why_rate(f)),
        says=_say_rate,
    ),
    Derived(
        option="num_epochs",
        when=lambda f: f["training"] and f.is_open("num_epochs"),
        value=lambda f: f.epochs,
        origin=lambda f: _chosen(_time_of(f) or f"for {f.steps_per_epoch:,} steps each"),
        says=lambda f: f"as many epochs as fit{_time_of(f)[3:]}" if _time_of(f) else f"{f['num_epochs']:g} epochs",
    ),
    Derived(
        option="warmup_epochs",
        # An open curve is the constant one, of a rate that was given: else it was chosen, with the rate.
        when=lambda f: f["training"] and f.is_open(*WARMUP) and not f.is_open("lr_schedule"),
        value=lambda f: choose_warmup(f["num_epochs"]),
        origin=_chosen("a tenth of the run"),
        says=lambda f: f"warm-up {f['warmup_epochs']:g} epochs",
    ),
    Derived(
        option="bn_momentum",
        # Without a recipe, a run whose batch, rate and epochs are all given is what its author wrote, and no more. A
        # network that code gives may have statistics of its own.
        when=lambda f: (
            f["training"]
            and f.is_open("bn_momentum")
            and f.custom.network is None
            and (f.resolved.name not in ("", NO_RECIPE) or any(f.were_open[:3]))
        ),
        value=_statistics,
        origin=lambda f: _chosen(f"for {f.steps:,} steps"),
        says=lambda f: f"bn-momentum {f['bn_momentum']:g}",
    ),
)
