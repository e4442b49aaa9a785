"""The learning-rate curves, by name.

A curve is a pure function of the step: no state, so nothing to restore. Whole numbers stay whole (floor, shift,
comparison) until the last division, because float32 counts exactly only up to 2^24. `initial_learning_rate` is per
sample and is multiplied by the global batch; `absolute_learning_rate` and the `values` of `stepped` are not.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from headrace.core.errors import ConfigError
from headrace.rows.row import Curve, CurveRow, Options, Span
from headrace.rows.values import Key, Keys, Kind, above, at_least, between, read_float

if TYPE_CHECKING:
    import jax


def _read_numbers(raw: object) -> list[float]:
    if isinstance(raw, dict):
        raise ValueError
    return [read_float(item) for item in (raw if isinstance(raw, list | tuple) else [raw])]


NUMBERS = Kind(description="a list of numbers", metavar="LIST", read=_read_numbers)


def rising(value: Sequence[float]) -> str:
    """Limit a list to rising numbers that are not negative."""
    ordered = all(low < high for low, high in itertools.pairwise(value))
    return "" if ordered and all(item >= 0 for item in value) else "must rise, and not be negative"


def shares(value: Sequence[float]) -> str:
    """Limit a list to rising fractions of the run."""
    return rising(value) or ("" if all(item <= 1 for item in value) else "must be fractions of the run, from 0 to 1")


RATE = (  # the first rate: for one image, to be multiplied by the global batch size, or as it is
    Key(name="initial_learning_rate", check=at_least(0)),
    Key(name="absolute_learning_rate", check=at_least(0)),
)
DECAY_EPOCHS = Key(name="epochs_to_total_decay", default=None, check=above(0))


def _const(params: Options, span: Span) -> Curve:
    import jax.numpy as jnp

    rate = span.initial(params)
    return lambda step: jnp.full_like(step, rate, dtype=jnp.float32)


def _falling(left: "jax.Array") -> "jax.Array":
    """Return the cosine from 0 (nothing left) to 1: sin^2(pi/2 x) = (1 - cos(pi x)) / 2, without its cancellation."""
    import jax.numpy as jnp

    return jnp.square(jnp.sin(0.5 * math.pi * left))


def _cosine(params: Options, span: Span) -> Curve:
    import jax
    import jax.numpy as jnp

    rate = span.initial(params)
    last = max(span.steps(params["epochs_to_total_decay"]), 1)

    def curve(step: jax.Array) -> jax.Array:
        left = (last - jnp.minimum(step, last)).astype(jnp.float32) / last
        return rate * _falling(left)

    return curve


def _flat_cosine(params: Options, span: Span) -> Curve:
    import jax
    import jax.numpy as jnp

    rate = span.initial(params)
    last = max(span.steps(params["epochs_to_total_decay"]), 1)
    first = min(math.floor(round(params["flat"] * last, 6)), last - 1)

    def curve(step: jax.Array) -> jax.Array:
        left = (last - jnp.clip(step, first, last)).astype(jnp.float32) / (last - first)
        return rate * _falling(left)

    return curve


def _one_cycle(params: Options, span: Span) -> Curve:
    import jax
    import jax.numpy as jnp

    rate = span.initial(params)
    last = max(span.steps(params["epochs_to_total_decay"]), 1)
    top = min(math.floor(round(params["rise"] * last, 6)), last - 1)
    start, end = params["start_ratio"], params["end_ratio"]

    def curve(step: jax.Array) -> jax.Array:
        risen = jnp.minimum(step, top).astype(jnp.float32) / max(top, 1) if top else jnp.ones(step.shape, jnp.float32)
        left = (last - jnp.clip(step, top, last)).astype(jnp.float32) / (last - top)
        rising_part = start + (1 - start) * _falling(risen)
        falling_part = end + (1 - end) * _falling(left)
        return rate * jnp.where(step < top, rising_part, falling_part)

    return curve


def _stepped(params: Options, span: Span) -> Curve:
    import jax
    import jax.numpy as jnp

    boundaries = [span.steps(epoch) for epoch in params["boundaries"]]
    values = [float(value) for value in params["values"]]

    def curve(step: jax.Array) -> jax.Array:
        rate = jnp.full_like(step, values[0], dtype=jnp.float32)
        for boundary, value in zip(boundaries, values[1:], strict=True):
            # At the boundary itself the earlier value still holds, as in Keras' piecewise constant decay.
            rate = jnp.where(step > boundary, jnp.float32(value), rate)
        return rate

    return curve


def _check_stepped(params: Options) -> None:
    num_values, num_boundaries = len(params["values"]), len(params["boundaries"])
    if num_values != num_boundaries + 1:
        raise ConfigError(
            f"lr_schedule_params has {num_values} values for {num_boundaries} boundaries.",
            rule="A stepped curve has one value more than it has boundaries: the first holds up to the first boundary.",
            remedy=f"Give {num_boundaries + 1} values.",
        )


def _drops(params: Options, span: Span) -> Curve:
    """Fall by a factor at shares of the run: stepped, as the reference's first application has it."""
    rate, factor = span.initial(params), params["factor"]
    boundaries = [share * span.num_epochs for share in params["drops"]]
    values = [rate * factor**drop for drop in range(len(boundaries) + 1)]
    return _stepped({"boundaries": boundaries, "values": values}, span)


