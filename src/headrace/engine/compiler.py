"""XLA's compiler options for a training program: the counterparts of the IPU compiler's options, by backend.

They are passed to each compilation, not in XLA_FLAGS, where an unknown name ends the process; and only those that this
JAX knows, since options come and go between its versions.
"""

import functools
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from headrace.config.schema import Compiler
from headrace.core.session import session
from headrace.core.tree import PyTree
from headrace.engine.devices import count_fallback, host_device
from headrace.ops.tracing import target

Options = Mapping[str, Any]
OptionItems = tuple[tuple[str, Any], ...]  # hashable, for specifications

EFFORT_O2 = 29  # one of XLA's effort levels, as its ExecutionOptions number them

# What XLA optimises for; balanced is its default.
_TARGETS: Mapping[str, Mapping[str, Options]] = {
    "gpu": {
        "cycles": {"optimization_level": EFFORT_O2, "xla_gpu_enable_latency_hiding_scheduler": True},
        "memory": {"memory_fitting_level": EFFORT_O2, "xla_gpu_enable_latency_hiding_scheduler": False},
    },
    "tpu": {
        "cycles": {"optimization_level": EFFORT_O2},
        "memory": {"memory_fitting_level": EFFORT_O2},
    },
    "cpu": {
        "cycles": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_CONCURRENCY_OPTIMIZED"},
        "memory": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},
    },
}


# Set in every program of a network.
_ALWAYS: Mapping[str, Options] = {
    "gpu": {
        # XLA replays kernels between two convolutions as a CUDA graph from 5 on by default, and launches fewer one by
        # one, which a small network waits for: ResNet-8 at batch 32 was up to 30 % slower so.
        "xla_gpu_graph_min_graph_size": 2,
        # By default XLA leaves out a conversion to 16 bits and back, and stores images and gradients in 32 where
        # float32 is needed next (a mean, the gradient of a norm): a step of EfficientNet-B0 at batch 256 moves 57.7
        # instead of 45.9 GB outside of convolutions. It also makes rounding what the program says.
        "xla_allow_excess_precision": False,
    }
}


def _target(value: str, backend: str) -> Options:
    return _TARGETS.get(backend, {}).get(value, {})


def _all_reduce(size: int, backend: str) -> Options:
    return {"xla_gpu_all_reduce_combine_threshold_bytes": size} if backend == "gpu" else {}


def _scatter(size: int, backend: str) -> Options:
    names = ("reduce_scatter", "all_gather")
    return {f"xla_gpu_{name}_combine_threshold_bytes": size for name in names} if backend == "gpu" else {}


def _memory_limit(values: tuple[float, ...], backend: str) -> Options:
    """Limit the memory that the compiler plans with to the largest of the percentages."""
    return {"xla_gpu_memory_limit_slop_factor": max(1, round(max(values)))} if backend == "gpu" else {}


# XLA's newer way to cuDNN: a convolution is a fusion, and the few plans that cuDNN recommends are tried instead of all
# that it has. Trying them is most of a compilation.
CONV_FUSION = "xla_gpu_experimental_enable_conv_fusion"


# Of a micro batch, forward. Up to 262e9 (ResNet-50 at 224 px, batch 32) steps on an H200 were as fast with the
# recommended plans as with the best of all, or faster; at 2.1e12 (batch 256) 7 % slower.
_QUICK_FLOPS = 300e9


def _convolution_tuning(value: str, backend: str) -> Options:
    return {CONV_FUSION: True} if backend == "gpu" and value == "quick" else {}


# How kernels of a CUDA graph wait for each other. By default each waits for all that XLA scheduled before it; here only
# for those that write what it reads or read what it writes, as two gradients of a convolution do not. Images per second
# of training on an H200: 111,761 instead of 89,224 (ResNet-8 for CIFAR, batch 32), 14,069 instead of 13,041 (ResNet-50,
# 64 images of 128 px), 4,901 instead of 4,450 (32 of 224 px). XLA then shares less memory between arrays: 1.41 instead
# of 1.18 GB in the second. Kernels of large work fill the device alone: 7,792 instead of 7,900 (256 of 224 px).
CONCURRENT = "xla_gpu_command_buffer_scheduling_mode"


