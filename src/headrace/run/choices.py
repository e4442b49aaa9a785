"""Options that nobody gave, chosen from dataset, devices and weights before a run; a resumed run keeps them."""

import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.config.field import CHOSEN, DEFAULT, Origin
from headrace.config.layers import Given
from headrace.config.load import NO_RECIPE, Resolved, with_values
from headrace.config.networks import find_variant
from headrace.config.schema import Config, Model
from headrace.config.section_learning import CURRENT_TIME
from headrace.config.section_model import norm_choice, variant_of
from headrace.config.section_run import DRAWN_SEED
from headrace.config.translations import translation
from headrace.core.errors import ConfigError
from headrace.data.dataset import DataInfo, describe_dataset
from headrace.engine.trainable import BACKBONE
from headrace.engine.visible import Visible, visible_devices
from headrace.job import current_group
from headrace.plan.batch import make_batch_plan
from headrace.run.choice_rules import (
    FINE_TUNING,
    USUAL_MOMENTUM,
    choose_batch,
    choose_epochs,
    choose_micro_batch,
    choose_precision,
    choose_rate,
    choose_short_rate,
    choose_statistics_momentum,
    choose_warmup,
    memory_allowed,
)
from headrace.run.design import NOTHING, CustomParts, design_run, with_replicas
from headrace.run.weight_options import weight_options
from headrace.weights.definitions import OPTIONS, find_definition, has_definitions, refuse_another
from headrace.weights.named import find_file, is_path
from headrace.weights.weight_file import read_shapes

# When each rule applies, and how it enters the configuration.


# Options of which one settles the matter.
BATCH = ("batch_size", "micro_batch_size", "global_batch_size")
RATE = ("learning_rate", "lr_schedule_params")
WARMUP = ("warmup_epochs", "lr_warmup_params")
OPTIMIZER = ("optimizer", "optimizer_params", "momentum")
TRAINED_PARTS = ("layer_lr", "layer_decay", "freeze", "variable_filter")
BATCH_WITHOUT_TRAINING = 32  # images per replica


def settle(resolved: Resolved, custom: CustomParts = NOTHING) -> Resolved:
    """Return the configuration with all that is left open chosen: whose definition of the network, the replicas, then
    what `with_choices` chooses.
    """
    return with_choices(with_replicas(with_definition(with_drawn(resolved), custom), custom), custom)


def with_choices(resolved: Resolved, custom: CustomParts = NOTHING) -> Resolved:
    """Return the configuration with what nobody gave of batch, rate, epochs, warm-up, statistics and precision.

    A note says what was chosen. Nothing is chosen for another application that has defaults of its own.
    """
    resolved = with_definition(resolved, custom)
    config, start = resolved.config, _Choices(resolved=resolved, custom=custom)
    asked = [start.is_open(*names) for names in (BATCH, RATE, ("num_epochs",), ("precision",))]
    # A run that only validates needs a batch, and nothing else of these.
    if not translation().chooses(resolved.source) or not any(asked[: None if config.run.training else 1]):
        return resolved
    info = custom.dataset.info if custom.dataset else describe_dataset(config.data, absent_ok=True)
    if config.run.training and not info.num_train:
        return resolved  # refused when the run is designed
    devices = visible_devices(config.run.platform)
    work = start.batch(info, devices)
    if config.run.training:
        work = work.optimizer().rate(info).epochs(info).warmup()
        # without a recipe, a run whose batch, rate and epochs are all given is what its author wrote, and no more
        work = work.statistics(info) if resolved.name not in ("", NO_RECIPE) or any(asked[:3]) else work
    said = ", ".join(sorted(work.said, key=lambda text: text.startswith("precision")))  # it is decided first
    return replace(work.resolved, notes=(*resolved.notes, f"{CHOSEN}: {said}")) if said else resolved


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
            defaults = Model()
            refuse_another(config.model, given, {key: known.get(key, getattr(defaults, key)) for key in OPTIONS}, name)
        return {}
    if is_path(name) and not Path(name).expanduser().is_file():  # a run without a description, or nothing at all
        return {}
    return find_definition(config.model, given, read_shapes(find_file(name), config.weights.init_ema), name)


