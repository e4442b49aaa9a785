"""The forward pass: one program over blocks of batches; a reducer says what of the logits leaves the devices.

Validation adds up sums; prediction and the inference benchmark keep the logits.
Every sample counts exactly once: feeds pad the last batch, and the sums leave out samples of mask 0.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from headrace.core.process import keep_freed_memory
from headrace.core.tree import PyTree
from headrace.engine.call_loop import BATCHES, OnOneMesh
from headrace.engine.compiler import OptionItems, common_options
from headrace.engine.devices import REPLICA, replicated
from headrace.engine.kept_programs import kept
from headrace.engine.multiprocess_arrays import place, transfer
from headrace.engine.objective import SCORES, STANDARD, CustomObjective, sums_of_samples, sums_of_validation
from headrace.engine.step import Fetch
from headrace.engine.stored_programs import Made, ProgramRequest
from headrace.model.context import Ctx
from headrace.model.network import Network
from headrace.ops import collecting, uses_kernels, using

Sums = dict[str, jax.Array]
Weights = tuple[PyTree, PyTree]  # (params, stats)


@dataclass(frozen=True)
class Reducer:
    """What is kept of a batch: sums, added up over all batches, or logits, stacked in their order."""

    keeps: Literal["sums", "logits"]
    custom: CustomObjective = STANDARD

    @property
    def adds(self) -> bool:
        """Say whether what is kept of batches is added up."""
        return self.keeps == "sums"

    @property
    def keeps_scores(self) -> bool:
        """Say whether scores are stacked beside the sums, as `scores` among them."""
        return self.adds and self.custom.keeps_scores

    def keep(self, logits: jax.Array, labels: Any, mask: Any) -> PyTree:
        """Return what is kept of a batch."""
        if self.adds:
            return batch_sums(logits, labels, mask, self.custom)
        return logits


def batch_sums(logits: jax.Array, labels: jax.Array, mask: jax.Array, custom: CustomObjective = STANDARD) -> Sums:
    """Return the sums of one batch: those of samples, and of classes the confusion matrix [label, predicted class]."""
    confusion = {} if custom.row.per_output else {"confusion": _confusion(logits, labels, mask)}
    sums = sums_of_samples(logits, labels, mask, 0.0, custom) | confusion
    return sums | sums_of_validation(logits, labels, mask, custom)


def _confusion(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    num_classes = logits.shape[-1]
    confusion = jnp.zeros((num_classes, num_classes), jnp.int32)
    # In integers: a float32 stops counting at 2^24.
    return confusion.at[labels, jnp.argmax(logits, -1)].add(mask.astype(jnp.int32))


def scores_of(logits: jax.Array, labels: Any, mask: Any) -> Sums:
    """Return what metrics that need all scores need of a batch."""
    return {"scores": logits.astype(jnp.float32), "labels": labels, "mask": mask}


def sums_with(custom: CustomObjective) -> Reducer:
    """Return the reducer that adds up `batch_sums`, with a custom loss and custom metrics."""
    return Reducer("sums", custom)


SUMS = sums_with(STANDARD)
LOGITS = Reducer("logits")


@dataclass(frozen=True, kw_only=True)
class EvalSpec:
    """Everything a forward pass needs that is not an array."""

    network: Network
    fetch: Fetch
    compute_dtype: jax.typing.DTypeLike
    num_replicas: int
    half_partials: bool = False
    matmul_precision: str = "default"
    stable_norm: bool = False
    cpu_kernels: str = "auto"
    compiler_options: OptionItems = ()  # XLA's: engine/compiler.py
    reducer: Reducer = SUMS
    flip: bool = False  # the mean of the logits of an image and of its mirror image
    shift: int = 0  # and of two images moved by so many pixels, for half of the mean

    def sum_shapes(self) -> PyTree:
        """Return the shapes of what a reducer that adds keeps; they depend on no batch, so nothing else is traced."""
        outputs, task = self.network.num_classes, self.reducer.custom.row
        return jax.eval_shape(
            self.reducer.keep,
            jax.ShapeDtypeStruct((1, outputs), jnp.float32),
            jax.ShapeDtypeStruct((1, outputs) if task.per_output else (1,), task.label_dtype),
            jax.ShapeDtypeStruct((1,), jnp.float32),
        )

    def context(self) -> Ctx:
        """Return the conditions under which the network is applied."""
        return Ctx(
            train=False,
            compute_dtype=self.compute_dtype,
            half_partials=self.half_partials,
            matmul_precision=self.matmul_precision,
            stable_norm=self.stable_norm,
            cpu_kernels=self.cpu_kernels,
        )


class ForwardProgram(Protocol):
    """A compiled forward pass."""

    def prepare(self, placed: PyTree, resident: PyTree, block: PyTree, /) -> PyTree:
        """Return placed weights as calls take them: what follows from the weights alone is computed here, once."""
        ...

    def __call__(self, prepared: PyTree, resident: PyTree, block: PyTree, /) -> PyTree:
        """Return what the reducer keeps of a block of batches."""
        ...


class Forward(Protocol):
    """Where weights and batches are put, and the program that takes them; of whole networks or through stages."""

    @property
    def meshes(self) -> Sequence[Mesh]:
        """The groups of devices that communicate."""
        ...

    def put(self, tree: PyTree, kind: str) -> PyTree:
        """Put batches or a resident set on the devices."""
        ...

    def place(self, weights: Weights) -> PyTree:
        """Put weights on the devices."""
        ...

    def compile(self, placed: PyTree, resident: PyTree, block: PyTree) -> ForwardProgram:
        """Return the program, compiled for weights, resident set and blocks like these."""
        ...


@dataclass(frozen=True)
class WholeForward(OnOneMesh):
    """The whole network on every device of a mesh, each with its part of every batch."""

    spec: EvalSpec

    def place(self, weights: Weights) -> Weights:
        """Put the weights on every device."""
        return transfer(weights, replicated(self.mesh))

    def compile(self, placed: PyTree, resident: PyTree, block: PyTree) -> "WholeProgram":
        """Compile ahead of the first use, so that the time can be reported apart."""
        has_constants = uses_kernels(self.spec.cpu_kernels)
        request = self._request(placed if has_constants else (placed, None), resident, block)
        if not has_constants:
            return WholeProgram(_no_constants, *request.prepare().compile().compiled)
        if not self.spec.reducer.adds:  # a validation within training leaves memory as training needs it
            keep_freed_memory(keep=True)
        programs = request.prepare(lambda: self._trace_with_constants(placed, resident, block)).compile()
        constants, forward = programs.compiled
        return WholeProgram(constants, forward, Selection.without(programs.facts, placed).pick)

    def lower(self, weights: Weights, resident: PyTree, block: PyTree) -> jax.stages.Lowered:
        """Make XLA's input from Python, for devices that need not be here."""
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
        return self._request((place(shapes, replicated(self.mesh)), None), resident, block).lower()

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's options."""
        return common_options() | dict(self.spec.compiler_options)

    def _request(self, *arguments: PyTree) -> ProgramRequest:
        return ProgramRequest(
            make=make_forward, spec=self.spec, mesh=self.mesh, arguments=arguments, options=self.options
        )

    def _trace_with_constants(self, placed: PyTree, resident: PyTree, block: PyTree) -> Made:
        """Return the programs of the constants and of the forward pass, and the places of weights it does not use."""
        preparation = kept(make_preparation, self.spec, self.mesh).lower(placed, resident, block)
        where = replicated(self.mesh)
        constants = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), preparation.out_info)
        traced = kept(make_forward, self.spec, self.mesh).trace((placed, constants), resident, block)
        selection = Selection.of(traced, placed)
        forward = kept(make_forward, self.spec, self.mesh, selection)
        lowered = forward.lower((selection.pick(placed), constants), resident, block)
        return (preparation, lowered), list(selection.unused)


