"""pipeline() refuses what cannot work, with a remedy, before anything runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from headrace import HeadraceError, Infeed, OptimizerOutput, Outfeed, Stage, accumulate_gradients, pipeline
from headrace.job import ProcessGroup

W, V = np.ones((3, 2), np.float32), np.ones(2, np.float32)


def a(p, x):
    return x @ p


def b(p, h):
    return jnp.mean(h @ p)


def finish(loss):
    return OptimizerOutput(optax.sgd(0.1), loss)


def make(stages=None, count: object = 2, **options):
    """Make a small training pipeline with something changed; an option of None is left out."""
    stages = [Stage(a, W), Stage(b, V)] if stages is None else stages
    given = {"optimizer_function": finish, "outfeed": Outfeed(), "infeed": Infeed([np.ones((4, 3))] * 4)} | options
    return pipeline(stages, count, **{name: value for name, value in given.items() if value is not None})  # pyright: ignore[reportArgumentType]


def test_what_is_right_is_taken():
    pipe = make()
    assert np.allclose(pipe(pipe.init()).params[1], 1 - 0.1 * 2 * 3)  # d mean(h v) / dv = mean(h) = 3, twice


SHARED, LEAF = {"w": np.ones(2, np.float32)}, np.ones(2, np.float32)
SCALAR = np.float32(2)
TWO_FUNCTIONS = [Stage(a, W), [Stage(b, V), Stage(b, 2 * V)], lambda x, y: x + y]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # the stages
        ({"stages": [Stage(a, W)]}, "has 1 stage.*at least two"),
        ({"stages": Stage(a, W)}, "stages are of type Stage"),
        ({"stages": {"a": a, "b": b}}, "stages are of type dict"),
        ({"stages": [Stage(a, W), 3]}, "Stage 1 is of type int"),
        ({"stages": [Stage(a, W), [[b], b]]}, "one level deep"),
        ({"stages": [Stage(a, W), []]}, "Stage 1 has 0 functions"),
        ({"stages": [Stage(a, np.ones((3, 2), np.int32)), Stage(b, V)]}, "stage 0 hold an array of int32.*state="),
        ({"stages": [Stage(a, W), Stage(a, W), Stage(b, V)]}, r"Stages 0 and 1 share weights.*devices 0 and 1"),
        ({"stages": [Stage(a, W), [Stage(b, SHARED), Stage(b, SHARED)]]}, "functions 1a and 1b of one stage share"),
        ({"stages": [Stage(a, {"w": LEAF}), Stage(b, [LEAF])]}, "same array or NumPy scalar in different params"),
        ({"stages": [Stage(a, {"w": SCALAR}), Stage(b, [SCALAR])]}, "same array or NumPy scalar in different params"),
        ({"stages": [Stage(a, SCALAR), Stage(b, SCALAR)]}, r"Stages 0 and 1 share weights.*devices 0 and 1"),
        ({"offload_weight_update_variables": "yes"}, r"offload_weight_update_variables is 'yes'.*True, False, or None"),
        # their arguments
        ({"stages": [Stage(lambda p, x, y: x, W), Stage(b, V)]}, r"Stage 0 .* 1 argument after its params.*Thread"),
        ({"stages": [Stage(a, W), Stage(lambda p: p, V)]}, r"Stage 1 .* cannot be called with 1 argument"),
        ({"stages": [lambda x, y: x, Stage(b, V)]}, r"Stage 0 .* cannot be called with 1 argument\."),
        ({"stages": [Stage(a, W), [lambda h: h, lambda h, k: h], lambda x, y: x]}, "Stage 1b .* 1 argument"),
        ({"infeed": Infeed([{"z": np.ones((4, 3))}])}, "0 arguments and the names z"),
        ({"inputs": [0.1]}, "2 arguments"),
        ({"inputs": 0.1}, "inputs of a pipeline are of type float"),
        ({"stages": [Stage(lambda p, s, x: x, W, {"n": 0}), Stage(b, V)]}, r"did not return a pair"),
        ({"stages": [Stage(lambda p, s, x: (x, s + 0.5), W, 0), Stage(b, V)]}, r"float32\[\].*given \(int32\[\]\)"),
        # numbers and names
        ({"count": None}, "gradient_accumulation_count is None"),
        ({"count": 0}, "gradient_accumulation_count is 0"),
        ({"count": 2**31}, "2,147,483,647"),
        ({"count": 2.0}, "whole number"),
        ({"repeat_count": 0}, "repeat_count is 0"),
        ({"replicas": 0}, "replicas is 0"),
        ({"replicas": 5}, "10 devices are needed"),
        ({"pipeline_schedule": "Groupd"}, "Did you mean Grouped"),
        ({"reduction_method": "MAX"}, "SUM, MEAN, RUNNING_MEAN"),
        ({"gradient_accumulation_dtype": "int8"}, "gradient_accumulation_dtype is 'int8'"),
        ({"gradient_accumulation_dtype": lambda w: jnp.int8}, "gradient_accumulation_dtype returned"),
        # devices
        ({"device_mapping": [0]}, "device_mapping has 1 entries, but there are 2 stages"),
        ({"device_mapping": [0, 2]}, "device 1 has nothing to do"),
        ({"device_mapping": [0, [1, 2]]}, "stage is a single function"),
        ({"stages": TWO_FUNCTIONS, "device_mapping": [0, 1, 2]}, "stage has 2 functions"),
        ({"stages": TWO_FUNCTIONS, "device_mapping": [0, [1, 2, 3], 2]}, "3 devices, but the stage has 2"),
        ({"stages": TWO_FUNCTIONS, "device_mapping": [0, [1, [2]], 2]}, "one level deep"),
        # what only the original hardware asks for
        ({"strict": True}, "not a multiple of 4, which Grouped.*strict=True"),
        (
            {"strict": True, "pipeline_schedule": "Interleaved", "device_mapping": [0, 0]},
            "cannot train two stages on one device under strict=True",
        ),
        # feeds
        ({"infeed": [1, 2]}, r"infeed is of type list.*headrace\.Infeed"),
        ({"outfeed": []}, r"outfeed is of type list.*headrace\.Outfeed"),
        ({"outfeed": None}, r"1 outputs, but there is no outfeed.*outfeed_loss=True"),
        ({"outfeed": None, "optimizer_function": None}, r"there is no outfeed.*Give outfeed=Outfeed\(\)\.$"),
        ({"outfeed_mask": [True]}, "nothing is left"),
        ({"outfeed_mask": [True, False]}, "outfeed_mask has 2 entries, but the last stage has 1 outputs"),
        ({"outfeed_mask": [False], "outfeed_loss": True}, "both given"),
        ({"outfeed_loss": True, "optimizer_function": None}, "outfeed_loss is given, but there is no optimizer"),
        ({"outfeed_mask": [False], "optimizer_function": None}, "outfeed_mask is given, but there is no optimizer"),
        ({"recomputation": True, "optimizer_function": None}, "recomputation is given, but there is no optimizer"),
        (
            {"offload_weight_update_variables": True, "optimizer_function": None},
            "offload_weight.*there is no optimizer",
        ),
        ({"accumulate_outfeed": True, "outfeed": Outfeed(mode="LAST")}, "needs an outfeed of mode ALL"),
        ({"accumulate_outfeed_dtype": jnp.float32}, "without accumulate_outfeed"),
        # the optimizer
        ({"optimizer_function": optax.sgd(0.1)}, "optimizer_function is of type GradientTransf"),
        ({"optimizer_function": lambda loss: loss}, "returned a .*Tracer"),
        ({"optimizer_function": lambda loss: OptimizerOutput(0.1, loss)}, "optimizer of the pipeline is of type float"),
        ({"optimizer_function": lambda x: OptimizerOutput(0.1, x, (x,))}, "optimizer of the pipeline is of type float"),
        ({"optimizer_function": lambda x: OptimizerOutput(lambda r: r, x, (x,))}, "called with its arguments"),
        (
            {"optimizer_function": lambda x: OptimizerOutput(optax.sgd(0.1), "loss")},
            "loss of the pipeline is of type str",
        ),
        (
            {"optimizer_function": lambda x: OptimizerOutput(optax.sgd(0.1), x, apart="no")},  # pyright: ignore[reportArgumentType]
            "apart is 'no'.*True.*False",
        ),
        ({"optimizer_function": lambda x: OptimizerOutput(optax.sgd(0.1), x[None])}, r"float32\[1\].*mean"),
        ({"optimizer_function": lambda x: OptimizerOutput(optax.sgd(0.1), jnp.int32(x))}, r"loss.*int32\[\]"),
        ({"optimizer_function": lambda x: OptimizerOutput(optax.sgd(x), x)}, r"holds values.*arguments=\(rate,\)"),
        (
            {"optimizer_function": lambda x: OptimizerOutput(accumulate_gradients(optax.sgd(0.1), 2), x)},
            "accumulates them itself",
        ),
        (
            {
                "optimizer_function": lambda x: OptimizerOutput(
                    optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), x
                )
            },
            "accumulates them itself",
        ),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(HeadraceError, match=message):
        make(**options)


def test_equal_numbers_of_python_are_not_shared_weights():
    """The compiler of Python makes one object of them, whatever the user meant."""
    scale = (2.0,)
    pipe = make([Stage(lambda p, x: x * p[0], scale), Stage(lambda p, x: jnp.mean(x * p[0]), scale)])
    first, second = pipe(pipe.init()).params
    assert np.allclose([first[0], second[0]], 2 - 0.1 * 2 * 2)  # each has its own gradient


def test_processes_must_divide_the_replicas(monkeypatch):
    monkeypatch.setattr("headrace.program.pipeline_spec.current_group", lambda: ProcessGroup(0, 2))
    with pytest.raises(HeadraceError, match=r"replicas is 3, but there are 2 processes.*a multiple of 2"):
        make(replicas=3)


def test_an_error_inside_a_stage_says_which():
    with pytest.raises(TypeError) as caught:
        make(stages=[Stage(a, W), Stage(lambda p, h: h @ W, V)])
    assert any("Stage 1 (<lambda>)" in note for note in caught.value.__notes__)


def test_runs_refuse_what_does_not_fit():
    pipe, other = make(), make()
    with pytest.raises(HeadraceError, match="not one of this pipeline"):
        pipe(other.init())
    with pytest.raises(HeadraceError, match=r"given to this run is \(0: float32\[\]\) instead of \(nothing\)"):
        pipe(pipe.init(), inputs=[1.0])
    state = pipe(pipe(pipe.init()))
    with pytest.raises(HeadraceError, match="0 elements are left; needed for a step of the pipeline: 2"):
        pipe(state)


def test_a_pipeline_is_not_part_of_another_program():
    with pytest.raises(HeadraceError, match="outside jit"):
        jax.jit(lambda x: pipeline([lambda x: x, lambda x: x], 1, inputs=[x], outfeed=Outfeed()))(1.0)


def test_an_optimizer_that_takes_one_stage_only_is_told_of_apart():
    """Its error comes before anything runs, and says what it was called with."""

    def update(updates, state, params=None):
        del params
        (gradient,) = jax.tree.leaves(updates)
        return jax.tree.map(lambda _: -0.1 * gradient, updates), state

    one = optax.GradientTransformation(lambda params: (), update)
    with pytest.raises(ValueError, match="too many values") as caught:
        make(optimizer_function=lambda loss: OptimizerOutput(one, loss))
    assert any("of all stages together; OptimizerOutput(..., apart=True)" in note for note in caught.value.__notes__)
    make(optimizer_function=lambda loss: OptimizerOutput(one, loss, apart=True))
