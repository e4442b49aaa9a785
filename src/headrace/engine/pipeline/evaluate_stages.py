"""Exact evaluation through the stages of a pipeline: weights stay on the devices of their stages, batches pass by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.engine.devices import REPLICA, replica_mesh, replicated
from headrace.engine.forward import EvalSpec, Sums, batch_sums
from headrace.engine.multiprocess_arrays import place, transfer
from headrace.engine.pipeline.schedule_runner import Walk
from headrace.engine.step import BATCHES, put_on
from headrace.model.context import Ctx
from headrace.plan.schedule import Node, Work
from headrace.plan.simulate import make_table

IN_FLIGHT = 2  # batches under way for each stage: enough to keep all busy, and no more lie about


@dataclass(frozen=True, kw_only=True)
class StagedEvaluation:
    """One program per stage; the last one also adds up the sums."""

    ranges: tuple[tuple[int, int], ...]
    names: tuple[tuple[str, ...], ...]  # of the blocks of each stage
    meshes: tuple[Mesh, ...]
    device_mapping: tuple[Any, ...]
    forwards: tuple[Any, ...]
    empty: Any
    total: Any

    def put(self, tree: Any, kind: str) -> Any:
        """Put batches or a resident set on the devices of the first stage and, without images, of the last."""
        labels = {key: value for key, value in tree.items() if key != "images"}
        return put_on(self.meshes[0])(tree, kind), put_on(self.meshes[-1])(labels, kind)

    def place(self, weights: tuple[Any, Any]) -> tuple[Any, ...]:
        """Put (params, stats) on the devices of their stages."""
        return tuple(
            transfer(tuple({name: tree[name] for name in names if name in tree} for tree in weights), replicated(mesh))
            for names, mesh in zip(self.names, self.meshes, strict=True)
        )

    def compile(self, placed: tuple[Any, ...], resident: Any, block: Any) -> "StagedEvaluation":
        """Compile the programs of all stages by evaluating the block once."""
        jax.block_until_ready(self(placed, resident, block))
        return self

    def __call__(self, weights: tuple[Any, ...], resident: Any, block: Any) -> Sums:
        """Return the sums over the block's batches."""
        num_batches = jax.tree.leaves(block[0])[0].shape[0]
        work = Work(self.device_mapping, num_batches, training=False)
        passes = _Passes(self, weights, (resident, block))
        Walk(work=work, programs=passes).run(action for _, action in make_table("Interleaved", work).in_order())
        return self.total(passes.sums[0])


class _Passes:
    """The forward passes of one block of batches, for the walk."""

    def __init__(self, owner: StagedEvaluation, weights: tuple[Any, ...], source: tuple[Any, Any]) -> None:
        self.owner, self.weights, self.source = owner, weights, source
        self.sums = [owner.empty()]
        self.ends: list[Any] = []  # what the last stage counted after each batch

    def forward(self, node: Node, micro: int, inputs: tuple[Any, ...]) -> tuple[Any, None]:
        """Run a stage on a batch; the first waits until the batches before are nearly through."""
        stage, last = node.stage, len(self.owner.meshes) - 1
        ahead = micro - IN_FLIGHT * (last + 1)
        if stage == 0 and 0 <= ahead < len(self.ends):
            jax.block_until_ready(self.ends[ahead])
        number = place(np.int32(micro), replicated(self.owner.meshes[stage]))
        here = 0 if stage == 0 else 1
        resident, block = (part[here] if part else None for part in self.source)
        fetched = (resident, block, number) if stage in (0, last) else None
        x = inputs[0] if inputs else None
        if stage < last:
            return self.owner.forwards[stage](self.weights[stage], x, fetched), None
        self.sums[0], count = self.owner.forwards[stage](self.weights[stage], x, fetched, self.sums[0])
        self.ends.append(count)
        return count, None

    def backward(self, *_: Any) -> Any:
        """Evaluation has no backward pass."""
        raise AssertionError("an evaluation goes forward")

    def transfer(self, value: Any, node: Node) -> Any:
        """Put a value on the devices of a stage, replica by replica."""
        return transfer(value, NamedSharding(self.owner.meshes[node.stage], P(REPLICA)))


def make_staged_evaluation(
    spec: EvalSpec, ranges: Sequence[tuple[int, int]], devices: np.ndarray, mapping: Sequence[int]
) -> StagedEvaluation:
    """Return the evaluation over stages of these blocks, on a grid of devices [replica, device of the replica]."""
    meshes = tuple(replica_mesh(list(devices[:, device])) for device in mapping)
    names = tuple(spec.network.block_names[i:j] for i, j in ranges)
    zeros = jax.eval_shape(
        batch_sums,
        jax.ShapeDtypeStruct((1, spec.network.num_classes), jnp.float32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.float32),
    )

    def empty() -> Sums:
        return jax.tree.map(lambda a: jnp.zeros((spec.num_replicas, *a.shape), a.dtype), zeros)

    def total(sums: Sums) -> Sums:
        return lax.psum(jax.tree.map(lambda a: a[0], sums), REPLICA)

    last = meshes[-1]
    return StagedEvaluation(
        ranges=tuple(ranges),
        names=names,
        meshes=meshes,
        device_mapping=tuple(mapping),
        forwards=tuple(_make_forward(spec, blocks, mesh) for blocks, mesh in zip(ranges, meshes, strict=True)),
        empty=jax.jit(empty, out_shardings=NamedSharding(last, P(REPLICA))),
        total=jax.jit(jax.shard_map(total, mesh=last, in_specs=P(REPLICA), out_specs=P(), check_vma=False)),
    )


def _make_forward(spec: EvalSpec, blocks: tuple[int, int], mesh: Mesh) -> Any:
    """Return a stage's program: `(weights, x, source) -> y`; of the last, `(..., sums) -> (sums, count)`."""
    ctx = Ctx(train=False, compute_dtype=spec.compute_dtype, half_partials=spec.half_partials)
    is_first, is_last = blocks[0] == 0, blocks[1] == len(spec.network.blocks)

    def at_batch(source: Any) -> tuple[Any, dict[str, jax.Array]]:
        resident, block, number = source
        return resident, {key: lax.dynamic_index_in_dim(value, number, 0, False) for key, value in block.items()}

    def apply(weights: Any, x: Any, source: Any) -> Any:
        x = spec.fetch(*at_batch(source))[0] if is_first else x
        return spec.network.apply_range(*blocks, weights[0], weights[1], x, ctx)[0]

    def count(weights: Any, x: Any, source: Any, sums: Sums) -> tuple[Sums, jax.Array]:
        logits = apply(weights, x, source)
        resident, batch = at_batch(source)
        new = batch_sums(logits, spec.fetch_labels(resident, batch), batch["mask"])
        sums = jax.tree.map(lambda a, b: a + b[None], sums, new)
        return sums, sums["count"] + 0

    each, source = P(REPLICA), (P(), BATCHES, P())
    in_specs = (P(), each, source) if is_first or is_last else (P(), each, P())
    if not is_last:
        mapped = jax.shard_map(apply, mesh=mesh, in_specs=in_specs, out_specs=each, check_vma=False)
        return jax.jit(mapped)
    mapped = jax.shard_map(count, mesh=mesh, in_specs=(*in_specs, each), out_specs=(each, each), check_vma=False)
    return jax.jit(mapped, donate_argnums=3)
