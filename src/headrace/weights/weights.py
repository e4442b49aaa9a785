"""The weights of a network as a value: in host memory, with where they come from and what it takes to use them."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from headrace.config.load import Resolved, network_changes
from headrace.config.schema import Config, Data
from headrace.core.errors import CheckpointError
from headrace.core.tree import PyTree, flatten_named
from headrace.model.context import Ctx
from headrace.model.network import Network
from headrace.rows.row import Scale, Task
from headrace.rows.tasks import CLASSIFICATION, TASKS
from headrace.weights.input_form import InputForm

_OUTPUTS = {
    "classification": "softmax of the logits",
    "multilabel": "sigmoid of the logits",
    "regression": "target_mean + target_std x logits",
}
RAW, EMA, AUTO = "raw", "ema", "auto"
Pair = tuple[PyTree, PyTree]  # params and running statistics


@dataclass(frozen=True, kw_only=True)
class TensorStatus:
    """How one tensor of the network got its value."""

    name: str
    status: Literal["loaded", "replaced", "fresh"]
    size: int
    theirs: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """What became of every tensor of a network and of a file that was loaded into it; without arguments, no file."""

    scheme: str = ""
    statuses: tuple[TensorStatus, ...] = ()
    unused: tuple[str, ...] = ()  # names in the file that match nothing
    share: float = 0.0  # of the network's numbers that were loaded, a head for other classes left out
    used_share: float = 0.0  # of the file's numbers
    prefixes: tuple[str, ...] = ()  # what names in the file begin with, before those of the scheme

    @property
    def not_loaded(self) -> list[TensorStatus]:
        """The tensors whose numbers did not come from the file."""
        return [tensor for tensor in self.statuses if tensor.status != "loaded"]

    def count(self, status: str) -> tuple[int, int]:
        """Return (tensors, numbers) of a status."""
        sizes = [tensor.size for tensor in self.statuses if tensor.status == status]
        return len(sizes), sum(sizes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """The weights of a network, float32; of a run also their moving average, where it was kept.

    `origin` names them in messages. `resolved` and `input_form` are there where a checkpoint or a known name says how
    the network was configured and what it takes.
    """

    network: Network
    params: PyTree
    stats: PyTree
    ema: Pair | None = None
    origin: str
    path: Path | None = None  # of the checkpoint
    step: int = 0
    epoch: float = 0.0
    label: str = RAW  # which weights `params` are: raw, ema, or the label of an average
    better: str = RAW  # of raw and ema, by the run's validation
    class_names: tuple[str, ...] = ()
    input_form: InputForm | None = None
    resolved: Resolved | None = None
    by_code: frozenset[str] = field(default_factory=frozenset)  # what options cannot give again: network, dataset, ...
    image_dtype: str = ""  # of the images that the run was trained on, where it is known
    loading: Loading = Loading()  # of a file
    remarks: tuple[str, ...] = ()  # lines for the user

    @property
    def config(self) -> Config:
        """The configuration that the network was made with."""
        assert self.resolved is not None, "weights of a plain file have no configuration"
        return self.resolved.config

    @property
    def task(self) -> Task:
        """What the network was trained to say of an image."""
        return TASKS[self.config.data.task] if self.resolved else CLASSIFICATION

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Return what outputs [N, C] say, in float64: the probabilities of classes or labels, or numbers."""
        return self.task.answer(logits, self.scale)

    @property
    def scale(self) -> Scale:
        """The scale of the targets of a regression."""
        data = self.config.data if self.resolved else Data()
        return Scale(mean=tuple(data.target_mean or ()), std=tuple(data.target_std or ()))

    @property
    def form(self) -> InputForm:
        """How images become the input."""
        assert self.input_form is not None, "weights of a plain file do not say what their network takes"
        return self.input_form

    @property
    def raw(self) -> Pair:
        """The raw weights, as (params, stats)."""
        return self.params, self.stats

    def sets(self) -> dict[str, Pair]:
        """Return the sets of weights, each as (params, stats): raw, and ema where it was kept."""
        return {RAW: self.raw} | ({EMA: self.ema} if self.ema else {})

    def only(self, which: str = AUTO) -> "Weights":
        """Return one set of weights alone: raw, ema, or auto for the better."""
        chosen = self.better if which == AUTO else which
        if chosen != EMA:
            return replace(self, ema=None)
        if self.ema is None:
            raise CheckpointError(f"{self.path} holds no averaged weights (ema).", remedy="Leave --use out.")
        params, stats = self.ema
        return replace(self, params=params, stats=stats, ema=None, label=EMA)

    def state(self, dtype: jax.typing.DTypeLike = np.float32) -> dict[str, Any]:
        """Return the weights as a run has them, raw parameters in the type that its precision stores them in."""
        params = jax.tree.map(lambda w: w.astype(dtype), self.params)
        ema = {"ema": dict(zip(("params", "stats"), self.ema, strict=True))} if self.ema else {}
        return {"params": params, "stats": self.stats} | ema

    def context(self, compute_dtype: jax.typing.DTypeLike = jnp.float32) -> Ctx:
        """Return the conditions under which the network is applied outside of a run."""
        config = self.config
        return Ctx(
            train=False,
            compute_dtype=compute_dtype,
            stable_norm=config.model.stable_norm,
            matmul_precision=config.numerics.matmul_precision if compute_dtype == jnp.float32 else "default",
        )

    def _described_task(self) -> dict[str, Any]:
        if self.task is CLASSIFICATION:
            return {}
        scale = {"target_mean": list(self.scale.mean), "target_std": list(self.scale.std)} if self.scale.std else {}
        return {"task": self.task.name, **scale}

    def describe(self) -> dict[str, Any]:
        """Return the description that is exported with the weights, as plain values."""
        form = self.form
        return {
            "model": self.network.name,
            "dialect": self.config.model.model_dialect,
            "options": network_changes(self.config.model),
            "image_hwc": list(self.network.input_hwc),
            "normalization": form.normalization,
            **({"mean": list(form.mean), "std": list(form.std)} if form.normalization == "per-channel" else {}),
            "resize_shorter_side": form.resized_side,
            "interpolation": form.interpolation,
            "antialias": form.antialias,
            "class_names": list(self.class_names),
            "output": _OUTPUTS[self.task.name],
            **self._described_task(),
            "checkpoint": Path(self.origin).name,
            "weights": self.label,
            "step": self.step,
            "epoch": self.epoch,
        }


def flat_weights(params: PyTree, stats: PyTree) -> dict[str, np.ndarray]:
    """Return {`params/...` or `stats/...`: array}, the names that checkpoints use."""
    return flatten_named({"params": params, "stats": stats})