@dataclass(frozen=True)
class Selection:
    """The weights that a program uses besides its constants: the arguments of a call cost time, each a microsecond."""

    tree: Any  # the structure of all weights
    unused: dict[int, tuple[tuple[int, ...], np.dtype]]  # shapes and dtypes by their places

    @classmethod
    def of(cls, traced: jax.stages.Traced, placed: Weights) -> "Selection":
        """Return the selection for a traced program whose first arguments are the weights."""
        num_leaves = len(jax.tree.leaves(placed))
        (mapped,) = traced.jaxpr.eqns
        program = mapped.params["jaxpr"]
        inside = {id(v) for equation in program.eqns for v in equation.invars} | {id(v) for v in program.outvars}
        # Not by place: arrays that the functions refer to, such as the mean of pixels, come before the weights.
        used = {id(v) for v, inner in zip(mapped.invars, program.invars, strict=True) if id(inner) in inside}
        unused = [i for i, weight in enumerate(traced.jaxpr.invars[:num_leaves]) if id(weight) not in used]
        return cls.without(unused, placed)

    @classmethod
    def without(cls, unused: Sequence[int], placed: Weights) -> "Selection":
        """Return the selection of all weights but those at some places."""
        leaves, tree = jax.tree.flatten(placed)
        return cls(tree, {i: (leaves[i].shape, np.dtype(leaves[i].dtype)) for i in unused})

    def pick(self, weights: Weights) -> list[Any]:
        """Return the weights that are used."""
        return [w for i, w in enumerate(jax.tree.leaves(weights)) if i not in self.unused]

    def whole(self, picked: list[Any]) -> Weights:
        """Return all weights, those that are not used without their values."""
        empty = {i: np.broadcast_to(np.zeros((), dtype), shape) for i, (shape, dtype) in self.unused.items()}
        left = iter(picked)
        return self.tree.unflatten([empty[i] if i in empty else next(left) for i in range(self.tree.num_leaves)])