def _polynomial(params: Options, span: Span) -> Curve:
    import jax
    import jax.numpy as jnp

    rate, power = span.initial(params), params["power"]
    end = params["end_learning_rate_ratio"] * rate
    last = max(float(params["epochs_to_total_decay"] * span.updates_per_epoch), 1.0)

    def curve(step: jax.Array) -> jax.Array:
        left = (last - jnp.minimum(step.astype(jnp.float32), last)) / last
        return (rate - end) * jnp.power(left, power) + end

    return curve


def _linear(params: Options, span: Span) -> Curve:
    return _polynomial({**params, "power": 1.0}, span)


def _exponential(params: Options, span: Span) -> Curve:
    import jax
    import jax.numpy as jnp

    rate, log_decay = span.initial(params), math.log(params["decay_rate"])
    # A drop every n/d steps (d small enough for int32), counted in integers: exact to the step, without drift.
    period = max(params["epochs_per_drop"] * span.updates_per_epoch, 1.0)
    n, d = Fraction(period).limit_denominator(max(1, min(100, math.isqrt(int(2**30 / period))))).as_integer_ratio()

    def curve(step: jax.Array) -> jax.Array:
        # In this order, because step * d would leave the range of int32 in a long run.
        num_drops = step // n * d + step % n * d // n
        return rate * jnp.exp(log_decay * num_drops.astype(jnp.float32))

    return curve


CURVES: Mapping[str, CurveRow] = {
    row.name: row
    for row in (
        CurveRow(name="const", says="the same rate at every step", keys=Keys(params=(), one_of=RATE), curve=_const),
        CurveRow(
            name="cosine", says="half a cosine to 0", keys=Keys(params=(DECAY_EPOCHS,), one_of=RATE), curve=_cosine
        ),
        CurveRow(
            name="flat_cosine",
            says="the peak for a share of the run, then half a cosine to 0",
            keys=Keys(params=(Key(name="flat", default=0.72, check=between(0, 1)), DECAY_EPOCHS), one_of=RATE),
            curve=_flat_cosine,
        ),
        CurveRow(
            name="one_cycle",
            says="half a cosine up to the peak, half a cosine down to almost 0",
            keys=Keys(
                params=(
                    Key(name="rise", default=0.25, check=between(0, 1)),
                    Key(name="start_ratio", default=0.04, check=between(0, 1)),
                    Key(name="end_ratio", default=1e-5, check=between(0, 1)),
                    DECAY_EPOCHS,
                ),
                one_of=RATE,
            ),
            curve=_one_cycle,
        ),
        CurveRow(
            name="stepped",
            says="given values between given epochs",
            keys=Keys(params=(Key(name="boundaries", kind=NUMBERS, check=rising), Key(name="values", kind=NUMBERS))),
            curve=_stepped,
            check=_check_stepped,
        ),
        CurveRow(
            name="drops",
            says="falls by a factor at shares of the run",
            keys=Keys(
                params=(
                    Key(name="drops", kind=NUMBERS, check=shares),
                    Key(name="factor", default=0.1, check=above(0)),
                ),
                one_of=RATE,
            ),
            curve=_drops,
        ),
        CurveRow(
            name="polynomial",
            says="a power of what is left of the run; 1 is a straight line",
            keys=Keys(
                params=(
                    DECAY_EPOCHS,
                    Key(name="end_learning_rate_ratio", check=at_least(0)),
                    Key(name="power", check=above(0)),
                ),
                one_of=RATE,
            ),
            curve=_polynomial,
        ),
        CurveRow(
            name="linear",
            says="a straight line from the rate to 0",
            keys=Keys(
                params=(DECAY_EPOCHS, Key(name="end_learning_rate_ratio", default=0.0, check=at_least(0))), one_of=RATE
            ),
            curve=_linear,
        ),
        CurveRow(
            name="exponential",
            says="falls by a factor every few epochs",
            keys=Keys(
                params=(
                    Key(name="decay_rate", default=0.97, check=above(0)),
                    Key(name="epochs_per_drop", default=2.4, check=above(0)),
                ),
                one_of=RATE,
            ),
            curve=_exponential,
        ),
    )
}
