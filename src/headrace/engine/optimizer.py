"""The whole weight update as one optax transformation, the learning rate, and which weights are trained.

The order is: clip -> coupled L2 -> optimizer -> decoupled decay. LAMB's decay is inside the optimizer: its trust ratio
includes it.

`update(grads, state, params, step=..., rate=None, grad_norm=None)` returns float32 updates, to be added to the weights.
The learning rate is that of the curve at `step` where none is given; the state holds only the optimizer's slots:
float32 trees shaped as the parameters, under the names that checkpoints use.

SGD, LARS and RMSprop are not optax's: its momentum accumulates gradients and multiplies by the rate afterwards, which
is another sequence as soon as the rate changes.

A curve is a pure function of the step (a whole number, a traced scalar or an array of steps): no state, so nothing to
restore. Whole numbers stay whole (floor, shift, comparison) until the last division, because float32 counts exactly
only up to 2^24. `initial_learning_rate` is per sample and is multiplied by the global batch; `absolute_learning_rate`
and the `values` of `stepped` are not.
"""

import functools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from headrace.config.params import complete, complete_lr
from headrace.config.schema import Learning, Weights
from headrace.core.errors import ConfigError, did_you_mean
from headrace.core.tree import PyTree, map_named
from headrace.engine.devices import host_device

# The learning rate as a function of the step: six curves, two warm-ups, a staircase.


LrCurve = Callable[[jax.typing.ArrayLike], jax.Array]
Curve = Callable[[jax.Array], jax.Array]  # of int32 steps


@dataclass(frozen=True, kw_only=True)
class Span:
    """Converts parameters given per sample and in epochs to absolute rates and steps."""

    global_batch_size: int
    updates_per_epoch: int
    num_epochs: int = 1

    def steps(self, epochs: float) -> int:
        """Return the whole steps in that many epochs, rounded down (0.29 x 100 is 29, although its float is less)."""
        return math.floor(round(epochs * self.updates_per_epoch, 6))

    def initial(self, params: dict[str, Any]) -> float:
        """Return the absolute initial rate."""
        absolute = params.get("absolute_learning_rate")
        return params["initial_learning_rate"] * self.global_batch_size if absolute is None else absolute


def _const(params: dict[str, Any], span: Span) -> Curve:
    rate = span.initial(params)
    return lambda step: jnp.full_like(step, rate, dtype=jnp.float32)


def _cosine(params: dict[str, Any], span: Span) -> Curve:
    rate = span.initial(params)
    last = max(span.steps(params["epochs_to_total_decay"]), 1)

    def curve(step: jax.Array) -> jax.Array:
        left = (last - jnp.minimum(step, last)).astype(jnp.float32) / last
        # sin^2(pi/2 (1 - t/T)) = (1 + cos(pi t/T))/2, without its cancellation near the end of the decay
        return rate * jnp.square(jnp.sin(0.5 * math.pi * left))

    return curve


def _stepped(params: dict[str, Any], span: Span) -> Curve:
    boundaries = [span.steps(epoch) for epoch in params["boundaries"]]
    values = [float(value) for value in params["values"]]

    def curve(step: jax.Array) -> jax.Array:
        rate = jnp.full_like(step, values[0], dtype=jnp.float32)
        for boundary, value in zip(boundaries, values[1:], strict=True):
            # At the boundary itself the earlier value still holds, as in Keras' piecewise constant decay.
            rate = jnp.where(step > boundary, jnp.float32(value), rate)
        return rate

    return curve


def _drops(params: dict[str, Any], span: Span) -> Curve:
    """Fall by a factor at shares of the run: stepped, as the reference's first application has it."""
    rate, factor = span.initial(params), params["factor"]
    boundaries = [share * span.num_epochs for share in params["drops"]]
    values = [rate * factor**drop for drop in range(len(boundaries) + 1)]
    return _stepped({"boundaries": boundaries, "values": values}, span)


def _polynomial(params: dict[str, Any], span: Span) -> Curve:
    rate, power = span.initial(params), params["power"]
    end = params["end_learning_rate_ratio"] * rate
    last = max(float(params["epochs_to_total_decay"] * span.updates_per_epoch), 1.0)

    def curve(step: jax.Array) -> jax.Array:
        left = (last - jnp.minimum(step.astype(jnp.float32), last)) / last
        return (rate - end) * jnp.power(left, power) + end

    return curve


