"""What XLA is told: the counterparts of the IPU compiler's options, taken by the JAX that is installed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config.schema import Compiler
from headrace.engine.compiler import (
    CONV_FUSION,
    common_options,
    compile_program,
    compiler_options,
    describe,
    describe_compiler_options,
    is_known,
)


def test_nothing_given_nothing_told():
    for backend in ("cpu", "gpu", "tpu"):
        assert describe(Compiler(), backend) == {}
    assert compiler_options(Compiler()) == {}


@pytest.mark.parametrize("target", ["cycles", "memory"])
@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_this_jax_takes_every_option(target, backend):
    """XLA's options are one list for all backends, so that those of a GPU can be looked up anywhere."""
    wanted = Compiler(
        internal_exchange_optimization_target=target,
        max_cross_replica_buffer_size=52_428_800,
        max_reduce_many_buffer_size=216,
        available_memory_proportion=(15.0,),
    )
    for options in describe(wanted, backend).values():
        for name, value in options.items():
            assert is_known(name, value), name


def test_balanced_is_what_xla_does_anyway():
    for backend in ("cpu", "gpu", "tpu"):
        assert describe(Compiler(internal_exchange_optimization_target="balanced"), backend) == {}


def test_sizes_and_shares():
    wanted = Compiler(max_cross_replica_buffer_size=100_000_000, available_memory_proportion=(60, 16))
    assert describe(wanted, "gpu") == {
        "max_cross_replica_buffer_size": {"xla_gpu_all_reduce_combine_threshold_bytes": 100_000_000},
        "available_memory_proportion": {"xla_gpu_memory_limit_slop_factor": 60},
    }
    percent = describe(Compiler(available_memory_proportion=(13.5,)), "gpu")
    assert percent == {"available_memory_proportion": {"xla_gpu_memory_limit_slop_factor": 14}}
    assert describe(wanted, "cpu") == {}


def test_an_option_that_jax_does_not_know_is_found_out():
    assert not is_known("xla_gpu_no_such_option", 1)
    assert not is_known("xla_cpu_scheduler_type", "NO_SUCH_TYPE")


def test_what_xla_is_told_is_said():
    assert describe_compiler_options(Compiler(internal_exchange_optimization_target="memory"), "cpu") == [
        "compiler: internal_exchange_optimization_target is XLA's "
        "xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    ]


@pytest.mark.parametrize("target", ["cycles", "memory"])
def test_a_program_computes_the_same(target):
    options = compiler_options(Compiler(internal_exchange_optimization_target=target))
    assert options
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    lowered = jax.jit(lambda x: jnp.tanh(x @ x.T)).lower(x)
    np.testing.assert_array_equal(lowered.compile(compiler_options=options)(x), lowered.compile()(x))


def test_gpu_programs_get_known_options_unless_xla_flags_set_them(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert common_options() == {"xla_gpu_graph_min_graph_size": 2}
    assert compiler_options(Compiler()) == common_options()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_graph_min_graph_size=5")
    assert common_options() == {}


class Refusing:
    """A lowered program that XLA refuses with some options."""

    def __init__(self, *refused):
        self.refused, self.tried = refused, []

    def compile(self, compiler_options):
        self.tried.append(compiler_options)
        if any(name in (compiler_options or {}) for name in self.refused):
            raise jax.errors.JaxRuntimeError("INTERNAL: no plan")
        return "compiled"


def test_a_convolution_without_a_plan_is_compiled_the_older_way():
    lowered: Any = Refusing(CONV_FUSION)
    assert compile_program(lowered, {CONV_FUSION: True, "xla_gpu_graph_min_graph_size": 2}) == "compiled"
    assert lowered.tried[-1] == {"xla_gpu_graph_min_graph_size": 2}
    lowered: Any = Refusing()
    assert compile_program(lowered, {CONV_FUSION: True}) == "compiled"
    assert lowered.tried == [{CONV_FUSION: True}]


def test_another_failure_of_the_compiler_is_not_hidden():
    lowered: Any = Refusing(CONV_FUSION, "other")
    with pytest.raises(jax.errors.JaxRuntimeError, match="no plan"):
        compile_program(lowered, {CONV_FUSION: True, "other": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no plan"):
        compile_program(lowered, {"other": 1})
    assert len(lowered.tried) == 3


def test_quick_tuning_is_for_gpus():
    quick = Compiler(convolution_tuning="quick")
    assert describe(quick, "gpu") == {"convolution_tuning": {CONV_FUSION: True}}
    assert describe(quick, "cpu") == describe(quick, "tpu") == describe(Compiler(), "gpu") == {}
    assert is_known(CONV_FUSION, True)
