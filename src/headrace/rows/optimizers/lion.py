"""Lion: the sign of an average of gradients."""

from headrace.rows.optimizers.slots import zeros
from headrace.rows.row import OptimizerRow, Options, PyTree, Rule
from headrace.rows.values import Key, Keys, fraction


def lion(options: Options) -> Rule:
    """w -= lr sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g."""
    import jax
    import jax.numpy as jnp

    beta1, beta2 = options["beta1"], options["beta2"]

    def init(params: PyTree) -> PyTree:
        return {"momentum": zeros(params)}

    def update(grads: PyTree, slots: PyTree, params: PyTree, rate: jax.Array) -> tuple[PyTree, PyTree]:
        del params
        mean = slots["momentum"]
        steps = jax.tree.map(lambda m, g: -rate * jnp.sign(beta1 * m + (1.0 - beta1) * g), mean, grads)
        return steps, {"momentum": jax.tree.map(lambda m, g: beta2 * m + (1.0 - beta2) * g, mean, grads)}

    return Rule(init, update)


LION = OptimizerRow(
    name="lion",
    says="the sign of an average of gradients: half of AdamW's memory, a tenth of its rate",
    keys=Keys(
        params=(
            Key(name="beta1", default=0.9, check=fraction),
            Key(name="beta2", default=0.99, check=fraction),
        )
    ),
    rule=lion,
    slots=lambda options: 1,
    usual_rate=2e-4,
    scope="element",
)
