"""What layers are given, the context of the run (`Ctx`) with its random numbers, and what they report, their cost."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.random import define_prng_impl
from jax.typing import DTypeLike

from headrace.core.rng import Seed, bits, name_id, seed_word

FLOPS_CONVENTION = "a multiply-add of a convolution or dense layer counts as 2 FLOPs, all else as 0"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Trainable parameters; forward FLOPs per image; elements per image kept for the backward pass.

    The outputs of convolutions, dense layers, activations and pools are kept; XLA fuses norms, additions and padding
    with their neighbours and does not store them. `product_elements` counts only the outputs of convolutions and dense
    layers: a pipeline stage keeps these and recomputes everything in between.
    """

    params: int = 0
    flops: int = 0
    activation_elements: int = 0
    product_elements: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        """Return the cost of two parts together."""
        return Cost(
            params=self.params + other.params,
            flops=self.flops + other.flops,
            activation_elements=self.activation_elements + other.activation_elements,
            product_elements=self.product_elements + other.product_elements,
        )


# Primitives other than products whose outputs are kept for the backward pass: activations and pools (see Cost).
_ACTIVATIONS = frozenset(
    (
        *("max", "min", "clamp", "exp", "tanh", "logistic", "erf", "log1p", "sin", "cos"),
        *("reduce_window", "reduce_window_max", "reduce_window_sum"),
    )
)


@dataclass(frozen=True)
class Counted:
    """FLOPs of convolutions and matrix products, elements of their outputs, elements of activations and pools."""

    flops: int = 0
    products: int = 0
    activations: int = 0

    def __add__(self, other: "Counted") -> "Counted":
        return Counted(self.flops + other.flops, self.products + other.products, self.activations + other.activations)

    def times(self, count: int) -> "Counted":
        """Return the counts of that many repetitions."""
        return Counted(count * self.flops, count * self.products, count * self.activations)


def count_jaxpr(jaxpr: ClosedJaxpr | Jaxpr, batch: int) -> Counted:
    """Count the jaxpr of a function applied to `batch` images; only arrays whose first dim is the batch are kept."""
    total = Counted()
    for eqn in (jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr).eqns:
        total += _count_equation(eqn, batch)
    return total


def _count_equation(eqn: Any, batch: int) -> Counted:
    name = eqn.primitive.name
    kept = sum(math.prod(out.aval.shape) for out in eqn.outvars if out.aval.shape[:1] == (batch,))
    if name == "dot_general":
        ((contracted, _), _) = eqn.params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
        return Counted(2 * depth * math.prod(eqn.outvars[0].aval.shape), kept)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_channels = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        # The weights of one output channel are the multiply-adds of one output value.
        return Counted(2 * math.prod(kernel) // out_channels * math.prod(eqn.outvars[0].aval.shape), kept)
    inner = [count_jaxpr(sub, batch) for sub in _inside(eqn.params)]
    if name == "cond":
        # One branch runs; the dearer one counts.
        return max(inner, key=lambda counted: counted.flops, default=Counted())
    if inner:
        total = sum(inner, Counted()).times(eqn.params.get("length", 1) if name == "scan" else 1)
        # a call without products is one activation (relu6, gelu ...), however many primitives it consists of
        return total if total.flops else Counted(activations=min(total.activations, kept))
    return Counted(activations=kept if name in _ACTIVATIONS else 0)


def _inside(params: dict[str, Any]) -> Iterator[ClosedJaxpr | Jaxpr]:
    """Yield the jaxprs among an equation's parameters."""
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr | Jaxpr):
                yield each


# What a layer knows about the run while it is applied (`Ctx`), and its random numbers.
#
# Random numbers are addressed by sample. An ordinary JAX key fills an array [N, ...] by position, so a sample's numbers
# would depend on the micro batch it is in. The key of `sample_key` also carries the indices of the N samples: each row
# of an array whose first dim is N is drawn for its own sample, so every plan yields the same numbers. It works with all
# of `jax.random` and can be split and folded like any other key. Other arrays are drawn by position, the same for all
# samples.


@dataclass(frozen=True)
class Draws:
    """The address of random numbers: the seed of the run, the step, and the index of each sample [N].

    A sample thus draws the same numbers in whichever micro batch, replica, stage or process it is.
    """

    seed: Seed
    step: Array | int
    samples: Array


# A batch norm is frozen when training leaves both of these alone. It then normalises with its running statistics, which
# stop moving; with only one of them frozen it still follows the batches.
NORM_WEIGHTS = ("gamma", "beta")


def all_frozen(frozen: Callable[[str], bool] | None, layer: str, tensors: Iterable[str]) -> bool:
    """Say whether training leaves all these tensors of a layer alone; `frozen` answers for a tensor's full name."""
    return frozen is not None and all(frozen(f"{layer}/{tensor}") for tensor in tensors)


