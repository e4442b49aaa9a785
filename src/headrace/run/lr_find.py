"""Find a learning rate: a short run whose rate grows exponentially, until the loss rises."""

from contextlib import closing
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from headrace.config.checks import check_start
from headrace.config.field import CHOSEN
from headrace.config.load import Resolved
from headrace.core.errors import ConfigError, RunStopped
from headrace.engine.devices import start_run_devices
from headrace.engine.lr_curve import RunCurve
from headrace.engine.optimizer import make_optimizer
from headrace.job import current_group
from headrace.run.benchmarks import given_weights, with_calls
from headrace.run.choices import with_choices, with_drawn
from headrace.run.design import NOTHING, CustomParts, Design, design_run, open_data, starting_state, with_set
from headrace.run.start_weights import whitened_weights
from headrace.run.training import Calls, open_feed

_CALL_STEPS = 10  # steps between two looks at the loss
_SMOOTHING = 0.9  # share of the past in the smoothed loss
_RISEN = 3.0  # a smoothed loss of so many times the lowest ends the run
_SAME = 3.0  # rates within this factor of each other are as good
_LEAST = 10  # steps of a search
_FALLING = 3  # steps, at least, over which the loss falls


@dataclass(frozen=True, kw_only=True, repr=False)
class FoundRates:
    """The rate and the smoothed loss of each step, and the rate that `suggest` takes from them."""

    rates: np.ndarray
    losses: np.ndarray
    suggested: float
    peak: float | None = None  # of a run with the same options; None where its curve has several
    was_chosen: bool = False  # whether nobody gave that

    def compared(self) -> str:
        """Say how the suggestion and the rate of a run differ, and what follows."""
        if self.peak is None or self.peak <= 0:
            return ""
        ratio = self.suggested / self.peak
        what = f"{self.peak:.2g}, {'chosen' if self.was_chosen else 'given'}"
        if 1 / _SAME < ratio < _SAME:
            return f"{what}: within a factor of {_SAME:g} of the suggestion; either will do"
        if ratio > 1:
            return (
                f"{what}: {ratio:.2g} times lower. The search sees how fast the loss falls in {len(self.rates)} steps; "
                "over a whole run, as the rate falls, lower peaks often end better. Try both for a few epochs"
            )
        risen = "rises from" if self.rates[-1] > self.lowest_at else "is lowest at"
        return (
            f"{what}: {1 / ratio:.2g} times higher. In the search the loss {risen} {self.lowest_at:.2g}; a warm-up may "
            "carry a run beyond that. If its loss rises at first, take the suggestion"
        )

    @property
    def lowest_at(self) -> float:
        """The rate at which the smoothed loss was lowest."""
        start = len(self.losses) // 10
        return float(self.rates[start + int(np.argmin(self.losses[start:]))])

    def __repr__(self) -> str:
        return f"FoundRates({len(self.rates)} steps from {self.rates[0]:.2g} to {self.rates[-1]:.2g}, " + (
            f"suggested {self.suggested:.2g})"
        )


