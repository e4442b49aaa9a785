"""How long a run will take: roughly before it starts, and from measured steps after its first calls."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.config.load import Resolved, override
from headrace.core.errors import HeadraceError
from headrace.core.process import num_processors
from headrace.core.units import format_duration
from headrace.plan.duration import PASSES, Duration, expected_duration, speed_of
from headrace.plan.steps import StepPlan
from headrace.run.design import Design, design_run

WORTH_SAYING = 60.0  # seconds; what is over sooner needs no forecast
LONG_ON_CPU = 600.0  # seconds after which a person at a CPU is told what would be quicker
# What is offered in its place, the most capable first.
QUICKER: tuple[Mapping[str, object], ...] = (
    {"image_size": 128},
    {"image_size": 96},
    {"model_name": "resnet18", "image_size": 128},
    {"model_name": "resnet18", "image_size": 96},
    {"model_name": "resnet18", "image_size": 64},
)


def expected_time(design: Design, platform: str, device: str) -> Duration | None:
    """Return the rough duration of a run on such devices; None where none like them was measured."""
    speed = speed_of(platform, device)
    if speed is None:
        return None
    precision = design.config.numerics.precision
    processors = num_processors() if platform == "cpu" else 0
    return expected_duration(
        design.plan, design.network, design.sizes, speed, precision=precision, processors=processors
    )


def describe_expected(expected: Duration) -> str:
    """Say what an expected duration consists of."""
    parts = []
    if expected.num_steps:
        parts.append(f"{expected.num_steps:,} steps of {format_duration(expected.step_seconds)}")
    if expected.num_validations and expected.validation_seconds:
        several = "s" * (expected.num_validations != 1)
        seconds = format_duration(expected.validation_seconds)
        parts.append(f"{expected.num_validations:,} validation{several} of {seconds}")
    return f"about {format_duration(expected.seconds)}: {', '.join(parts)}"


def say_expected(resolved: Resolved, design: Design, platform: str, device: str) -> tuple[str, ...]:
    """Return what people should know before a long run starts; nothing of a short one."""
    expected = expected_time(design, platform, device)
    if expected is None or expected.seconds < WORTH_SAYING:
        return ()
    said = (f"expected time, roughly: {describe_expected(expected)}",)
    if platform != "cpu" or expected.seconds < LONG_ON_CPU or not design.config.run.training:
        return said
    return (*said, _offer(resolved, design))


def _offer(resolved: Resolved, design: Design) -> str:
    """Name options with which the run takes minutes on this CPU."""
    quicker = next(filter(None, (_in_minutes(resolved, design, options) for options in QUICKER)), None)
    if quicker is None:
        return "on a CPU that is long; fewer --epochs, a smaller --image-size or another --model are quicker"
    options, seconds = quicker
    written = " ".join(f"--{name.replace('_name', '').replace('_', '-')} {value}" for name, value in options.items())
    return f"on a CPU that is long; {written} takes about {format_duration(seconds)}"


def _in_minutes(
    resolved: Resolved, design: Design, options: Mapping[str, object]
) -> tuple[Mapping[str, object], float] | None:
    """Return the options and their expected seconds, if they are few, and the options can be given to this run."""
    # Weights and networks of code are of one network.
    if (
        design.custom.parts
        or design.custom.weights is not None
        or ("model_name" in options and resolved.config.weights.weights)
    ):
        return None
    if min(design.network.input_hwc[:2]) <= int(str(options["image_size"])):
        return None
    try:
        changed = design_run(override(resolved, options).config, absent_ok=True)
    except HeadraceError:
        return None
    expected = expected_time(changed, "cpu", "")
    return (options, expected.seconds) if expected and expected.seconds < LONG_ON_CPU else None


@dataclass
class Forecast:
    """Says once, after the first calls of a process, how long the rest of its run takes."""

    steps: StepPlan
    images_per_step: int
    num_validation_images: int
    said: bool = False

    def after(self, step: int, step_seconds: float | None, timed_seconds: float, timed_steps: int) -> str:
        """Return the sentence once enough was measured, the first time; else nothing."""
        if self.said or step_seconds is None or (timed_seconds < 2.0 and timed_steps < 50):
            return ""
        self.said = True
        every = self.steps.validate_every
        due = self.steps.num_events(every) - math.floor((step + 0.5) / every) if every else 0
        # Forward only, and nothing yet measured.
        validating = self.num_validation_images * step_seconds / self.images_per_step / PASSES
        expected = Duration(
            step_seconds=step_seconds,
            num_steps=self.steps.total_steps - step,
            validation_seconds=validating,
            num_validations=due,
        )
        if expected.seconds < WORTH_SAYING:
            return ""
        return f"time left: {describe_expected(expected)}"
