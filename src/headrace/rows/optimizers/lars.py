"""LARS: SGD whose rate is scaled for each tensor by the ratio of its norm to its gradient's."""

from headrace.rows.optimizers.sgd import MOMENTUM_KEY
from headrace.rows.optimizers.slots import moved, zeros
from headrace.rows.row import OptimizerRow, Options, PyTree, Rule
from headrace.rows.values import Key, Keys, above, at_least

EXCLUDED = ("beta", "gamma", "bias")  # endings of names: plain learning rate, no LARS weight decay
EPSILON = 1e-7  # in place of an epsilon of 0


def lars(options: Options) -> Rule:
    """v = m v + lr trust (g + wd w); w -= v. Excluded names: trust 1, no wd.

    trust = eeta |w| / (|g| + wd |w| + eps), or 1 where |w| or |g| is 0; |g| is the norm before the decay is added.
    """
    import jax
    import jax.numpy as jnp

    from headrace.core.tree import map_named

    momentum, decay = options["momentum"], options["weight_decay"]

    def trust(weight: jax.Array, grad: jax.Array) -> jax.Array:
        weight_norm, grad_norm = jnp.sqrt(jnp.sum(weight * weight)), jnp.sqrt(jnp.sum(grad * grad))
        ratio = options["eeta"] * weight_norm / (grad_norm + decay * weight_norm + (options["epsilon"] or EPSILON))
        return jnp.where((weight_norm > 0) & (grad_norm > 0), ratio, 1.0)

    def init(params: PyTree) -> PyTree:
        return {"velocity": zeros(params)}

    def update(grads: PyTree, slots: PyTree, params: PyTree, rate: jax.Array) -> tuple[PyTree, PyTree]:
        def scaled(name: str, grad: jax.Array, weight: jax.Array) -> jax.Array:
            if name.endswith(EXCLUDED):
                return rate * grad
            return rate * trust(weight, grad) * (grad + decay * weight)

        steps = map_named(scaled, grads, params)
        velocity = moved(momentum, slots["velocity"], steps)
        return jax.tree.map(jnp.negative, velocity), {"velocity": velocity}

    return Rule(init, update)


LARS = OptimizerRow(
    name="lars",
    says="SGD whose rate follows the norms of each tensor, for very large batches",
    keys=Keys(
        params=(
            MOMENTUM_KEY,
            Key(name="weight_decay", check=at_least(0)),
            Key(name="eeta", check=above(0)),
            Key(name="epsilon", check=at_least(0)),
        )
    ),
    rule=lars,
    slots=lambda options: 1,
    usual_rate=8.0,
    scope="tensor",
)