@dataclass(frozen=True)
class WholeProgram:
    """The program of a whole network, and the one that computes its constants."""

    constants: Callable[[PyTree, PyTree, PyTree], PyTree]
    forward: jax.stages.Compiled
    pick: Callable[[Weights], PyTree] = lambda weights: weights

    def prepare(self, placed: PyTree, resident: PyTree, block: PyTree) -> PyTree:
        """Return (placed weights that are used, constants)."""
        return self.pick(placed), self.constants(placed, resident, block)

    def __call__(self, prepared: PyTree, resident: PyTree, block: PyTree) -> PyTree:
        """Return what the reducer keeps."""
        return self.forward(prepared, resident, block)

    def memory_analysis(self) -> Any:
        """Return what XLA says about the memory of a call."""
        return self.forward.memory_analysis()


def _no_constants(*_: PyTree) -> None:
    return None


def make_preparation(spec: EvalSpec, mesh: Mesh) -> jax.stages.Wrapped:
    """Return the jitted program `constants(weights, resident, block)`; of the last two only the shapes matter."""

    def prepare(weights: Weights, resident: PyTree, block: dict[str, jax.Array]) -> list[PyTree]:
        images, _ = spec.fetch(resident, jax.tree.map(lambda a: a[0], block))
        with collecting() as constants:
            spec.network.apply(*weights, images, spec.context())
        return constants

    return _on_mesh(prepare, mesh, P())


def views(images: jax.Array, flip: bool, shift: int) -> Iterator[tuple[float, jax.Array]]:
    """Yield views of images [n, H, W, C] and their shares in the mean of the logits.

    Half of it are images moved by `shift` pixels, up and to the left or down and to the right, with mirrored pixels at
    the edges; half of each are mirror images.
    """
    moved = [(1.0, images)]
    if shift:
        around = jnp.pad(images, ((0, 0), (shift, shift), (shift, shift), (0, 0)), "reflect")
        height, width = images.shape[1:3]
        ends = (around[:, :height, :width], around[:, 2 * shift :, 2 * shift :])
        moved = [(0.5, images), *((0.25, end) for end in ends)]
    for share, view in moved:
        if flip:
            yield share / 2, view
            yield share / 2, view[:, :, ::-1]
        else:
            yield share, view