@dataclass(frozen=True, kw_only=True)
class Ctx:
    """The conditions under which a network is applied; layers only read it.

    `norm_groups` is (axis name, index groups) for batch norm over several replicas. `probe(block name, output)` is
    called with the output of every block. `path` is the position of a layer in the network, which is part of the
    address of its random numbers. `frozen(tensor name)` returns whether training leaves a weight unchanged.
    `cpu_kernels` says when convolutions on the CPU are our own (ops/native_units.py), `matmul_precision` how
    accelerators multiply float32 values (ops/tracing.py).
    """

    train: bool
    compute_dtype: DTypeLike = jnp.float32
    half_partials: bool = False
    stable_norm: bool = False
    norm_groups: tuple[str, tuple[tuple[int, ...], ...]] | None = None
    draws: Draws | None = None
    path: str = ""
    probe: Callable[[str, Any], Any] | None = None
    frozen: Callable[[str], bool] | None = None
    cpu_kernels: str = "auto"
    matmul_precision: str = "default"

    def is_frozen(self, *tensors: str) -> bool:
        """Return whether all these tensors of the layer are frozen; the layer then works as in evaluation."""
        return all_frozen(self.frozen, self.path, tensors)

    def under(self, name: str) -> "Ctx":
        """Return the context of a named sublayer."""
        return replace(self, path=f"{self.path}/{name}" if self.path else name)

    def uniform(self, *shape: int) -> Array:
        """Return uniform float32 numbers in [0, 1) for every sample: [N, *shape]."""
        assert self.draws is not None, f"{self.path} draws random numbers, but none were given: Ctx(draws=...)"
        ones = (1,) * len(shape)
        samples = self.draws.samples.astype(jnp.uint32).reshape(-1, *ones)
        places = np.arange(int(np.prod(shape)), dtype=np.uint32).reshape(1, *shape)
        step = jnp.asarray(self.draws.step).astype(jnp.uint32).reshape(1, *ones)
        drawn = bits(seed_word(self.draws.seed).reshape(1, *ones), name_id(self.path), step, samples, places)
        # 24 bits, as many as a float32 holds exactly: more would round some numbers up to 1.
        return (drawn >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)


# Keys addressed by sample, for functions that take a JAX key: user functions, and Flax's dropout.

_HEAD = 1  # words of a key before the indices of its samples


def sample_key(ctx: Ctx) -> jax.Array:
    """Return the JAX key of a layer for the samples it is applied to."""
    assert ctx.draws is not None, f"{ctx.path} draws random numbers, but none were given: Ctx(draws=...)"
    step = jnp.asarray(ctx.draws.step).astype(jnp.uint32).reshape(1)
    head = jnp.asarray(bits(ctx.draws.seed, name_id(ctx.path), step))
    samples = ctx.draws.samples.astype(jnp.uint32)
    return jax.random.wrap_key_data(jnp.concatenate([head, samples]), impl=_keys_for(len(samples)))


def start_key(number: object) -> jax.Array:
    """Return the key for drawing initial weights, which has no samples.

    With JAX's default keys XLA needs 8.8 s on a CPU to compile the drawing of three small kernels; with these, 0.5 s.
    """
    return jax.random.wrap_key_data(bits(jnp.asarray(number).astype(jnp.uint32).reshape(1)), impl=_keys_for(0))


@cache
def _keys_for(num_samples: int) -> Any:
    """Return the key implementation for that many samples (the size of a key is part of its type)."""

    def seed(number: object) -> Array:
        head = bits(jnp.asarray(number).astype(jnp.uint32).reshape(1))
        return jnp.concatenate([head, jnp.zeros(num_samples, jnp.uint32)])

    def fold_in(key: Array, number: Array | int) -> Array:
        head = bits(key[:_HEAD], jnp.asarray(number).astype(jnp.uint32).reshape(1))
        return jnp.concatenate([head, key[_HEAD:]])

    def split(key: Array, shape: tuple[int, ...]) -> Array:
        count = int(np.prod(shape))
        heads = bits(name_id("split"), key[:_HEAD], np.arange(count, dtype=np.uint32))
        samples = jnp.broadcast_to(key[None, _HEAD:], (count, num_samples))
        return jnp.concatenate([heads[:, None], samples], axis=1).reshape(*shape, _HEAD + num_samples)

    def random_bits(key: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
        if bit_width == 64:
            high, low = (random_bits(fold_in(key, half), 32, shape).astype(jnp.uint64) for half in range(2))
            return high << np.uint64(32) | low
        # JAX asks for bits by shape only: an array whose first dim is the batch is taken to have a row for each
        # sample.
        by_sample = len(shape) > 0 and shape[0] == num_samples > 0
        rows = key[_HEAD:] if by_sample else jnp.arange(shape[0] if shape else 1, dtype=jnp.uint32)
        places = np.arange(int(np.prod(shape[1:])), dtype=np.uint32) if len(shape) > 1 else np.zeros(1, np.uint32)
        # So that row 3 drawn by position and sample 3 do not share their bits.
        purpose = np.array([[by_sample]], np.uint32)
        word = bits(purpose, key[:_HEAD, None], rows[:, None], places[None])
        return (word >> np.uint32(32 - bit_width)).astype(f"uint{bit_width}").reshape(shape)

    return define_prng_impl(
        key_shape=(_HEAD + num_samples,),
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name=f"headrace_{num_samples}_samples",
        tag="hr",
    )