def find_learning_rate(
    resolved: Resolved,
    custom: CustomParts = NOTHING,
    *,
    num_steps: int = 100,
    lowest: float = 1e-5,
    highest: float = 10.0,
) -> FoundRates:
    """Train up to `num_steps` steps with rates from `lowest` to `highest`; return the curve and a suggestion."""
    if num_steps < _LEAST or not 0 < lowest < highest:
        raise ConfigError(
            f"{num_steps} steps from {lowest:g} to {highest:g}.",
            rule=f"There are at least {_LEAST} steps, and the rate grows from above 0.",
        )
    if not current_group().is_alone:
        raise ConfigError("A learning rate is searched by one process.", remedy="Start it without a launcher.")
    check_start(resolved, has_weights=custom.weights is not None)
    custom = with_set(resolved.config, custom, absent_ok=True)
    settled = with_choices(with_drawn(resolved), custom)
    config, planned = settled.config, design_run(settled.config, custom)
    design = _with_growing_rate(planned, num_steps, lowest, highest)
    # As many steps as asked for, also where the planned epochs have fewer.
    design = with_calls(design, _CALL_STEPS, -(-num_steps // _CALL_STEPS))
    config, plan = design.config, design.plan
    dataset = open_data(design)
    weights = given_weights(design) or whitened_weights(design, dataset, design.network.init(config.run.seed))
    devices = start_run_devices(config.run, plan.num_devices)
    calls = Calls(design, plan.feed, dataset, devices, 0)
    state = calls.executor.place(starting_state(design, weights))
    losses: list[float] = []
    with closing(open_feed(design, dataset, plan.feed, calls.executor, 0)) as feed:
        calls.compile(state, feed)
        block = feed.next()
        while True:
            state, metrics = calls.at(0)(state, feed.resident, block, rows := feed.rows)
            host = jax.device_get({name: metrics[name][rows.start : rows.stop] for name in ("loss", "count")})
            losses += (host["loss"] / host["count"]).tolist()
            smooth = smoothed(np.array(losses))
            # A loss that has risen threefold, or is not finite, does not come back.
            if len(losses) >= num_steps or len(smooth) < len(losses) or _has_risen(smooth):
                break
            block = feed.next(metrics["loss"])
    found = suggest(growing_rates(num_steps, lowest, highest), smooth[:num_steps])
    was_chosen = settled.origin("learning_rate").kind == CHOSEN
    return replace(found, peak=_peak(planned), was_chosen=was_chosen)


def _peak(design: Design) -> float | None:
    """Return the rate that a run's curve begins with or rises to; None where its values are given one by one."""
    curve = design.lr_curve
    params = dict(curve.params) if isinstance(curve, RunCurve) else {}
    names = ("initial_learning_rate", "absolute_learning_rate")
    return curve.span.initial(params) if isinstance(curve, RunCurve) and any(n in params for n in names) else None


def growing_rates(num_steps: int, lowest: float, highest: float) -> np.ndarray:
    """Return the rate of each step: from the lowest to the highest in equal ratios."""
    return lowest * (highest / lowest) ** (np.arange(num_steps) / (num_steps - 1))


def smoothed(losses: np.ndarray) -> np.ndarray:
    """Return the exponential moving average, corrected for its start; it ends before the first loss not finite."""
    bad = np.flatnonzero(~np.isfinite(losses))
    losses = losses[: bad[0]] if len(bad) else losses
    averages, average = np.empty(len(losses)), 0.0
    for step, loss in enumerate(losses):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        # The average starts at 0; without the correction the first losses would look far too low, and the curve would
        # only rise.
        averages[step] = average / (1 - _SMOOTHING ** (step + 1))
    return averages


def suggest(rates: np.ndarray, losses: np.ndarray) -> FoundRates:
    """Return the curve, and the rate between the two where the smoothed loss is half-way down and where it is lowest.

    Half-way down is about where a smooth curve falls fastest; a slope between single steps would find noise. That rate
    alone is too low: a ResNet-8 reached 69 % with it on 245 photographs, 75 % with this one (15 epochs, two seeds).
    """
    rates = rates[: len(losses)]
    start = len(losses) // 10  # the first steps are noise: the average has few losses yet
    lowest = start + int(np.argmin(losses[start:])) if len(losses) else 0
    if lowest - start < _FALLING:
        raise RunStopped(
            "The loss did not fall for any rate.",
            remedy="Search from a lower rate, or with more steps; check the data with headrace data verify.",
        )
    # A loss that explodes says nothing more, and would leave a flat line of the rest in a plot.
    exploded = np.flatnonzero(losses[lowest:] > _RISEN * losses[lowest])
    end = lowest + int(exploded[0]) if len(exploded) else len(losses)
    rates, losses = rates[:end], losses[:end]
    half = (losses[start] + losses[lowest]) / 2
    above = np.flatnonzero(losses[: lowest + 1] > half)  # the last of them is followed by the half that stays below
    suggested = np.sqrt(rates[above[-1] + 1] * rates[lowest])  # the middle on the plot, whose axis is logarithmic
    return FoundRates(rates=rates, losses=losses, suggested=float(suggested))


def _has_risen(losses: np.ndarray) -> bool:
    return len(losses) > _LEAST and bool(losses[-1] > _RISEN * losses.min())


def _with_growing_rate(design: Design, num_steps: int, lowest: float, highest: float) -> Design:
    """Return the design with a rate that depends on the step alone; the options' curve and warm-up are left out."""
    growth = np.log(highest / lowest) / (num_steps - 1)

    def curve(step: jax.typing.ArrayLike) -> jax.Array:
        return jnp.float32(lowest) * jnp.exp(jnp.asarray(step, jnp.float32) * jnp.float32(growth))

    batch = design.plan.batch.global_batch_size
    optimizer = make_optimizer(design.config.learning, curve, batch, design.trainable, design.custom.optimizer)
    return replace(design, optimizer=optimizer)