def _exponential(params: dict[str, Any], span: Span) -> Curve:
    rate, log_decay = span.initial(params), math.log(params["decay_rate"])
    # A drop every n/d steps (d small enough for int32), counted in integers: exact to the step, without drift.
    period = max(params["epochs_per_drop"] * span.updates_per_epoch, 1.0)
    n, d = Fraction(period).limit_denominator(max(1, min(100, math.isqrt(int(2**30 / period))))).as_integer_ratio()

    def curve(step: jax.Array) -> jax.Array:
        # In this order, because step * d would leave the range of int32 in a long run.
        num_drops = step // n * d + step % n * d // n
        return rate * jnp.exp(log_decay * num_drops.astype(jnp.float32))

    return curve


CURVES: dict[str, Callable[[dict[str, Any], Span], Curve]] = {
    "const": _const,
    "cosine": _cosine,
    "stepped": _stepped,
    "drops": _drops,
    "polynomial": _polynomial,
    "exponential": _exponential,
}


def _warm_up(curve: Curve, warmup_steps: int, *, shift: bool, from_zero: bool) -> Curve:
    """Ramp linearly over the first steps; `shift` starts the curve after them, else it runs from the first step."""
    # From zero is the reference's first application: factor t/W, so that the first step changes nothing.
    first, last = (0, max(1, warmup_steps)) if from_zero else (1, warmup_steps + 1)

    def warmed(step: jax.Array) -> jax.Array:
        ramp = jnp.minimum(step + first, last).astype(jnp.float32) / last
        return ramp * curve(jnp.maximum(step - warmup_steps, 0) if shift else step)

    return warmed


def make_lr_curve(learning: Learning, *, global_batch_size: int, updates_per_epoch: int, num_epochs: int) -> LrCurve:
    """Return the learning rate as a float32 function of the step (0 for the first update)."""
    params, warmup = complete_lr(learning, num_epochs)
    span = Span(global_batch_size=global_batch_size, updates_per_epoch=updates_per_epoch, num_epochs=num_epochs)
    shift = warmup is not None and warmup["warmup_mode"] == "shift"
    warmup_steps = span.steps(warmup["warmup_epochs"]) if warmup else 0
    steps_left = num_epochs * updates_per_epoch - warmup_steps
    is_given = (learning.lr_schedule_params or {}).get("epochs_to_total_decay") is not None
    if shift and not is_given and "epochs_to_total_decay" in params and steps_left > 0:
        # All steps that the warm-up leaves. Epochs less warm-up epochs, rounded down once more, could be a step less,
        # and the last step would have a rate of zero.
        params["epochs_to_total_decay"] = steps_left / updates_per_epoch
    curve = CURVES[learning.lr_schedule](params, span)
    if warmup:
        curve = _warm_up(curve, warmup_steps, shift=shift, from_zero=warmup["from_zero"])

    def lr_curve(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step).astype(jnp.int32)
        if learning.lr_staircase:
            # On the step itself, so that warm-up and curve both stay constant within an epoch.
            step = step // updates_per_epoch * updates_per_epoch
        return curve(step)

    return lr_curve


_TABLE = 4096  # steps whose rates are computed at a time


