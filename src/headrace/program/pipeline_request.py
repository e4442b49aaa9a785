"""What `pipeline()` was given: its arguments, checked before anything is traced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from headrace.core.errors import ConfigError
from headrace.core.tree import PyTree
from headrace.engine.accumulation import AccumulatorType, accumulator_dtype, check_accumulator
from headrace.program.gradients import check_offload, check_reduction
from headrace.program.infeed import Infeed
from headrace.program.outfeed import Outfeed, OutfeedMode
from headrace.program.stage import OptimizerOutput
from headrace.program.structure import MAX_COUNT, Structure, as_list, host_arrays, structure_of, whole_number


@dataclass(frozen=True, kw_only=True)
class PipelineRequest:
    """The arguments of `pipeline()`, which documents each."""

    stages: Any
    gradient_accumulation_count: int
    optimizer_function: Callable[..., OptimizerOutput] | None
    device_mapping: Sequence[int | Sequence[int]] | None
    pipeline_schedule: str
    inputs: Sequence[Any] | None
    infeed: Infeed | None
    outfeed: Outfeed | None
    repeat_count: int
    gradient_accumulation_dtype: AccumulatorType
    reduction_method: str
    recomputation: bool
    offload_weight_update_variables: bool | None
    replicated_optimizer_state_sharding: bool
    outfeed_loss: bool
    outfeed_mask: Sequence[bool] | None
    accumulate_outfeed: bool
    accumulate_outfeed_dtype: AccumulatorType
    replicas: int  # 0: as many as there are devices for; a specification has the number
    strict: bool


def check_values(request: PipelineRequest) -> None:
    """Refuse values that cannot work, whatever the stages are."""
    whole_number(request.gradient_accumulation_count, "gradient_accumulation_count", 1, MAX_COUNT)
    whole_number(request.repeat_count, "repeat_count", 1)
    check_reduction(request.reduction_method)
    check_offload(request.offload_weight_update_variables)
    for name, feed, kind in (("infeed", request.infeed, Infeed), ("outfeed", request.outfeed, Outfeed)):
        if feed is not None and not isinstance(feed, kind):
            raise ConfigError(f"{name} is of type {type(feed).__name__}.", rule=f"It is a headrace.{kind.__name__}.")
    training = request.optimizer_function is not None
    if training and not callable(request.optimizer_function):
        raise ConfigError(
            f"optimizer_function is of type {type(request.optimizer_function).__name__}.",
            rule="It is a function of the last stage's outputs that returns OptimizerOutput(optimizer, loss).",
        )
    check_accumulator(request.gradient_accumulation_dtype, "gradient_accumulation_dtype")
    check_accumulator(request.accumulate_outfeed_dtype, "accumulate_outfeed_dtype")
    needs_training = {
        "outfeed_loss": request.outfeed_loss,
        "outfeed_mask": request.outfeed_mask is not None,
        "offload_weight_update_variables": request.offload_weight_update_variables,
        "replicated_optimizer_state_sharding": request.replicated_optimizer_state_sharding,
        "gradient_accumulation_dtype": request.gradient_accumulation_dtype is not None,
        "recomputation": request.recomputation,
    }
    for name, given in needs_training.items():
        if given and not training:
            raise ConfigError(f"{name} is given, but there is no optimizer_function.", rule="It is for training.")
    _check_outfeed(request)


def _check_outfeed(request: PipelineRequest) -> None:
    if request.outfeed_loss and request.outfeed_mask is not None:
        raise ConfigError(
            "outfeed_loss and outfeed_mask are both given.",
            rule="Either the loss or the chosen outputs go to the outfeed.",
        )
    if request.accumulate_outfeed and (request.outfeed is None or request.outfeed.mode is not OutfeedMode.ALL):
        raise ConfigError(
            "accumulate_outfeed needs an outfeed of mode ALL.",
            rule="One sum over the micro batches leaves per step.",
            remedy="Give outfeed=Outfeed().",
        )
    if request.accumulate_outfeed_dtype is not None and not request.accumulate_outfeed:
        raise ConfigError(
            "accumulate_outfeed_dtype is given without accumulate_outfeed.", remedy="Add accumulate_outfeed=True."
        )


def run_constants(inputs: PyTree) -> tuple[PyTree, ...]:
    """Return the inputs of a run as host arrays; refuse what is not a list of them."""
    rule = "They are a list of values that stay the same for a run, such as a learning rate."
    given = as_list(inputs, "The inputs of a pipeline", rule)
    try:
        return tuple(host_arrays(value) for value in given)
    except jax.errors.TracerArrayConversionError:
        raise ConfigError(
            "The inputs of a pipeline are values of a function that JAX is tracing.",
            rule="The host drives a pipeline's devices, so it cannot be part of another device program.",
            remedy="Call pipeline() outside jit.",
        ) from None


def leaving_values(request: PipelineRequest, outputs: list[Structure], loss: Structure | None) -> Structure:
    """Return the structure of an outfeed row; refuse a mask of the wrong length, and outputs without an outfeed."""
    values = [value for structure in outputs for value in structure.shapes()]
    if request.outfeed_mask is not None:
        if len(request.outfeed_mask) != len(values):
            raise ConfigError(
                f"outfeed_mask has {len(request.outfeed_mask)} entries, but the last stage has {len(values)} outputs.",
                rule="It says of each output whether it is left out.",
            )
        values = [value for value, left_out in zip(values, request.outfeed_mask, strict=True) if not left_out]
    if request.outfeed_loss:
        assert loss is not None
        values = [loss.shapes()]
    if values and request.outfeed is None:
        raise ConfigError(
            f"The last stage has {len(values)} outputs, but there is no outfeed.",
            rule="The outputs of the last stage go to an outfeed.",
            remedy="Give outfeed=Outfeed()"
            + (", with outfeed_loss=True for the loss alone." if loss is not None else "."),
        )
    if not values and request.outfeed is not None:
        raise ConfigError("There is an outfeed, but nothing is left to put into it.", remedy="Leave the outfeed out.")
    if request.accumulate_outfeed:
        dtype = request.accumulate_outfeed_dtype
        values = [
            jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, accumulator_dtype(dtype, a, "dtype")), value)
            for value in values
        ]
    return structure_of(as_row(values))


def as_row(values: Sequence[object]) -> PyTree:
    """Return the value to enqueue: a single value as it is, several as a tuple."""
    return values[0] if len(values) == 1 else tuple(values)