def with_drawn(resolved: Resolved) -> Resolved:
    """Return the configuration with a seed drawn and the time put into a path, where it asks for them.

    The processes of a job must have joined it: they all get the same.
    """
    config, drawn = resolved.config, {}
    group = current_group()
    if config.run.seed == DRAWN_SEED:
        # 32 bits: seeds address random bits as uint32.
        seed = group.broadcast(group.on_first_process(lambda: secrets.randbits(32)))
        drawn["seed"] = Given(value=seed, origin=Origin(kind=CHOSEN, where="drawn for this run"))
    if CURRENT_TIME in (place := config.checkpoint.checkpoint_dir or ""):
        # To the microsecond: runs that a script starts together must not share it.
        now = time.time()
        exact = f"{time.strftime('%d_%m_%Y_%H_%M_%S', time.localtime(now))}_{int(now % 1 * 1e6):06}"
        place = place.replace(CURRENT_TIME, exact)
        drawn["checkpoint_dir"] = Given(value=place, origin=Origin(kind=CHOSEN, where="for this run"))
    return with_values(resolved, drawn) if drawn else resolved


def with_some_batch(config: Config) -> Config:
    """Return a configuration to evaluate with, whose batch and replicas may have been left open."""
    batch = config.batch
    if batch.batch_size is batch.micro_batch_size is batch.global_batch_size is None:
        batch = replace(batch, micro_batch_size=BATCH_WITHOUT_TRAINING)
    if batch.num_replicas is None and not current_group().is_alone:
        batch = replace(batch, num_replicas=current_group().num_processes)
    return replace(config, batch=batch)


