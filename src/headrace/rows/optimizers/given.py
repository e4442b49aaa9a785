"""An optimizer that code gives: a transformation of optax's kind, as a function of the learning rate."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.core.errors import ConfigError
from headrace.rows.row import OptimizerRow, Options, PyTree, Rule
from headrace.rows.values import Keys

if TYPE_CHECKING:
    import jax

# rate -> a transformation: init(params) -> state; update(grads, state, params) -> (updates, state)
OptimizerFunction = Callable[["jax.Array"], Any]


def given_rule(function: OptimizerFunction) -> Rule:
    """Return the rule of an optimizer that code gives; its slots are the leaves of its state, by their numbers."""
    import jax
    import jax.numpy as jnp

    def named(state: PyTree) -> dict[str, Any]:
        return {f"{number:03}": jnp.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(state))}

    def init(params: PyTree) -> PyTree:
        return named(function(jnp.zeros((), jnp.float32)).init(params))

    def update(grads: PyTree, slots: PyTree, params: PyTree, rate: "jax.Array") -> tuple[PyTree, PyTree]:
        transformation = function(rate)
        structure = jax.tree.structure(jax.eval_shape(transformation.init, params))
        state = jax.tree.unflatten(structure, [slots[name] for name in sorted(slots)])
        updates, state = transformation.update(grads, state, params)
        return updates, named(state)

    return Rule(init, update)


def _without_function(options: Options) -> Rule:
    raise ConfigError(
        "The optimizer is `given`, but no code gives it.",
        rule="One of your own is a function of the learning rate: fit(optimizer=lambda rate: optax.adam(rate)).",
        remedy="Choose an optimizer by its name, or train from Python.",
    )


GIVEN = OptimizerRow(
    name="given",
    says="one that code gives, such as fit(optimizer=lambda rate: optax.adam(rate))",
    keys=Keys(params=()),
    rule=_without_function,
    slots=lambda options: 2,  # as most have: the plan does not see the function
    usual_rate=0.001,  # never used: the rate has to be given, and a resumed run has its own
    scope="all",
)
