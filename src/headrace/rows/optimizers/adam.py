"""Adam, AdamW, NAdam, RAdam and LAMB: optax's moments, and what is done with the direction they give."""

from collections.abc import Callable

from headrace.rows.row import OptimizerRow, Options, PyTree, Rule
from headrace.rows.values import Key, Keys, above, fraction


def _betas(epsilon: float) -> tuple[Key, ...]:
    return (
        Key(name="beta1", default=0.9, check=fraction),
        Key(name="beta2", default=0.999, check=fraction),
        Key(name="epsilon", default=epsilon, check=above(0)),
    )


def adam(options: Options) -> Rule:
    """w -= lr m^ / (sqrt(v^) + eps)."""
    import optax

    return _along(optax.scale_by_adam(options["beta1"], options["beta2"], options["epsilon"]))


def nadam(options: Options) -> Rule:
    """Adam whose m^ looks one step ahead, as Nesterov's momentum does (Dozat 2016)."""
    import optax

    return _along(optax.scale_by_adam(options["beta1"], options["beta2"], options["epsilon"], nesterov=True))


def radam(options: Options) -> Rule:
    """Adam with the rectified variance of Liu et al.: momentum alone while the variance is not known (5 steps)."""
    import optax

    return _along(optax.scale_by_radam(options["beta1"], options["beta2"], options["epsilon"]))


def _along(direction: object) -> Rule:
    import jax

    from headrace.rows.optimizers.slots import zeros

    init_slots: Callable[[PyTree], PyTree] = direction.init  # type: ignore[attr-defined]
    find: Callable[..., tuple[PyTree, PyTree]] = direction.update  # type: ignore[attr-defined]

    def init(params: PyTree) -> PyTree:
        return init_slots(zeros(params))

    def update(grads: PyTree, slots: PyTree, params: PyTree, rate: jax.Array) -> tuple[PyTree, PyTree]:
        directions, slots = find(grads, slots, params)
        return jax.tree.map(lambda d: -rate * d, directions), slots

    return Rule(init, update)


def lamb(options: Options) -> Rule:
    """u = m^ / (sqrt(v^) + eps) + wd w; w -= lr |w| / |u| u. Weights without decay take Adam's step, as in timm.

    Where |w| or |u| is 0, the ratio is 1. |u| of the sum, not of its parts: unlike LARS, the decay is part of the step.
    """
    import jax
    import jax.numpy as jnp
    import optax

    from headrace.core.tree import map_named
    from headrace.rows.optimizers.slots import zeros

    moments = optax.scale_by_adam(options["beta1"], options["beta2"], options["epsilon"])
    decay, decayed = options["weight_decay"], options["decayed"]

    def update(grads: PyTree, slots: PyTree, params: PyTree, rate: jax.Array) -> tuple[PyTree, PyTree]:
        def scaled(name: str, direction: jax.Array, weight: jax.Array) -> jax.Array:
            if not decayed(name):
                return -rate * direction
            direction = direction + decay * weight
            weight_norm, norm = jnp.linalg.norm(weight.ravel()), jnp.linalg.norm(direction.ravel())
            adapts = (weight_norm > 0) & (norm > 0)
            return -rate * jnp.where(adapts, weight_norm / jnp.where(adapts, norm, 1.0), 1.0) * direction

        directions, slots = moments.update(grads, slots, params)
        return map_named(scaled, directions, params), slots

    def init(params: PyTree) -> PyTree:
        return moments.init(zeros(params))

    return Rule(init, update)


ADAMW = OptimizerRow(
    name="adamw",
    says="Adam with decoupled weight decay",
    keys=Keys(params=_betas(1e-8)),
    rule=adam,
    slots=lambda options: 2,
    usual_rate=0.002,
    scope="element",
)
ADAM = OptimizerRow(
    name="adam",
    says="Adam; its decay is coupled (--l2-regularization)",
    keys=Keys(params=_betas(1e-8)),
    rule=adam,
    slots=lambda options: 2,
    usual_rate=0.002,
    scope="element",
    decay="none",
)
NADAM = OptimizerRow(
    name="nadam",
    says="AdamW with Nesterov's momentum",
    keys=Keys(params=_betas(1e-8)),
    rule=nadam,
    slots=lambda options: 2,
    usual_rate=0.002,
    scope="element",
)
RADAM = OptimizerRow(
    name="radam",
    says="AdamW whose first steps wait for the variance; with --lookahead it is Ranger",
    keys=Keys(params=_betas(1e-8)),
    rule=radam,
    slots=lambda options: 2,
    usual_rate=0.002,
    scope="element",
)
LAMB = OptimizerRow(
    name="lamb",
    says="Adam whose rate follows the norms of each tensor, for very large batches",
    keys=Keys(params=_betas(1e-6)),
    rule=lamb,
    slots=lambda options: 2,
    usual_rate=0.0035,  # 0.005 at 2,048, as in the A2 procedure
    scope="tensor",
    decay="inside",
)
