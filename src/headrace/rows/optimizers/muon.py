"""Muon: momentum whose matrices are made orthogonal, with Adam for vectors and for the last layer.

Each convolution is a matrix, one column for an output channel. The singular values of its momentum are brought near 1,
so that rare directions move as much as common ones (Jordan et al. 2024). Convolutions before a norm are scale-free:
here they keep their norm, and the learning rate is the length of a step beside it, about the angle by which it turns.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.rows.optimizers.slots import moved, zeros
from headrace.rows.row import OptimizerRow, Options, PyTree, Rule
from headrace.rows.values import BOOL, INT, TEXT, Key, Keys, above, at_least, fraction

if TYPE_CHECKING:
    import jax

# Of the quintic iteration x <- a x + b x^3 + c x^5, which brings values from 0.002 on near 1 in five rounds.
QUINTIC = (3.4445, -4.7750, 2.0315)
HEADS = r"(^|/)(predictions|fc_layer|head|fc|classifier|logits)/"


def is_matrix(name: str, shape: tuple[int, ...], excluded: "re.Pattern[str]") -> bool:
    """Say whether a weight is made orthogonal: convolutions but depthwise ones, and dense layers but the last."""
    return len(shape) in (2, 4) and min(shape[-2:]) > 1 and not excluded.search(name)


def orthogonal(matrices: "jax.Array", rounds: int, half: bool = False) -> "jax.Array":
    """Return matrices [K, M, N] with their singular values brought near 1 (Newton-Schulz, quintic).

    In bfloat16 (`half`) those of random matrices end between 0.65 and 1.20 after three and five rounds, in float32
    between 0.68 and 1.20: the iteration corrects most of its errors.
    """
    import jax.numpy as jnp

    tall = matrices.shape[1] > matrices.shape[2]
    x = jnp.swapaxes(matrices, 1, 2) if tall else matrices
    # The largest singular value is at most the Frobenius norm.
    x = x / (jnp.sqrt(jnp.sum(x * x, (1, 2), keepdims=True)) + 1e-30)
    x = x.astype(jnp.bfloat16) if half else x
    a, b, c = QUINTIC
    for _ in range(rounds):
        square = x @ jnp.swapaxes(x, 1, 2)
        x = a * x + (b * square + c * (square @ square)) @ x
    x = x.astype(jnp.float32)
    return jnp.swapaxes(x, 1, 2) if tall else x


def orthogonal_tree(tree: Mapping[str, "jax.Array"], rounds: int, half: bool = False) -> dict[str, "jax.Array"]:
    """Return named weights made orthogonal; those of one shape in one product, since each takes 15 of them."""
    import jax.numpy as jnp

    by_shape: dict[tuple[int, int], list[str]] = {}
    for name, leaf in tree.items():
        by_shape.setdefault((leaf.size // leaf.shape[-1], leaf.shape[-1]), []).append(name)
    found = {}
    for shape, names in by_shape.items():
        done = orthogonal(jnp.stack([tree[name].reshape(shape) for name in names]), rounds, half)
        found |= {name: done[i].reshape(tree[name].shape) for i, name in enumerate(names)}
    return found


def muon(options: Options) -> Rule:
    """m = b m + g; u = orthogonal(g + b m) / |.|; w <- |w| (w - lr |w| u) / |w - lr |w| u|.

    Without fixed_norm: w -= lr 0.2 sqrt(max(M, N)) u, whose elements are as large as AdamW's, and decay follows.
    All other weights: AdamW with the rate lr x other_rate.
    """
    import jax
    import jax.numpy as jnp

    from headrace.core.tree import flatten_named, map_named, unflatten_named

    momentum, other = options["momentum"], options["other_rate"]
    beta1, beta2, epsilon = options["beta1"], options["beta2"], options["epsilon"]
    excluded = re.compile(options["exclude"])

    def init(params: PyTree) -> PyTree:
        def square(name: str, w: jax.Array) -> jax.Array:
            # A matrix has no second moment: a scalar stands in its place, so that all slots are trees of one shape.
            return jnp.zeros(() if is_matrix(name, w.shape, excluded) else w.shape, jnp.float32)

        return {"count": jnp.zeros((), jnp.int32), "momentum": zeros(params), "square": map_named(square, params)}

    def turned(w: jax.Array, direction: jax.Array, rate: jax.Array) -> jax.Array:
        if not options["fixed_norm"]:
            return -rate * 0.2 * max(w.size // w.shape[-1], w.shape[-1]) ** 0.5 * direction
        norm = jnp.sqrt(jnp.sum(w * w))
        step = rate * norm * direction / (jnp.sqrt(jnp.sum(direction * direction)) + 1e-30)
        moved_to = w - step
        return moved_to * (norm / (jnp.sqrt(jnp.sum(moved_to * moved_to)) + 1e-30)) - w

    def update(grads: PyTree, slots: PyTree, params: PyTree, rate: jax.Array) -> tuple[PyTree, PyTree]:
        count = slots["count"] + 1
        flat, weights, old = flatten_named(grads), flatten_named(params), flatten_named(slots["momentum"])
        names = {name for name, w in weights.items() if is_matrix(name, w.shape, excluded)}
        # As a mean, so that its size does not depend on the momentum; the direction of a matrix has no size.
        mean = {name: (momentum if name in names else beta1) * old[name] for name in flat}
        mean = {name: m + (1 - (momentum if name in names else beta1)) * flat[name] for name, m in mean.items()}
        ahead = {name: moved(momentum, mean[name], (1 - momentum) * flat[name]) for name in names}
        directions = orthogonal_tree(
            {name: ahead[name] for name in flat if name in names}, options["rounds"], options["half"]
        )
        squares, steps = flatten_named(slots["square"]), {}
        for name, g in flat.items():
            if name in names:
                steps[name] = turned(weights[name], directions[name], rate)
                continue
            squares[name] = beta2 * squares[name] + (1 - beta2) * g * g
            spread = jnp.sqrt(squares[name] / (1 - beta2**count)) + epsilon
            steps[name] = -rate * other * (mean[name] / (1 - beta1**count)) / spread
        return unflatten_named(params, steps), {
            "count": count,
            "momentum": unflatten_named(params, mean),
            "square": unflatten_named(params, squares),
        }

    return Rule(init, update)


MUON = OptimizerRow(
    name="muon",
    says="orthogonal momentum for convolutions and matrices, AdamW for the rest",
    keys=Keys(
        params=(
            Key(name="momentum", default=0.95, check=fraction),
            Key(name="fixed_norm", kind=BOOL, default=True),
            Key(name="rounds", kind=INT, default=5, check=at_least(1)),
            Key(name="half", kind=BOOL, default=False),
            Key(name="other_rate", default=0.05, check=above(0)),
            Key(name="beta1", default=0.9, check=fraction),
            Key(name="beta2", default=0.99, check=fraction),
            Key(name="epsilon", default=1e-8, check=above(0)),
            Key(name="exclude", kind=TEXT, default=HEADS),
        )
    ),
    rule=muon,
    slots=lambda options: 1,
    usual_rate=0.1,
    scope="tensor",
)
