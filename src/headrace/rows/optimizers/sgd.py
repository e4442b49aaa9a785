"""SGD, with the rate inside its momentum (Keras' form) or outside of it (TensorFlow 1's).

Not optax's: its momentum accumulates gradients and multiplies by the rate afterwards, which is another sequence than
Keras' as soon as the rate changes.
"""

from headrace.rows.optimizers.slots import moved, zeros
from headrace.rows.row import OptimizerRow, Options, PyTree, Rule
from headrace.rows.values import BOOL, Key, Keys, fraction

MOMENTUM_KEY = Key(name="momentum", check=fraction)


def sgd(options: Options) -> Rule:
    """v = m v - lr g; w += v, or with Nesterov w += m v - lr g."""
    import jax

    momentum, nesterov = options["momentum"], options["nesterov"]

    def init(params: PyTree) -> PyTree:
        return {"velocity": zeros(params)} if momentum else {}

    def update(grads: PyTree, slots: PyTree, params: PyTree, rate: jax.Array) -> tuple[PyTree, PyTree]:
        del params
        steps = jax.tree.map(lambda g: -rate * g, grads)
        if not momentum:
            return steps, slots
        velocity = moved(momentum, slots["velocity"], steps)
        if nesterov:
            return moved(momentum, velocity, steps), {"velocity": velocity}
        return velocity, {"velocity": velocity}

    return Rule(init, update)


def momentum(options: Options) -> Rule:
    """v = m v + g; w -= lr v (a change of the rate acts on the whole velocity at once)."""
    import jax

    kept = options["momentum"]

    def init(params: PyTree) -> PyTree:
        return {"velocity": zeros(params)}

    def update(grads: PyTree, slots: PyTree, params: PyTree, rate: jax.Array) -> tuple[PyTree, PyTree]:
        del params
        velocity = moved(kept, slots["velocity"], grads)
        return jax.tree.map(lambda v: -rate * v, velocity), {"velocity": velocity}

    return Rule(init, update)


SGD = OptimizerRow(
    name="sgd",
    says="stochastic gradient descent, with the learning rate inside its momentum",
    keys=Keys(params=(MOMENTUM_KEY, Key(name="nesterov", kind=BOOL, default=False))),
    rule=sgd,
    slots=lambda options: 1 if options.get("momentum") else 0,
    usual_rate=0.4,
    scope="element",
)
MOMENTUM = OptimizerRow(
    name="momentum",
    says="the same with the learning rate outside of the momentum",
    keys=Keys(params=(MOMENTUM_KEY,)),
    rule=momentum,
    slots=lambda options: 1,
    usual_rate=0.4,
    scope="element",
)