@dataclass(frozen=True, kw_only=True)
class _Choices:
    """A configuration while values are chosen for it, and what is said about them."""

    resolved: Resolved
    custom: CustomParts
    said: tuple[str, ...] = ()

    def is_open(self, *names: str) -> bool:
        """Say whether nobody gave any of these options."""
        return all(self.resolved.origins[name].kind == DEFAULT.kind for name in names)

    @property
    def fine_tuning(self) -> bool:
        """Whether training starts from trained weights."""
        return self.resolved.config.weights.weights is not None or self.custom.weights is not None

    def _with(self, why: str, said: str, **values: object) -> "_Choices":
        origin = Origin(kind=CHOSEN, where=why)
        chosen = {name: Given(value=value, origin=origin) for name, value in values.items()}
        return replace(self, resolved=with_values(self.resolved, chosen), said=(*self.said, said))

    def batch(self, info: DataInfo, devices: Visible) -> "_Choices":
        """Choose the images of a step and, where they do not fit the memory, of a micro batch; before that, their
        number format, on which the memory depends.
        """
        work, run = self._precision(devices), self.resolved.config.run
        if not self.is_open(*BATCH):
            return work
        wanted = self.resolved.config.batch
        replicas, count = wanted.num_replicas or 1, wanted.gradient_accumulation_count
        if not run.training:
            size = BATCH_WITHOUT_TRAINING * replicas * (count or 1)
            return work._with("for a run that does not train", f"batch size {size}", batch_size=size)
        # By the number of images: a small dataset needs small batches to have enough steps.
        size = choose_batch(info.num_train, replicas, count or 1)
        why = f"{info.num_train:,} images"
        work = work._with(f"for {why}", f"batch size {size} ({why})", batch_size=size)
        allowed = memory_allowed(devices.platform, devices.memory_bytes)
        # With a given accumulation the micro-batch is determined already; without a known memory there is nothing to
        # fit.
        if count or allowed is None or size > info.num_train:
            return work

        def needs(micro: int) -> int:
            config = work.resolved.config
            # The plan's own estimate: the same arithmetic that `headrace plan` prints.
            config = replace(config, batch=replace(config.batch, micro_batch_size=micro))
            return design_run(config, self.custom, absent_ok=True).plan.memory.total_bytes

        micro = choose_micro_batch(size // replicas, lambda micro: needs(micro) <= allowed)
        if micro == size // replicas:
            return work
        return work._with("for the device's memory", f"micro batch {micro} (memory)", micro_batch_size=micro)

    def _precision(self, devices: Visible) -> "_Choices":
        config = self.resolved.config
        # Who asks for float16 has to choose the precision as well: it needs a loss scale to train.
        if not config.run.training or not self.is_open("precision") or config.numerics.half_type != "bfloat16":
            return self
        precision, why = choose_precision(devices.platform, bfloat16=devices.bfloat16)
        if precision == config.numerics.precision and not self.is_open(*BATCH):
            return self  # nothing new to say
        return self._with(f"for a {why}", f"precision {precision} ({why})", precision=precision)

    def optimizer(self) -> "_Choices":
        """Choose momentum and the curve of the rate, where the rate is chosen, too.

        Who gives a rate, and no recipe, asks for plain SGD at that rate.
        """
        if not self.is_open(*RATE):
            return self
        work = self
        if self.is_open(*OPTIMIZER):
            params = {"momentum": USUAL_MOMENTUM, "nesterov": True}
            work = work._with("with the learning rate", f"SGD with momentum {USUAL_MOMENTUM}", optimizer_params=params)
        if self.is_open("lr_schedule"):
            work = work._with("with the learning rate", "cosine schedule", lr_schedule="cosine")
        return work

    def rate(self, info: DataInfo) -> "_Choices":
        """Choose the peak learning rate, for the batch and, from scratch, for the number of steps."""
        if not self.is_open(*RATE):
            return self
        config = self.resolved.config
        learning, size = config.learning, make_batch_plan(config.batch).global_batch_size
        rate = choose_rate(learning.optimizer, learning.optimizer_params.get("momentum"), size)
        why = f"for a batch of {size:,}"
        if not self.fine_tuning:
            least = choose_short_rate(rate, steps := self._num_steps(info))
            why += f" and {steps:,} steps" if least < rate else ""
            return self._with(why, f"learning rate {least:g}", learning_rate=least)
        if not self.is_open(*TRAINED_PARTS):
            return self._with(why, f"learning rate {rate:g}", learning_rate=rate)
        why, less = f"{why}, from trained weights", float(f"{FINE_TUNING * rate:.2g}")
        if self.custom.network is not None:  # it may be a single function, without a head to tell apart
            return self._with(why, f"learning rate {less:g}", learning_rate=less)
        said = f"learning rate {rate:g} for the last layer and {less:g} for the others (trained weights)"
        return self._with(why, said, learning_rate=rate, layer_lr={BACKBONE: FINE_TUNING})

    def epochs(self, info: DataInfo) -> "_Choices":
        """Choose the number of epochs, for the size of the dataset."""
        if not self.is_open("num_epochs"):
            return self
        steps, epochs = self._steps_per_epoch(info), self._num_epochs(info)
        return self._with(f"for {steps:,} steps each", f"{epochs:g} epochs", num_epochs=epochs)

    def _steps_per_epoch(self, info: DataInfo) -> int:
        batch = self.resolved.config.batch
        whole = info.num_train // make_batch_plan(batch).global_batch_size
        return max(1, whole if batch.weight_updates_per_epoch == -1 else batch.weight_updates_per_epoch)

    def _num_epochs(self, info: DataInfo) -> float:
        if not self.is_open("num_epochs"):
            return self.resolved.config.batch.num_epochs
        return choose_epochs(self._steps_per_epoch(info), fine_tuning=self.fine_tuning)

    def _num_steps(self, info: DataInfo) -> int:
        return max(1, round(self._num_epochs(info) * self._steps_per_epoch(info)))

    def warmup(self) -> "_Choices":
        """Choose the warm-up, unless a rate was given that stays constant."""
        given_constant = self.is_open("lr_schedule")  # otherwise it was chosen, with the rate
        if not self.is_open(*WARMUP) or given_constant:
            return self
        epochs = choose_warmup(self.resolved.config.batch.num_epochs)
        return self._with("a tenth of the run", f"warm-up {epochs:g} epochs", warmup_epochs=epochs)

    def statistics(self, info: DataInfo) -> "_Choices":
        """Choose how fast batch norm's running statistics move, for the length of the run.

        Not for a network given by code, which may have its own.
        """
        config, steps = self.resolved.config, self._num_steps(info)
        keep = choose_statistics_momentum(steps)
        if not self.is_open("bn_momentum") or keep == config.model.bn_momentum or self.custom.network is not None:
            return self
        if norm_choice(config.model)["name"] not in ("batch_norm", "custom_batch_norm"):
            return self
        return self._with(f"for {steps:,} steps", f"bn-momentum {keep:g}", bn_momentum=keep)