def _concurrent_kernels(value: str, backend: str) -> Options:
    return {CONCURRENT: "CONCURRENT"} if backend == "gpu" and value == "on" else {}


def decide(compiler: Compiler, flops: float, *, one_device: bool) -> Compiler:
    """Return the options with each `auto` decided, by the FLOPs of a micro batch's forward pass.

    Quick tuning is for one device: several run their first call at the same time, which building its plans does not
    survive. With it convolutions are in CUDA graphs, and kernels at the same time pay.
    """
    tuning, kernels = compiler.convolution_tuning, compiler.concurrent_kernels
    if tuning == "auto":
        tuning = "quick" if flops <= _QUICK_FLOPS else "full"
    tuning = tuning if one_device else "full"
    if kernels == "auto":
        kernels = "on" if tuning == "quick" else "off"
    return replace(compiler, convolution_tuning=tuning, concurrent_kernels=kernels if one_device else "off")


# option -> its XLA options, by its value and the backend; none where it has no counterpart
COUNTERPARTS: Mapping[str, Callable[[Any, str], Options]] = {
    "convolution_tuning": _convolution_tuning,
    "concurrent_kernels": _concurrent_kernels,
    "internal_exchange_optimization_target": _target,
    "max_cross_replica_buffer_size": _all_reduce,
    "max_reduce_many_buffer_size": _scatter,
    "available_memory_proportion": _memory_limit,
}


def describe(compiler: Compiler, backend: str) -> dict[str, Options]:
    """Return {option: its XLA options} of the options that are given and have any on a backend."""
    given = {name: getattr(compiler, name) for name in COUNTERPARTS}
    found = {name: COUNTERPARTS[name](value, backend) for name, value in given.items() if value not in (None, ())}
    return {name: options for name, options in found.items() if options}


# Gradients that replicas exchange while the backward pass goes on are added up in parts of about this size; XLA's own
# are 30 MiB. Compiled for eight H200, 80 instead of 40 % of a ResNet-18's bytes are sent beside convolutions.
_BUCKETS: Options = {"xla_gpu_all_reduce_combine_threshold_bytes": 8 << 20}


def compiler_options(compiler: Compiler, *, exchanging: bool = False) -> dict[str, Any]:
    """Return the XLA options for the target, without those that this JAX does not know.

    `exchanging`: replicas exchange gradients while the backward pass goes on.
    """
    set_already = os.environ.get("XLA_FLAGS", "")
    buckets = _BUCKETS if exchanging and target().platform == "gpu" else {}
    options = {name: value for name, value in buckets.items() if name not in set_already}
    for row in describe(compiler, target().platform).values():
        options |= row
    # An unknown name would end the compilation with an error; `describe_compiler_options` reports it instead.
    return common_options() | {name: value for name, value in options.items() if is_known(name, value)}


def compiles_alone(compiler: Compiler) -> bool:
    """Say whether programs with these options are compiled while nothing else happens on this process's devices."""
    return bool({"convolution_tuning", "concurrent_kernels"} & describe(compiler, target().platform).keys())


def common_options() -> dict[str, Any]:
    """Return the XLA options of every program for the target; what XLA_FLAGS set stays as it is."""
    set_already = os.environ.get("XLA_FLAGS", "")
    options = _ALWAYS.get(target().platform, {})
    # Options of a compilation would override the flags, and a user who sets one wants to see what it does.
    return {name: value for name, value in options.items() if name not in set_already and is_known(name, value)}


# The CPU compiler of jaxlib 0.11 crashes when two threads compile at once (a segmentation fault in about one of four
# runs of tests/program/test_pipeline.py). With 0.10, and on GPUs, that was never seen.
_alone = threading.Lock()