def make_forward(spec: EvalSpec, mesh: Mesh, selection: "Selection | None" = None) -> jax.stages.Wrapped:
    """Return the jitted program `forward((weights, constants), resident, block)` over the n batches of a block.

    A reducer that adds gives sums over all batches and replicas, any other one arrays [n, B, ...]. The program
    takes the weights of a selection.
    """
    ctx, keeps_scores = spec.context(), spec.reducer.keeps_scores

    def forward(prepared: tuple[PyTree, list[PyTree] | None], resident: PyTree, block: dict[str, jax.Array]) -> PyTree:
        given, constants = prepared
        weights: Weights = given if selection is None else selection.whole(given)

        def logits_of(images: jax.Array) -> jax.Array:
            with nullcontext() if constants is None else using(constants):
                return spec.network.apply(*weights, images, ctx)[0]

        def one_batch(batch: dict[str, jax.Array]) -> PyTree:
            images, labels = spec.fetch(resident, batch)
            # A pass for each view, not one of as many images: the memory needed stays that of a plain validation.
            seen = (share * logits_of(view) for share, view in views(images, spec.flip, spec.shift))
            logits = reduce(jnp.add, seen)
            mask = batch.get("mask")
            kept = spec.reducer.keep(logits, labels, mask)
            return (kept, scores_of(logits, labels, mask)) if keeps_scores else kept

        # Batch by batch, so that a block of any length needs the activations of one batch only.
        if not spec.reducer.adds:
            return lax.map(one_batch, block)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), spec.sum_shapes())

        # A scan is harmless here: on the CPU only the gradients of convolutions are slow inside a loop, forward passes
        # are not.
        def add(total: Sums, batch: dict[str, jax.Array]) -> tuple[Sums, PyTree]:
            sums, stacked = one_batch(batch) if keeps_scores else (one_batch(batch), None)
            return jax.tree.map(jnp.add, total, sums), stacked

        total, stacked = lax.scan(add, zeros, block)
        # One exchange for a whole block, instead of one for each batch.
        total = lax.psum(total, REPLICA) if spec.num_replicas > 1 else total
        return total if stacked is None else total | {SCORES: stacked}

    if keeps_scores:
        return _on_mesh(forward, mesh, dict.fromkeys(spec.sum_shapes(), P()) | {SCORES: BATCHES})
    return _on_mesh(forward, mesh, P() if spec.reducer.adds else BATCHES)


def _on_mesh(program: Callable[[Any, Any, Any], PyTree], mesh: Mesh, out: P | dict[str, P]) -> jax.stages.Wrapped:
    mapped = jax.shard_map(program, mesh=mesh, in_specs=(P(), P(), BATCHES), out_specs=out, check_vma=False)
    return jax.jit(mapped)


def total_sums(parts: list[Sums]) -> dict[str, Any]:
    """Wait for the sums of all blocks and add them on the host, in float64 and int64: exact however many there are."""
    host = jax.device_get(parts)
    return {
        key: _joined([part[key] for part in host])
        if key == SCORES
        else sum(part[key].astype(np.int64 if part[key].dtype.kind == "i" else np.float64) for part in host)
        for key in host[0]
    }


def _joined(blocks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the scores and labels of all images that count, of blocks [n, B, ...] in their order."""
    counts = np.concatenate([block["mask"].reshape(-1) for block in blocks]) > 0
    names = ("scores", "labels")
    flat = {name: [block[name].reshape(-1, *block[name].shape[2:]) for block in blocks] for name in names}
    return {name: np.concatenate(each)[counts] for name, each in flat.items()}


def stored_for_inference(params: PyTree, compute_dtype: jax.typing.DTypeLike) -> PyTree:
    """Return the weights with those of convolutions and matrices in the dtype they are used in; the result is equal.

    Layers would round them at each use. Scales and shifts of norms are used in float32, and stay.
    """
    return jax.tree.map(lambda w: np.asarray(w).astype(compute_dtype) if w.ndim > 1 else w, params)
