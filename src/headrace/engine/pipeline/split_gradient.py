"""A backward pass in two halves: the gradients of inputs, which others wait for, and later those of weights.

The pass is traced as a list of operations. What the gradients of the inputs need is the first half; it hands on the
values that the second half reads and that depend on the incoming gradients. All else that both need follows from what
the forward pass kept: where that are the results of convolutions, it is norms and activations, and computed in both.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from headrace.core.jax_private import run_equation
from headrace.core.tree import PyTree

# Calls that are taken apart, and where they have the operations that they call.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}
Name = Any  # of a value: a variable of JAX, or an object made for it
Values = dict[Name, Any]


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation, with the names of the values that it reads (or literals) and writes."""

    equation: core.JaxprEqn
    reads: list[Any]
    writes: list[Name]

    def run(self, values: Values) -> None:
        """Compute what it writes."""
        results = run_equation(self.equation, [value_of(each, values) for each in self.reads])
        values.update(zip(self.writes, results, strict=True))


def is_literal(read: Any) -> bool:
    return isinstance(read, core.Literal)


def value_of(read: Any, values: Values) -> Any:
    return read.val if is_literal(read) else values[read]


def names_of(reads: Sequence[Any]) -> list[Name]:
    return [each for each in reads if not is_literal(each)]


class SplitGradient:
    """A function of (kept, gradients) that returns (gradients of weights, gradients of inputs), in two halves.

    With `hands_all` the first half hands on all that the second one reads of it, for forward passes that are expensive
    to compute again.
    """

    def __init__(
        self,
        function: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
        kept: PyTree,
        gradients: PyTree,
        *,
        hands_all: bool = False,
    ) -> None:
        """Trace the function for values like these."""
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(kept, gradients)
        self._trees = jax.tree.structure(shapes[0]), jax.tree.structure(shapes[1])
        self._operations: list[Operation] = []
        self._constants: Values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self._inputs = list(closed.jaxpr.invars)
        names = {name: name for name in (*closed.jaxpr.constvars, *self._inputs)}
        outputs = self._take_apart(closed.jaxpr, names)
        count = self._trees[0].num_leaves
        self._of_weights, self._of_inputs = outputs[:count], outputs[count:]

        depends = set(self._inputs[len(jax.tree.leaves(kept)) :])
        for each in self._operations:
            if depends.intersection(names_of(each.reads)):
                depends.update(each.writes)
        self._first = self._needed(self._of_inputs)
        made = {name for each in self._first for name in each.writes}
        handed = made if hands_all else made & depends
        self._second = self._needed(self._of_weights, handed)
        read = [name for each in self._second for name in names_of(each.reads)] + names_of(self._of_weights)
        self._handed = [name for name in dict.fromkeys(read) if name in handed]

    def of_inputs(self, kept: PyTree, gradients: PyTree) -> tuple[PyTree, list[Any]]:
        """Return the gradients of the inputs, and what the other half needs."""
        values = self._run(self._first, kept, gradients)
        found = [value_of(each, values) for each in self._of_inputs]
        return jax.tree.unflatten(self._trees[1], found), [values[name] for name in self._handed]

    def of_weights(self, kept: PyTree, gradients: PyTree, handed: Sequence[Any]) -> PyTree:
        """Return the gradients of the weights."""
        values = self._run(self._second, kept, gradients, dict(zip(self._handed, handed, strict=True)))
        return jax.tree.unflatten(self._trees[0], [value_of(each, values) for each in self._of_weights])

    def _take_apart(self, jaxpr: core.Jaxpr, names: dict[Any, Any]) -> list[Any]:
        """List the operations, those of calls in their place, and return what the results are named.

        `names` says how the variables of this list are named among all.
        """
        for equation in jaxpr.eqns:
            reads = [each if is_literal(each) else names[each] for each in equation.invars]
            called = equation.params.get(CALLS.get(equation.primitive.name, ""))
            if called is None:
                writes: list[Any] = [object() for _ in equation.outvars]
                self._operations.append(Operation(equation, reads, writes))
            else:
                body = getattr(called, "jaxpr", called)
                constants = {variable: object() for variable in body.constvars}
                self._constants |= dict(zip(constants.values(), getattr(called, "consts", ()), strict=True))
                writes = self._take_apart(body, dict(zip(body.invars, reads, strict=True)) | constants)
            names.update(zip(equation.outvars, writes, strict=True))
        return [each if is_literal(each) else names[each] for each in jaxpr.outvars]

    def _needed(self, outputs: Sequence[Any], given: Collection[Name] = ()) -> list[Operation]:
        """Return the operations that these values need beside what is given."""
        wanted, found = set(names_of(outputs)).difference(given), list[Operation]()
        for each in reversed(self._operations):
            if wanted.intersection(each.writes):
                found.append(each)
                wanted.update(name for name in names_of(each.reads) if name not in given)
        return found[::-1]

    def _run(
        self, operations: Sequence[Operation], kept: PyTree, gradients: PyTree, more: Values | None = None
    ) -> Values:
        inputs = zip(self._inputs, jax.tree.leaves((kept, gradients)), strict=True)
        values = self._constants | dict(inputs) | (more or {})
        for each in operations:
            each.run(values)
        return values