def _compiling() -> AbstractContextManager[Any]:
    return _alone if jax.default_backend() == "cpu" and jax.__version_info__ >= (0, 11) else nullcontext()


class Lowered(Protocol):
    """A program to be compiled: JAX's, or one of `stored_programs.py`."""

    @property
    def args_info(self) -> PyTree:
        """Shapes and dtypes of its arguments; of one on disk, once it is compiled."""
        ...

    def compile(self, compiler_options: Any) -> jax.stages.Compiled:
        """Compile it."""
        ...


def compile_program(lowered: Lowered, options: Options) -> jax.stages.Compiled:
    """Compile a program; where it fails with CONV_FUSION, or needs too much memory with CONCURRENT, without them."""
    left = dict(options)
    if not {CONV_FUSION, CONCURRENT} & left.keys():
        with _compiling():
            return lowered.compile(compiler_options=left or None)
    with session().devices.exclusive():
        jax.block_until_ready(jax.live_arrays())  # transfers that were begun and not waited for
        while {CONV_FUSION, CONCURRENT} & left.keys():
            try:
                compiled = lowered.compile(compiler_options=dict(left))
                # A program, also one from the cache, builds its plans when it first runs: now, while nothing disturbs
                # it. It also shows whether its memory suffices.
                jax.block_until_ready(compiled(*_zeros(lowered, compiled)))
            except jax.errors.JaxRuntimeError as error:
                is_memory = is_out_of_memory(error)
                if is_memory and CONCURRENT in left:
                    del left[CONCURRENT]
                    count_fallback("memory did not suffice for concurrent kernels, which are off")
                    continue
                if CONV_FUSION not in left:
                    raise
                left.pop(CONV_FUSION)  # which shapes cuDNN has no plan for is written nowhere
                left.pop(CONCURRENT, None)
                why = "memory did not suffice for quick convolution tuning" if is_memory else "quick tuning failed"
                count_fallback(f"{why}, so convolutions were tuned in full")
            else:
                return compiled
    return lowered.compile(compiler_options=left)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Say whether an error is a device's that has no memory left."""
    # JAX has no class of its own for this: the status is part of XLA's message.
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def _zeros(lowered: Lowered, compiled: jax.stages.Compiled) -> PyTree:
    """Return arguments for a program; a call's number of steps is 0."""
    arguments, _ = lowered.args_info
    where, _ = compiled.input_shardings
    # Sent, not made on the device: every shape would be another program to compile.
    return jax.tree.map(lambda each, on: jax.device_put(np.zeros(each.shape, each.dtype), on), arguments, where)


def describe_compiler_options(given: Compiler, decided: Compiler, backend: str) -> list[str]:
    """Return sentences on the given options that set XLA's, and on those that this JAX or several devices rule out."""
    lines = []
    for option, options in describe(given, backend).items():
        wanted, value = getattr(given, option), getattr(decided, option)
        if wanted != value:
            lines.append(f"compiler: {option} is {value} here, not {wanted}, which is for one device")
            continue
        unknown = [name for name, value in options.items() if not is_known(name, value)]
        known = [f"{name}={value}" for name, value in options.items() if name not in unknown]
        lines += [f"compiler: {option} is XLA's {', '.join(known)}"] if known else []
        lines += [f"compiler: this JAX has no {', '.join(unknown)}, which {option} would set"] if unknown else []
    return lines


@functools.cache
def is_known(name: str, value: Any) -> bool:
    """Say whether this JAX accepts a compiler option, by compiling a trivial program with it."""
    try:
        # JAX has no list of names to ask; XLA checks them when it compiles. For the host, which compiles faster and
        # has the same list.
        with jax.default_device(host_device()):
            jax.jit(lambda x: x + 1).lower(jnp.zeros(())).compile(compiler_options={name: value})
    except (jax.errors.JaxRuntimeError, TypeError, ValueError, RuntimeError):
        return False
    return True
