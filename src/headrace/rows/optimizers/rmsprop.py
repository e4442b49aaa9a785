"""RMSprop in TensorFlow's form."""

import math

from headrace.core.errors import ConfigError
from headrace.rows.optimizers.sgd import MOMENTUM_KEY
from headrace.rows.optimizers.slots import moved, zeros
from headrace.rows.row import OptimizerRow, Options, PyTree, Rule
from headrace.rows.values import Key, Keys, at_least, fraction


def rho_of(options: Options) -> float:
    """Return the decay of the mean square: `decay`, or 1 - 2^base_decay_exponent x global batch."""
    if "decay" in options:
        return options["decay"]
    exponent, batch = options["base_decay_exponent"], options["global_batch_size"]
    rho = 1.0 - 2.0**exponent * batch
    if rho < 0:  # mean squares would become negative, and their roots not a number
        raise ConfigError(
            f"base_decay_exponent {exponent:g} with a global batch of {batch:,} is a decay of {rho:g}.",
            rule="The decay of the mean square, 1 - 2^base_decay_exponent x global batch, is not negative.",
            remedy=f"For a decay of about 0.9 use {math.floor(-math.log2(batch)) - 3}, or give decay itself.",
        )
    return rho


def rmsprop(options: Options) -> Rule:
    """ms = rho ms + (1 - rho) g^2; v = m v + lr g / sqrt(ms + eps); w -= v."""
    import jax
    import jax.numpy as jnp

    rho, epsilon, momentum = rho_of(options), options["epsilon"], options["momentum"]
    first = options["initial_accumulator"]

    def init(params: PyTree) -> PyTree:
        slots = {"mean_square": zeros(params, first)}
        return slots | {"velocity": zeros(params)} if momentum else slots

    def update(grads: PyTree, slots: PyTree, params: PyTree, rate: jax.Array) -> tuple[PyTree, PyTree]:
        del params
        squares = jax.tree.map(lambda s, g: rho * s + (1.0 - rho) * g * g, slots["mean_square"], grads)
        # With the epsilon inside the root, as TensorFlow has it; PyTorch adds it outside, which differs where
        # gradients are small.
        steps = jax.tree.map(lambda s, g: rate * g * jax.lax.rsqrt(s + epsilon), squares, grads)
        new_slots = {"mean_square": squares}
        if momentum:
            steps = moved(momentum, slots["velocity"], steps)
            new_slots["velocity"] = steps
        return jax.tree.map(jnp.negative, steps), new_slots

    return Rule(init, update)


RMSPROP = OptimizerRow(
    name="rmsprop",
    says="gradients divided by a running root mean square; EfficientNet's recipe",
    keys=Keys(
        # initial_accumulator: initial value of the mean square; TensorFlow 1 used 1
        params=(
            MOMENTUM_KEY,
            Key(name="epsilon", check=at_least(0)),
            Key(name="initial_accumulator", default=0.0, check=at_least(0)),
        ),
        one_of=(Key(name="base_decay_exponent"), Key(name="decay", check=fraction)),
    ),
    rule=rmsprop,
    slots=lambda options: 2 if options.get("momentum") else 1,
    usual_rate=0.002,
    scope="element",
)
