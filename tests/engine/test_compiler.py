"""What XLA is told: the counterparts of the IPU compiler's options, taken by the JAX that is installed."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config.schema import Compiler
from headrace.core.session import session
from headrace.engine.compiler import (
    CONCURRENT,
    CONV_FUSION,
    common_options,
    compile_program,
    compiler_options,
    compiles_alone,
    decide,
    describe,
    describe_compiler_options,
    is_known,
)
from headrace.engine.devices import count_compilations


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
    given = Compiler(internal_exchange_optimization_target="memory")
    assert describe_compiler_options(given, decide(given, 1e9, one_device=True), "cpu") == [
        "compiler: internal_exchange_optimization_target is XLA's "
        "xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    ]


def test_what_several_devices_rule_out_is_said():
    given = Compiler(convolution_tuning="quick", concurrent_kernels="on")
    one, two = (decide(given, 1e9, one_device=one_device) for one_device in (True, False))
    assert describe_compiler_options(given, two, "gpu") == [
        "compiler: convolution_tuning is full here, not quick, which is for one device",
        "compiler: concurrent_kernels is off here, not on, which is for one device",
    ]
    assert describe_compiler_options(given, one, "gpu") == [
        f"compiler: convolution_tuning is XLA's {CONV_FUSION}=True",
        f"compiler: concurrent_kernels is XLA's {CONCURRENT}=CONCURRENT",
    ]
    assert describe_compiler_options(Compiler(), decide(Compiler(), 1e9, one_device=True), "gpu") == []


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
    assert common_options() == {"xla_gpu_graph_min_graph_size": 2, "xla_allow_excess_precision": False}
    assert compiler_options(Compiler()) == common_options()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_graph_min_graph_size=5")
    assert common_options() == {"xla_allow_excess_precision": False}


def test_gradients_of_several_gpus_are_exchanged_in_parts(monkeypatch):
    name = "xla_gpu_all_reduce_combine_threshold_bytes"
    assert name not in compiler_options(Compiler(), exchanging=True), "only GPUs have it"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert name not in compiler_options(Compiler())
    assert compiler_options(Compiler(), exchanging=True)[name] == 8 << 20
    given = Compiler(max_cross_replica_buffer_size=1 << 20)
    assert compiler_options(given, exchanging=True)[name] == 1 << 20
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=5")
    assert name not in compiler_options(Compiler(), exchanging=True)


class Refusing:
    """A lowered program that XLA refuses with some options, or that fails when it first runs with them."""

    args_info = ((jax.ShapeDtypeStruct((2,), np.float32),), {})

    def __init__(self, *refused, at_first_run=False, message="INTERNAL: no plan"):
        self.refused, self.at_first_run, self.message = refused, at_first_run, message
        self.tried, self.ran = [], []

    def compile(self, compiler_options):
        self.tried.append(compiler_options)
        fails = any(name in (compiler_options or {}) for name in self.refused)
        if fails and not self.at_first_run:
            raise jax.errors.JaxRuntimeError(self.message)
        return Loaded(self, fails)


class Loaded:
    """A compiled program."""

    input_shardings = ((jax.sharding.SingleDeviceSharding(jax.devices()[0]),), {})

    def __init__(self, lowered, fails):
        self.lowered, self.fails = lowered, fails

    def __call__(self, *arguments):
        if self.fails:
            raise jax.errors.JaxRuntimeError(self.lowered.message)
        self.lowered.ran.append([np.asarray(each).tolist() for each in arguments])


@pytest.mark.parametrize("at_first_run", [False, True])
def test_a_convolution_without_a_plan_is_compiled_the_older_way_which_is_said(at_first_run):
    lowered: Any = Refusing(CONV_FUSION, at_first_run=at_first_run)
    with count_compilations() as counts:
        compile_program(lowered, {CONV_FUSION: True, "xla_gpu_graph_min_graph_size": 2})
    assert lowered.tried[-1] == {"xla_gpu_graph_min_graph_size": 2}
    assert str(counts).count("tuned in full") == len(counts.fallbacks) == 1


def test_a_program_with_recommended_plans_runs_once_on_zeros_while_no_other_thread_uses_the_devices():
    lowered: Any = Refusing()
    under_way, may_end, order = threading.Event(), threading.Event(), []

    def send(name, begun, end):
        with session().devices.transferring():
            order.append(name)
            begun.set()
            end.wait(10)

    first = threading.Thread(target=send, args=("first", under_way, may_end))
    first.start()
    under_way.wait(10)
    compiling = threading.Thread(target=lambda: (compile_program(lowered, {CONV_FUSION: True}), order.append("run")))
    compiling.start()
    compiling.join(0.1)
    assert not lowered.tried  # a transfer is under way
    late = threading.Thread(target=send, args=("late", threading.Event(), may_end))
    late.start()
    late.join(0.1)
    assert order == ["first"]  # it waits for the compilation
    may_end.set()
    for thread in (first, compiling, late):
        thread.join(10)
    assert lowered.ran == [[[0.0, 0.0]]]
    assert sorted(order) == ["first", "late", "run"]


def test_a_loop_of_this_jax_accepts_the_zeros():
    def call(state, block, num_steps):
        return jax.lax.fori_loop(0, num_steps, lambda i, state: {"w": state["w"] + block[i]}, state)

    state, block = {"w": jnp.ones(3, jnp.bfloat16)}, jnp.ones((4, 3), jnp.bfloat16)
    lowered = jax.jit(call, donate_argnums=0).lower(state, block, jnp.int32(1))
    program = compile_program(lowered, {CONV_FUSION: True})
    assert program(state, block, jnp.int32(4))["w"].tolist() == [5.0, 5.0, 5.0]


def test_another_failure_of_the_compiler_is_not_hidden():
    lowered: Any = Refusing(CONV_FUSION, "other")
    with pytest.raises(jax.errors.JaxRuntimeError, match="no plan"):
        compile_program(lowered, {CONV_FUSION: True, "other": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no plan"):
        compile_program(lowered, {"other": 1})
    assert len(lowered.tried) == 3


@pytest.mark.parametrize(
    ("wanted", "flops", "one_device", "decided"),
    [
        (("auto", "auto"), 170e9, True, ("quick", "on")),  # ResNet-50 at 128 px, batch 64
        (("auto", "auto"), 2.1e12, True, ("full", "off")),  # at 224 px, batch 256
        (("quick", "auto"), 2.1e12, True, ("quick", "on")),
        (("full", "auto"), 1e9, True, ("full", "off")),
        (("auto", "auto"), 1e9, False, ("full", "off")),
        (("quick", "on"), 1e9, False, ("full", "off")),
        (("auto", "off"), 1e9, True, ("quick", "off")),
        (("full", "on"), 2.1e12, True, ("full", "on")),
    ],
)
def test_tuning_is_quick_and_kernels_run_together_where_a_micro_batch_is_little_work(
    wanted, flops, one_device, decided
):
    def options(values):
        return Compiler(convolution_tuning=values[0], concurrent_kernels=values[1])

    assert decide(options(wanted), flops, one_device=one_device) == options(decided)


def test_kernels_run_together_on_gpus_alone():
    together = Compiler(concurrent_kernels="on")
    assert describe(together, "gpu") == {"concurrent_kernels": {CONCURRENT: "CONCURRENT"}}
    assert describe(together, "cpu") == describe(together, "tpu") == describe(Compiler(), "gpu") == {}
    assert is_known(CONCURRENT, "CONCURRENT")
    assert not is_known(CONCURRENT, "TOGETHER")


@pytest.mark.parametrize("at_first_run", [False, True])
def test_kernels_run_one_after_the_other_where_memory_does_not_suffice_which_is_said(at_first_run):
    lowered: Any = Refusing(CONCURRENT, at_first_run=at_first_run, message="RESOURCE_EXHAUSTED: Out of memory.")
    with count_compilations() as counts:
        compile_program(lowered, {CONV_FUSION: True, CONCURRENT: "CONCURRENT", "xla_gpu_graph_min_graph_size": 2})
    assert lowered.tried[-1] == {CONV_FUSION: True, "xla_gpu_graph_min_graph_size": 2}
    assert lowered.ran == [[[0.0, 0.0]]]
    assert "memory did not suffice for concurrent kernels" in str(counts)
    assert "tuned in full" not in str(counts)


def test_what_fails_in_both_ways_is_compiled_without_either():
    lowered: Any = Refusing(CONV_FUSION, message="RESOURCE_EXHAUSTED: Out of memory.")
    with count_compilations() as counts:
        compile_program(lowered, {CONV_FUSION: True, CONCURRENT: "CONCURRENT"})
    assert [sorted(tried) for tried in lowered.tried] == [sorted((CONV_FUSION, CONCURRENT)), [CONV_FUSION], []]
    assert "memory did not suffice for quick convolution tuning" in str(counts)
    assert len(counts.fallbacks) == 2


def test_kernels_run_one_after_the_other_with_full_tuning_too_where_memory_does_not_suffice():
    lowered: Any = Refusing(CONCURRENT, at_first_run=True, message="RESOURCE_EXHAUSTED: Out of memory.")
    compile_program(lowered, {CONCURRENT: "CONCURRENT"})
    assert lowered.tried == [{CONCURRENT: "CONCURRENT"}, {}]
    other: Any = Refusing(CONCURRENT)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no plan"):
        compile_program(other, {CONCURRENT: "CONCURRENT"})


def test_quick_tuning_is_for_gpus(monkeypatch):
    quick = Compiler(convolution_tuning="quick")
    assert describe(quick, "gpu") == {"convolution_tuning": {CONV_FUSION: True}}
    assert describe(quick, "cpu") == describe(quick, "tpu") == describe(Compiler(), "gpu") == {}
    assert is_known(CONV_FUSION, True)
    assert not compiles_alone(quick)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compiles_alone(quick)
    assert not compiles_alone(Compiler(convolution_tuning="full"))


@pytest.mark.parametrize(("version", "most"), [((0, 10, 2), 2), ((0, 11, 0), 1)])
def test_programs_for_cpus_are_compiled_one_at_a_time_where_the_compiler_needs_it(version, most, monkeypatch):
    both, inside, seen = threading.Event(), [], []

    class Slow:
        def compile(self, compiler_options: Any) -> None:
            inside.append(self)
            seen.append(len(inside))
            if len(inside) == 2:
                both.set()
            both.wait(0.3)
            inside.remove(self)

    monkeypatch.setattr(jax, "__version_info__", version)
    program: Any = Slow
    threads = [threading.Thread(target=compile_program, args=(program(), {})) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(seen) == most