def rate_table(lr_curve: LrCurve) -> Callable[[int, int], np.ndarray]:
    """Return `rates(first step, number of steps)`: the curve's values on the host, float32.

    They are an input of the program, so that a run with another curve needs no other program. Tables begin at multiples
    of their size: XLA may round a number differently by its place in a vector, and a step's rate must not depend on
    where a call begins.
    """
    tabulate = jax.jit(lambda first: lr_curve(first + jnp.arange(_TABLE, dtype=jnp.int32)))

    @functools.lru_cache(maxsize=2)
    def table(number: int) -> np.ndarray:
        with jax.default_device(host_device()):
            return np.asarray(tabulate(jnp.int32(number * _TABLE)))

    def rates(first: int, count: int) -> np.ndarray:
        steps = np.arange(first, first + count)
        parts = [table(number)[steps[steps // _TABLE == number] % _TABLE] for number in np.unique(steps // _TABLE)]
        return np.concatenate(parts)

    return rates


LARS_EXCLUDED = ("beta", "gamma", "bias")  # endings of names: plain learning rate, no LARS weight decay
LARS_EPSILON = 1e-7  # in place of an epsilon of 0


@dataclass(frozen=True)
class Rule:
    """One optimizer: init(params) -> slots; update(grads, slots, params, rate) -> (updates, slots)."""

    init: optax.TransformInitFn
    update: Callable[[PyTree, PyTree, PyTree, jax.Array], tuple[PyTree, PyTree]]
    by_element: bool = True  # an element's update depends on no other element of its tensor


def _zeros(params: PyTree, value: float = 0.0) -> PyTree:
    return jax.tree.map(lambda w: jnp.full(w.shape, value, jnp.float32), params)


def _moved(momentum: float, velocity: PyTree, steps: PyTree) -> PyTree:
    return jax.tree.map(lambda v, s: momentum * v + s, velocity, steps)


def _sgd(options: dict[str, Any]) -> Rule:
    """v = m v - lr g; w += v, or with Nesterov w += m v - lr g (Keras' form)."""
    momentum, nesterov = options["momentum"], options["nesterov"]

    def init(params: PyTree) -> dict[str, Any]:
        return {"velocity": _zeros(params)} if momentum else {}

    def update(grads: PyTree, slots: PyTree, params: PyTree, rate: jax.Array) -> tuple[PyTree, PyTree]:
        del params
        steps = jax.tree.map(lambda g: -rate * g, grads)
        if not momentum:
            return steps, slots
        velocity = _moved(momentum, slots["velocity"], steps)
        if nesterov:
            return _moved(momentum, velocity, steps), {"velocity": velocity}
        return velocity, {"velocity": velocity}

    return Rule(init, update)


def _momentum(options: dict[str, Any]) -> Rule:
    """v = m v + g; w -= lr v (TensorFlow 1's form: a change of the rate acts on the whole velocity at once)."""
    momentum = options["momentum"]

    def init(params: PyTree) -> dict[str, Any]:
        return {"velocity": _zeros(params)}

    def update(grads: PyTree, slots: PyTree, params: PyTree, rate: jax.Array) -> tuple[PyTree, PyTree]:
        del params
        velocity = _moved(momentum, slots["velocity"], grads)
        return jax.tree.map(lambda v: -rate * v, velocity), {"velocity": velocity}

    return Rule(init, update)


def lars_trust(weight: jax.Array, grad: jax.Array, options: dict[str, Any]) -> jax.Array:
    """Return eeta |w| / (|g| + wd |w| + eps), or 1 where |w| or |g| is 0; |g| is the norm before the decay is added."""
    weight_norm, grad_norm = jnp.sqrt(jnp.sum(weight * weight)), jnp.sqrt(jnp.sum(grad * grad))
    epsilon = options["epsilon"] or LARS_EPSILON
    trust = options["eeta"] * weight_norm / (grad_norm + options["weight_decay"] * weight_norm + epsilon)
    return jnp.where((weight_norm > 0) & (grad_norm > 0), trust, 1.0)


def _lars(options: dict[str, Any]) -> Rule:
    """v = m v + lr trust (g + wd w); w -= v. Excluded names: trust 1, no wd."""
    momentum, decay = options["momentum"], options["weight_decay"]

    def init(params: PyTree) -> dict[str, Any]:
        return {"velocity": _zeros(params)}

    def update(grads: PyTree, slots: PyTree, params: PyTree, rate: jax.Array) -> tuple[PyTree, PyTree]:
        def scaled(name: str, grad: jax.Array, weight: jax.Array) -> jax.Array:
            if name.endswith(LARS_EXCLUDED):
                return rate * grad
            return rate * lars_trust(weight, grad, options) * (grad + decay * weight)

        steps = map_named(scaled, grads, params)
        velocity = _moved(momentum, slots["velocity"], steps)
        return jax.tree.map(jnp.negative, velocity), {"velocity": velocity}

    return Rule(init, update, by_element=False)


def rmsprop_rho(options: dict[str, Any]) -> float:
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


def _rmsprop(options: dict[str, Any]) -> Rule:
    """ms = rho ms + (1 - rho) g^2; v = m v + lr g / sqrt(ms + eps); w -= v (TensorFlow's form)."""
    rho, epsilon, momentum = rmsprop_rho(options), options["epsilon"], options["momentum"]
    first = options["initial_accumulator"]

    def init(params: PyTree) -> dict[str, Any]:
        slots = {"mean_square": _zeros(params, first)}
        return slots | {"velocity": _zeros(params)} if momentum else slots

    def update(grads: PyTree, slots: PyTree, params: PyTree, rate: jax.Array) -> tuple[PyTree, PyTree]:
        del params
        squares = jax.tree.map(lambda s, g: rho * s + (1.0 - rho) * g * g, slots["mean_square"], grads)
        # With the epsilon inside the root, as TensorFlow has it; PyTorch adds it outside, which differs where
        # gradients are small.
        steps = jax.tree.map(lambda s, g: rate * g * jax.lax.rsqrt(s + epsilon), squares, grads)
        new_slots = {"mean_square": squares}
        if momentum:
            steps = _moved(momentum, slots["velocity"], steps)
            new_slots["velocity"] = steps
        return jax.tree.map(jnp.negative, steps), new_slots

    return Rule(init, update)


def _adamw(options: dict[str, Any]) -> Rule:
    """w -= lr m^ / (sqrt(v^) + eps), optax's scale_by_adam; the W is the decoupled decay that every optimizer has."""
    adam = optax.scale_by_adam(options["beta1"], options["beta2"], options["epsilon"])

    def update(grads: PyTree, slots: PyTree, params: PyTree, rate: jax.Array) -> tuple[PyTree, PyTree]:
        directions, slots = adam.update(grads, slots, params)
        return jax.tree.map(lambda d: -rate * d, directions), slots

    def init(params: PyTree) -> PyTree:
        return adam.init(_zeros(params))

    return Rule(init, update)


def _lamb(options: dict[str, Any]) -> Rule:
    """u = m^ / (sqrt(v^) + eps) + wd w; w -= lr |w| / |u| u. Weights without decay take Adam's step, as in timm.

    Where |w| or |u| is 0, the ratio is 1. |u| of the sum, not of its parts: unlike LARS, the decay is part of the step.
    """
    adam = optax.scale_by_adam(options["beta1"], options["beta2"], options["epsilon"])
    decay, decayed = options["weight_decay"], options["decayed"]

    def update(grads: PyTree, slots: PyTree, params: PyTree, rate: jax.Array) -> tuple[PyTree, PyTree]:
        def scaled(name: str, direction: jax.Array, weight: jax.Array) -> jax.Array:
            if not decayed(name):
                return -rate * direction
            direction = direction + decay * weight
            weight_norm, norm = jnp.linalg.norm(weight.ravel()), jnp.linalg.norm(direction.ravel())
            adapts = (weight_norm > 0) & (norm > 0)
            return -rate * jnp.where(adapts, weight_norm / jnp.where(adapts, norm, 1.0), 1.0) * direction

        directions, slots = adam.update(grads, slots, params)
        return map_named(scaled, directions, params), slots

    def init(params: PyTree) -> PyTree:
        return adam.init(_zeros(params))

    return Rule(init, update, by_element=False)


OPTIMIZERS: dict[str, Callable[[dict[str, Any]], Rule]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "lars": _lars,
    "rmsprop": _rmsprop,
    "adamw": _adamw,
    "lamb": _lamb,
}
DECAY_INSIDE = ("lamb",)  # optimizers that apply weight_decay themselves

# Gradients with up to this many elements are concatenated before they are reduced.
SMALL_LEAF_SIZE = 1 << 16


def global_norm(grads: PyTree) -> jax.Array:
    """Return the Euclidean norm of a whole tree, in float32, with few kernels.

    On an H200, a step of ResNet-8 at batch 32 takes 0.43 ms without any norm; a sum for each tensor adds 6 %, one sum
    of the concatenated tensors 13 % (XLA fuses the concatenation into a slow reduction), their dot product 1 %.
    """
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(grads)]
    total = sum((jnp.sum(leaf * leaf) for leaf in leaves if leaf.size > SMALL_LEAF_SIZE), start=jnp.float32(0))
    small = [leaf.reshape(-1) for leaf in leaves if leaf.size <= SMALL_LEAF_SIZE]
    if small:
        # Without the barrier XLA fuses the concatenation into the reduction, which makes that slow.
        joined = lax.optimization_barrier(jnp.concatenate(small)) if len(small) > 1 else small[0]
        # HIGHEST: by default a GPU may multiply in TF32, which has three digits.
        total = total + jnp.dot(joined, joined, precision=lax.Precision.HIGHEST)
    return jnp.sqrt(total)


def _is_decayed(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return the test for the parameters that L2 and decay apply to: those whose names match no pattern."""
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda name: not any(pattern.search(name) for pattern in compiled)


def _float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def _add_weights(tree: PyTree, params: PyTree, factor: jax.Array | float, decayed: Callable[[str], bool]) -> PyTree:
    """Return tree + factor x params at the parameters that are decayed, the tree as it is elsewhere."""
    return map_named(lambda name, leaf, w: leaf + factor * w if decayed(name) else leaf, tree, params)


def make_optimizer(
    learning: Learning, lr_curve: LrCurve, global_batch_size: int, rate_factor: Callable[[str], float] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Return the update rule of the options; `update` needs `step=`, and takes a known `rate=` and `grad_norm=`.

    `rate_factor(name)` multiplies the rate of a weight; with 0 it does not move, whatever L2, decay or LARS would do.
    Every rule here is linear in its rate, so that the factor may be applied to the update instead of the rate.
    """
    decayed, rule = _is_decayed(tuple(learning.weight_decay_exclude)), _make_rule(learning, global_batch_size)
    clip, l2 = learning.gradient_clipping, learning.l2_regularization
    decay = 0.0 if learning.optimizer in DECAY_INSIDE else learning.weight_decay

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        step: jax.typing.ArrayLike | None = None,
        rate: jax.Array | None = None,
        grad_norm: jax.Array | None = None,
    ) -> tuple[PyTree, PyTree]:
        assert params is not None, "the update needs the parameters"
        assert step is not None, "the update needs step="
        grads, params, rate = _float32(updates), _float32(params), lr_curve(step) if rate is None else rate
        if clip:
            norm = global_norm(grads) if grad_norm is None else grad_norm
            # Exactly 1 within the limit: a gradient that is not clipped keeps its last bit.
            factor = clip / jnp.maximum(norm, clip)
            grads = jax.tree.map(lambda g: g * factor, grads)
        if l2:
            grads = _add_weights(grads, params, l2, decayed)
        updates, state = rule.update(grads, state, params, rate)
        if decay:
            updates = _add_weights(updates, params, -rate * decay, decayed)
        if rate_factor is not None:
            factor_of = rate_factor
            updates = map_named(lambda name, u: u * factor_of(name), updates)
        return updates, state

    return optax.GradientTransformationExtraArgs(rule.init, update)


def _make_rule(learning: Learning, global_batch_size: int) -> Rule:
    options = complete("optimizer", learning.optimizer, learning.optimizer_params)
    # LAMB's trust ratio is computed from the step with the decay in it, so that the decay cannot be added afterwards.
    if learning.optimizer in DECAY_INSIDE:
        decayed = _is_decayed(tuple(learning.weight_decay_exclude))
        options |= {"weight_decay": learning.weight_decay, "decayed": decayed}
    return OPTIMIZERS[learning.optimizer](options | {"global_batch_size": global_batch_size})


def update_kinds(learning: Learning, rate_factor: Callable[[str], float] | None) -> Callable[[str], Hashable] | None:
    """Return the kind of a weight's update by its name: elements of weights of one kind are updated alike.

    None where an update depends on whole tensors.
    """
    if not _make_rule(learning, 1).by_element:
        return None
    decayed = _is_decayed(tuple(learning.weight_decay_exclude))
    return lambda name: (decayed(name), 1.0 if rate_factor is None else rate_factor(name))


# Which weights are trained, and with which fraction of the learning rate, as functions of a weight's name.

BACKBONE = "backbone"  # in place of a regular expression: all weights but those of the head


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """What is trained, by a weight's name (`conv2_block1/1_conv/kernel`)."""

    freeze: tuple[re.Pattern[str], ...] = ()
    only: tuple[str, ...] = ()
    factors: tuple[tuple[re.Pattern[str], float], ...] = ()
    summary: str = ""  # what is frozen, in a sentence

    @property
    def everything(self) -> bool:
        """Say whether all weights are trained alike."""
        return not (self.freeze or self.only or self.factors)

    @property
    def any_frozen(self) -> bool:
        """Say whether some weights may be frozen."""
        return bool(self.freeze or self.only) or any(factor == 0 for _, factor in self.factors)

    def frozen(self, name: str) -> bool:
        """Say whether a weight keeps its value."""
        if self.only and not any(text in name for text in self.only):
            return True
        return any(pattern.search(name) for pattern in self.freeze) or self._factor(name) == 0

    @property
    def rate_factors(self) -> Callable[[str], float] | None:
        """Return the factors by name, None if all are 1."""
        return None if self.everything else self.rate_factor

    def rate_factor(self, name: str) -> float:
        """Return the factor on the learning rate of a weight; 0 for a frozen one."""
        return 0.0 if self.frozen(name) else self._factor(name)

    def _factor(self, name: str) -> float:
        return next((factor for pattern, factor in self.factors if pattern.search(name)), 1.0)


def make_trainable(
    weights: Weights, network: Callable[[], Mapping[str, Any]], head: Callable[[Iterable[str]], str]
) -> Trainable:
    """Return what the options describe; `network()` returns all weights by name, `head(names)` the layer that scores
    the classes. Both are called only if needed. A pattern that matches no name is refused.
    """
    if not (weights.freeze or weights.variable_filter or weights.layer_lr):
        return Trainable()
    sizes = {name: array.size for name, array in network().items()}

    def compiled(pattern: str) -> re.Pattern[str]:
        return re.compile(_but_head(head(sizes), sizes) if pattern == BACKBONE else pattern)

    found = Trainable(
        freeze=tuple(compiled(pattern) for pattern in weights.freeze),
        only=weights.variable_filter,
        factors=tuple((compiled(pattern), float(factor)) for pattern, factor in weights.layer_lr.items()),
    )
    for pattern in (*found.freeze, *(pattern for pattern, _ in found.factors)):
        if not any(pattern.search(name) for name in sizes):
            option = "freeze" if pattern in found.freeze else "layer_lr"
            raise _matches_nothing(option, pattern.pattern, list(sizes))
    for text in found.only:
        if not any(text in name for name in sizes):
            raise _matches_nothing("variable_filter", text, list(sizes))
    frozen = [name for name in sizes if found.frozen(name)]
    if len(frozen) == len(sizes):
        raise ConfigError(
            "Every weight is frozen.",
            rule="freeze, variable_filter and layer_lr must leave something to train.",
            remedy="To validate alone: --no-training.",
        )
    numbers = f"{sum(sizes[name] for name in frozen):,} of {sum(sizes.values()):,} weights"
    return replace(found, summary=f"frozen: {len(frozen)} of {len(sizes)} tensors, {numbers}" if frozen else "")


def _but_head(head: str, names: Iterable[str]) -> str:
    """Return the expression for all weights but those of the head."""
    if all(name.startswith(f"{head}/") for name in names):
        raise ConfigError(
            f"{BACKBONE} is everything before the head, and there are no weights before {head}.",
            rule="The head is the last layer with weights; a custom network made of one function has one layer.",
            remedy="Name weights by regular expressions, or build the network from several blocks.",
        )
    return f"^(?!{re.escape(head)}/)"


def _matches_nothing(option: str, text: str, names: list[str]) -> ConfigError:
    plain = re.sub(r"[^\w/]", "", text)
    blocks = list(dict.fromkeys([*(name.split("/")[0] for name in names), *names]))
    return ConfigError(
        f"{option} {text!r} matches no weight of the network.",
        rule="It is searched for in names such as " + " and ".join(names[:2]) + ".",
        remedy=did_you_mean(plain, blocks) if len(did_you_mean(plain, blocks)) < 200 else "",
    )
