"""Train a few steps on given samples, on one device or through stages: what the equivalence tests are made of."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from headrace.engine.call_loop import make_call, put_on
from headrace.engine.devices import replica_mesh
from headrace.engine.loss_scale import make_loss_scaling
from headrace.engine.lr_curve import make_lr_curve
from headrace.engine.objective import Objective
from headrace.engine.optimizer import make_optimizer
from headrace.engine.pipeline.dispatch import Dispatcher, make_dispatcher
from headrace.engine.pipeline.training_stages import StageSpec
from headrace.engine.placement import ON_DEVICE, Placement
from headrace.engine.precision import make_precision
from headrace.engine.state import put_state, state_from
from headrace.engine.step import StepSpec, make_step
from headrace.engine.trainable import EVERYTHING
from headrace.model.activations import Activation
from headrace.model.composite import Chain, Residual
from headrace.model.gates import Dropout, DropPath, SqueezeExcite
from headrace.model.layers import Conv, Dense, GlobalAveragePool, Relu
from headrace.model.network import Network
from headrace.model.norm import Norm, NormSpec
from headrace.plan.partition import stage_ranges
from headrace.plan.schedule import Work
from headrace.plan.simulation import make_table

GLOBAL_BATCH, NUM_STEPS = 16, 3
OPTIONS: dict[str, Any] = {
    "model_name": "cifar_resnet8",
    "optimizer_params": {"momentum": 0.9},
    "lr_schedule_params": {"initial_learning_rate": 0.05 / GLOBAL_BATCH},
    "weight_decay": 0.01,
    "label_smoothing": 0.1,
    "ema_decay": 0.9,
    "gradient_clipping": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class Stages:
    """How the steps are cut and run."""

    replicas: int = 1
    count: int = 4
    cut: tuple[int, ...] = (1,)
    mapping: tuple[int, ...] = (0, 1)
    schedule: str = "Interleaved"
    recompute: bool = False
    placement: Placement = ON_DEVICE


class AsSent:
    """Take images and labels as they are in the block."""

    def __call__(self, _resident: object, micro: dict[str, Any]) -> tuple[Any, Any]:
        return micro["images"], micro.get("labels")

    def labels(self, _resident: object, micro: dict[str, Any]) -> Any:
        return micro["labels"]


def make_samples(num_samples: int = GLOBAL_BATCH, size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    images = rng.normal(size=(NUM_STEPS, num_samples, size, size, 3)).astype(np.float32)
    return images, rng.integers(0, 10, (NUM_STEPS, num_samples)).astype(np.int32)


def small_residual(norm: NormSpec) -> Network:
    """A stem, one residual unit and a head: everything a ResNet has, in a quarter of its compile time."""
    unit = Residual(body=Chain((("conv", Conv(channels=8)), ("norm", Norm(spec=norm)))), shortcut=Chain())
    blocks = (
        ("conv1", Chain((("conv", Conv(channels=8, stride=2)), ("norm", Norm(spec=norm)), ("relu", Relu())))),
        ("unit", unit),
        ("unit_out", Relu()),
        ("pool", GlobalAveragePool()),
        ("fc", Dense(features=10, logits=True)),
    )
    return Network(name="small", blocks=blocks, input_hwc=(16, 16, 3), num_classes=10)


def small_excited() -> Network:
    """A residual unit with a depthwise convolution, squeeze-excite and stochastic depth; dropout before the head."""
    body = (
        ("dwconv", Conv(channels=8, groups=8)),
        ("norm", Norm(spec=NormSpec())),
        ("swish", Activation("swish")),
        ("se", SqueezeExcite(width=4)),
        ("drop", DropPath(0.8)),
    )
    blocks = (
        ("stem", Chain((("conv", Conv(channels=8, stride=2)), ("norm", Norm(spec=NormSpec()))))),
        ("unit", Residual(body=Chain(body))),
        ("pool", GlobalAveragePool()),
        ("dropout", Dropout(0.2)),
        ("fc", Dense(features=10, logits=True)),
    )
    return Network(name="excited", blocks=blocks, input_hwc=(8, 8, 3), num_classes=10)


def make_spec(config, network, global_batch_size, *, replicas, count, trained=EVERYTHING, **given) -> StepSpec:
    """Return the step of a configuration; `given` replaces what it would have."""
    learning = config.learning
    curve = make_lr_curve(learning, global_batch_size=global_batch_size, updates_per_epoch=10, num_epochs=1)
    spec = StepSpec(
        network=network,
        optimizer=make_optimizer(learning, curve, global_batch_size, trained),
        precision=make_precision(config.numerics, config.batch),
        loss_scaling=make_loss_scaling(config.numerics, curve.span),
        fp_exceptions=config.numerics.fp_exceptions,
        fetch=AsSent(),
        num_replicas=replicas,
        gradient_accumulation_count=count,
        seed=0,
        objective=Objective(label_smoothing=learning.label_smoothing),
        stable_norm=config.model.stable_norm,
        bn_momentum=0.9,
        ema_decay=learning.ema_decay,
    )
    return replace(spec, **given)


def make_block(images, labels, count):
    """Return the block of these samples; position in a global batch is ((g * R + r) * micro + m), as in order.py."""

    def cut(array):
        return array.reshape(len(array), count, -1, *array.shape[2:])

    # Labels of classes are single numbers, others have one for each output.
    index = np.arange(np.prod(labels.shape[:2]), dtype=np.int32).reshape(labels.shape[:2])
    epoch = np.zeros(len(images), np.uint32)
    return {"images": cut(images), "labels": cut(labels), "index": cut(index), "epoch": epoch}


def first_state(spec: StepSpec):
    return state_from(spec.optimizer, spec.precision, spec.loss_scaling, spec.network.init(0), ema=spec.ema_decay > 0)


def train_steps(config, network, images, labels, *, replicas, count, **given):
    """Run the real device loop over given samples [K, global batch, ...]; return (state, metrics) on the host."""
    spec = make_spec(config, network, images.shape[1], replicas=replicas, count=count, **given)
    mesh = replica_mesh(jax.devices()[:replicas])
    block = put_on(mesh, make_block(images, labels, count), "steps")
    call = make_call(make_step(spec), mesh, block, spec.packing)
    return jax.device_get(call(put_state(first_state(spec), mesh), None, block, np.array([0, len(images)], np.int32)))


def make_stages(config, network, images, stages: Stages, **given) -> tuple[StepSpec, Dispatcher]:
    """Return the step and the dispatcher that runs it."""
    spec = make_spec(config, network, images.shape[1], replicas=stages.replicas, count=stages.count, **given)
    specs = [
        StageSpec(
            step=spec,
            blocks=blocks,
            recompute=stages.recompute,
            placement=stages.placement,
        )
        for blocks in stage_ranges(stages.cut, len(network.blocks))
    ]
    table = make_table(stages.schedule, Work(stages.mapping, stages.count))
    num_devices = stages.replicas * table.work.num_devices
    grid = np.array(jax.devices()[:num_devices]).reshape(stages.replicas, -1)
    return spec, make_dispatcher(specs, grid, table)


def run_stages(spec: StepSpec, dispatcher: Dispatcher, images, labels):
    """Run the steps of the samples; return (state, metrics) on the host."""
    block = dispatcher.put(make_block(images, labels, spec.gradient_accumulation_count), "steps")
    parts, metrics = dispatcher(dispatcher.place(first_state(spec)), None, block)
    return jax.device_get((dispatcher.join(parts), metrics))


def train_pipelined(config, network, samples, stages: Stages, **given):
    """Run the same steps as `train_steps` through stage programs."""
    return run_stages(*make_stages(config, network, samples[0], stages, **given), *samples)


def assert_close(found, wanted, tolerance=2e-6):
    """Compare two trees leaf by leaf, relative to the largest number of the leaf."""
    others = dict(jax.tree_util.tree_flatten_with_path(found)[0])
    for path, leaf in jax.tree_util.tree_flatten_with_path(wanted)[0]:
        scale = np.abs(leaf).max() + 1e-12
        assert np.abs(others[path] - leaf).max() <= tolerance * scale, jax.tree_util.keystr(path)
