"""The design of a run: all values that follow from its configuration before any device is touched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax

from headrace.config.schema import Config
from headrace.data.balance import refuse_weights
from headrace.data.dataset import DataInfo, describe
from headrace.engine.lr_curve import make_lr_curve
from headrace.engine.optimizer import make_optimizer
from headrace.engine.precision import Precision, make_precision
from headrace.engine.state import State, init_state
from headrace.model.families import build_network
from headrace.model.network import Network
from headrace.plan.plan import Plan, make_plan


@dataclass(frozen=True, kw_only=True)
class Design:
    """A run on paper. Whatever cannot work is refused while this is made."""

    config: Config
    info: DataInfo
    network: Network
    plan: Plan
    precision: Precision
    lr_curve: Callable[[Any], Any]
    optimizer: optax.GradientTransformationExtraArgs


def design_run(config: Config) -> Design:
    """Return the design of the run that a configuration describes."""
    info = describe(config.data)
    refuse_weights(config.learning.class_weights, info)
    network = build_network(config.model, info.num_classes, info.image_hwc)
    plan = make_plan(config, info, network)
    lr_curve = make_lr_curve(
        config.learning,
        global_batch_size=plan.batch.global_batch_size,
        updates_per_epoch=plan.steps.updates_per_epoch,
        num_epochs=plan.steps.num_epochs,
    )
    return Design(
        config=config,
        info=info,
        network=network,
        plan=plan,
        precision=make_precision(config.numerics, config.batch),
        lr_curve=lr_curve,
        optimizer=make_optimizer(config.learning, lr_curve, plan.batch.global_batch_size),
    )


def starting_state(design: Design) -> State:
    """Return the state of step 0, in host memory."""
    config = design.config
    return init_state(
        design.network,
        design.optimizer,
        design.precision,
        config.numerics,
        seed=config.run.seed,
        ema=config.learning.ema_decay > 0,
    )
