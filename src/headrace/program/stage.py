"""The stages of a pipeline as users write them: a function with its weights; the loss and the optimizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from headrace.core.errors import ConfigError
from headrace.core.tree import PyTree
from headrace.engine.apply_blocks import KEPT
from headrace.plan.device_mapping import MAX_BRANCHES
from headrace.plan.schedule import Node, Work
from headrace.program.structure import host_arrays, name_of, structure_of


@dataclass(frozen=True)
class Stage:
    """A function with its weights: `apply(params, *inputs) -> outputs`, one value or a tuple.

    With `state` (values that change without being trained, such as running statistics) it is
    `apply(params, state, *inputs) -> (outputs, state)`. A stage without weights may be given as a plain function of its
    inputs. Stages with the same `params` object share their weights; Python numbers are never shared.
    """

    apply: Callable[..., Any]
    params: PyTree = None
    state: PyTree = None


@dataclass(frozen=True)
class OptimizerOutput:
    """What an optimizer function returns: an optax optimizer and the loss of a micro batch.

    With `arguments`, values of the run such as a learning rate that came through the stages, `optimizer` is a function
    of them that returns the optax optimizer: OptimizerOutput(optax.sgd, loss, arguments=(rate,)).

    The optimizer gets the weights and gradients of all stages together, on the first stage's device. With `apart` every
    stage's are updated by themselves, on its own device: for an optimizer that treats each tensor by itself, as SGD and
    Adam do, that is the same update without sending anything; clipping by a norm would clip each stage by its own.
    """

    optimizer: Any
    loss: Any
    arguments: tuple[Any, ...] = ()
    apart: bool = False


@dataclass(frozen=True)
class Function:
    """A stage's function with its weights as host arrays, in the one form that programs call."""

    name: str
    apply: Callable[..., Any]
    params: PyTree
    state: PyTree
    is_plain: bool  # a function of its inputs alone
    weights: int  # stages with the same number share their weights

    def call(
        self, params: PyTree, state: PyTree, args: Sequence[object], kwargs: dict[str, Any]
    ) -> tuple[tuple[PyTree, ...], Any]:
        """Return (outputs, new state)."""
        if self.is_plain:
            return as_tuple(self.apply(*args, **kwargs)), state
        if not self.has_state:
            return as_tuple(self.apply(params, *args, **kwargs)), state
        result = self.apply(params, state, *args, **kwargs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ConfigError(
                f"{self.name} has a state, but did not return a pair.",
                rule="A stage with a state returns (outputs, state).",
            )
        outputs, after = result
        if structure_of(after) != structure_of(state):
            raise ConfigError(
                f"{self.name} returns a state of ({structure_of(after)}), but it was given ({structure_of(state)}).",
                rule="A state keeps its shapes and types.",
            )
        return as_tuple(outputs), after

    def signature(self, args: Sequence[object]) -> tuple[PyTree, ...]:
        """Return all arguments of `apply` for these inputs."""
        return (*(() if self.is_plain else (self.params,)), *((self.state,) if self.has_state else ()), *args)

    @property
    def has_state(self) -> bool:
        return self.state is not None


def as_tuple(outputs: PyTree) -> tuple[PyTree, ...]:
    """Return a stage's outputs as a tuple: none, one or several."""
    if outputs is None:
        return ()
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def recomputation_checkpoint(values: PyTree) -> PyTree:
    """Mark values inside a stage that recomputation stores instead of computing them again; returns them unchanged."""
    return jax.tree.map(lambda value: checkpoint_name(value, KEPT), values)


def check_stages(stages: object) -> tuple[tuple[Stage, ...] | Stage, ...]:
    """Return the stages, concurrent ones as tuples; refuse what is not a list of functions."""
    if not isinstance(stages, list | tuple) or isinstance(stages, Stage):
        raise ConfigError(
            f"The stages are of type {type(stages).__name__}.",
            rule="They are a list of functions, or of Stage(function, params).",
        )
    if len(stages) < 2:
        raise ConfigError(
            f"The pipeline has {len(stages)} stage{'s' * (len(stages) != 1)}.",
            rule="A pipeline has at least two.",
            remedy="Cut the model, or use loops.repeat with accumulate_gradients.",
        )
    return tuple(_entry(number, entry) for number, entry in enumerate(stages))


def _entry(number: int, entry: object) -> tuple[Stage, ...] | Stage:
    if not isinstance(entry, list | tuple):
        return _stage(number, entry)
    if not 1 <= len(entry) <= MAX_BRANCHES:
        raise ConfigError(f"Stage {number} has {len(entry)} functions.", rule=f"It has 1 to {MAX_BRANCHES}.")
    if any(isinstance(inner, list | tuple) for inner in entry):
        raise ConfigError(
            f"Stage {number} holds a list in a list.",
            rule="Concurrent stages are one level deep.",
            remedy="Give a flat list of functions.",
        )
    return tuple(_stage(number, inner) for inner in entry)


def _stage(number: int, entry: Any) -> Stage:
    stage = entry if isinstance(entry, Stage) else Stage(entry)
    if not callable(stage.apply):
        raise ConfigError(
            f"Stage {number} is of type {type(stage.apply).__name__}.",
            rule="It is a function of its inputs, or Stage(function, params) with a function of params and inputs.",
        )
    return stage


def make_functions(stages: Sequence[tuple[Stage, ...] | Stage], work: Work) -> dict[Node, Function]:
    """Return the function of every node; refuse weights that cannot be shared."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in stages]
    pairs = [pair for nodes, entry in zip(work.stages, entries, strict=True) for pair in zip(nodes, entry, strict=True)]
    numbers: dict[int, int] = {}
    functions = {}
    for position, (node, stage) in enumerate(pairs):
        # Negative, so that it is the id of no object.
        number = numbers.setdefault(id(stage.params) if _can_be_shared(stage.params) else -1 - position, len(numbers))
        functions[node] = Function(
            name=f"Stage {node} ({name_of(stage.apply)})",
            apply=stage.apply,
            params=_weights(node, stage),
            state=None if stage.state is None else host_arrays(stage.state),
            is_plain=stage.params is None and stage.state is None,
            weights=number,
        )
    _check_sharing(pairs, functions, work)
    return functions


def _can_be_shared(params: PyTree) -> bool:
    """Return whether finding this object twice means something: Python uses one object for equal constants.

    That holds for numbers and tuples of numbers, but not for NumPy's scalars, although float64 is a float.
    """
    leaves = jax.tree.leaves(params)
    return any(_is_array(leaf) for leaf in leaves) or (bool(leaves) and not isinstance(params, int | float | tuple))


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray | np.generic | jax.Array)


def _weights(node: Node, stage: Stage) -> PyTree:
    weights = host_arrays(stage.params)
    for leaf in jax.tree.leaves(weights):
        if not jax.numpy.issubdtype(leaf.dtype, np.inexact):
            raise ConfigError(
                f"The params of stage {node} hold an array of {leaf.dtype}.",
                rule="Weights are trained, so they are floating-point numbers.",
                remedy="Put what is not trained into Stage(..., state=...).",
            )
    return weights


def _check_sharing(pairs: list[tuple[Node, Stage]], functions: dict[Node, Function], work: Work) -> None:
    owner: dict[int, Node] = {}  # params or array -> the first node that holds it
    for node, stage in pairs:
        arrays = [leaf for leaf in jax.tree.leaves(stage.params) if _is_array(leaf)]
        for held in (functions[node].weights, *map(id, arrays)):
            first = owner.setdefault(held, node)
            if first == node:
                continue
            if functions[first].weights != functions[node].weights:
                raise ConfigError(
                    f"Stages {first} and {node} hold the same array or NumPy scalar in different params.",
                    rule="Stages share all their weights or none.",
                    remedy="Give both the same params object, or copies.",
                )
            if first.stage == node.stage:
                raise ConfigError(
                    f"The functions {first} and {node} of one stage share weights.",
                    rule="Functions that run concurrently have separate weights.",
                    remedy="Give copies of the weights.",
                )
            if work.device_of[first] != work.device_of[node]:
                raise ConfigError(
                    f"Stages {first} and {node} share weights, but are on devices {work.device_of[first]} and "
                    f"{work.device_of[node]}.",
                    rule="Stages that share weights are on one device.",
                    remedy="Map both to the same device, or give copies of the weights.",
                )
