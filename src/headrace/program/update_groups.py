"""Which weights an optimizer may update apart from each other: found by following its arithmetic, not its name.

Most optimizers treat every weight by itself, so each stage is updated where it is. One that looks at all gradients
together (clipping by the global norm, skipping a step that is not finite) must see them together.
"""

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

CALLS = ("jit", "pjit")  # operations that only call a function; of others every result is taken to need every input


def mixes(optimizer: Any, params: dict[int, Any], sums: dict[int, Any]) -> bool:
    """Tell whether the update of one entry of `params` depends on the gradients or weights of another."""
    try:
        state = jax.eval_shape(optimizer.init, params)
        closed, (updates, _) = jax.make_jaxpr(lambda g, s, p: _flat_last(optimizer.update(g, s, p)), return_shape=True)(
            sums, state, params
        )
    except Exception:
        return False  # it cannot take all weights at once, so it can only have been meant for those of one stage
    tags = [
        *(frozenset({key}) for key in sums for _ in jax.tree.leaves(sums[key])),
        *(frozenset() for _ in jax.tree.leaves(state)),
        *(frozenset({key}) for key in params for _ in jax.tree.leaves(params[key])),
    ]
    found = _follow(closed, tags)
    own = [key for key in sorted(updates) for _ in jax.tree.leaves(updates[key])]
    apart = all(tag <= {key} for tag, key in zip(found, own, strict=False))
    return not apart or any(len(tag) > 1 for tag in found)


def _flat_last(result: tuple[Any, Any]) -> tuple[Any, Any]:
    updates, state = result
    return updates, jax.tree.leaves(state)


def _follow(closed: ClosedJaxpr, tags: list[frozenset[int]]) -> list[frozenset[int]]:
    """Return, for each output, the tags of the inputs it depends on."""
    jaxpr = closed.jaxpr
    known: dict[Any, frozenset[int]] = dict(zip(jaxpr.invars, tags, strict=True))

    def tag_of(variable: Any) -> frozenset[int]:
        return frozenset() if isinstance(variable, Literal) else known.get(variable, frozenset())

    for equation in jaxpr.eqns:
        given = [tag_of(variable) for variable in equation.invars]
        inner = equation.params.get("jaxpr")
        if equation.primitive.name in CALLS and isinstance(inner, ClosedJaxpr):
            results = _follow(inner, given)
        else:
            together = frozenset().union(*given)
            results = [together] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=False))
    return [tag_of(variable) for variable in jaxpr.outvars]
