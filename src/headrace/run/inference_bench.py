"""Measure inference: images per second and latency of the forward program of a run."""

import time
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import jax

from headrace.config.load import Resolved
from headrace.data.dataset import DataSet
from headrace.data.feeding.cache import make_resident
from headrace.data.feeding.feed import RepeatedFeed
from headrace.engine.devices import run_in_calling_thread, start_run_devices
from headrace.engine.forward import LOGITS, stored_for_inference
from headrace.engine.ready import Ready
from headrace.job import current_group
from headrace.run.benchmarks import BenchedCalls, call_rates, conditions, given_weights, latencies, refuse_less
from headrace.run.choices import settle
from headrace.run.design import Design, design_run, open_data, with_set
from headrace.run.memory_advice import advise_on_memory
from headrace.run.training import Compiled, compiled_from
from headrace.run.validator import make_forward_pass
from headrace.telemetry.call_reader import CallReader


@dataclass(frozen=True, kw_only=True)
class InferenceResult(BenchedCalls):
    """The throughput of inference, and the latencies of single batches (empty where none were requested)."""

    mode: ClassVar[str] = "inference"
    batch_size: int
    batches_per_call: int
    latency_milliseconds: dict[str, float]
    num_requests: int


def bench_inference(resolved: Resolved, *, batches_per_call: int, num_calls: int, num_requests: int) -> InferenceResult:
    """Run `num_calls` + 1 calls back to back, the first untimed, then `num_requests` batches one by one."""
    refuse_less(1, steps_per_call=batches_per_call, num_calls=num_calls)
    refuse_less(0, num_requests=num_requests)
    found = with_set(resolved.config, absent_ok=True)
    config, group = settle(resolved, found).config, current_group()
    design = design_run(config, found, group.num_processes)
    dataset = open_data(design)
    plan = design.plan.validation
    if plan.num_replicas == 1:
        run_in_calling_thread()
    devices = start_run_devices(config.run, plan.num_replicas, group.num_processes)
    with advise_on_memory(design, validates=True):
        bench = _InferenceBench(design, dataset, devices)
        compiled, seconds = bench.time_calls(batches_per_call, num_calls + 1)
        single = bench.time_requests(num_requests) if num_requests else []
    return InferenceResult(
        conditions=conditions(config, compiled, devices),
        rates=call_rates(batches_per_call * plan.batch_size, seconds),
        micro_batch_size=plan.micro_batch_size,
        num_replicas=plan.num_replicas,
        first_call_seconds=seconds[0],
        batch_size=plan.batch_size,
        batches_per_call=batches_per_call,
        latency_milliseconds=latencies(single) if single else {},
        num_requests=num_requests,
    )


class _InferenceBench:
    """The network with its weights on the devices, timed on blocks of the validation split."""

    def __init__(self, design: Design, dataset: DataSet, devices: list[Any]) -> None:
        self._source, self._batch_size = dataset.validation, design.plan.validation.batch_size
        self._forward, self._options = make_forward_pass(design, devices, LOGITS)
        weights = given_weights(design) or design.network.init(design.config.run.seed)
        # Rounded once: a server would not convert its weights at every request.
        stored = (stored_for_inference(weights[0], design.precision.compute_dtype), weights[1])
        on_device = self._options.cache.where == "device"
        resident = make_resident(self._source, self._forward.put, self._options.shard) if on_device else None
        self._held = (self._forward.place(stored), resident)  # what stays on the devices

    def time_calls(self, batches_per_call: int, num_calls: int) -> tuple[Compiled, list[float]]:
        """Return the program and the seconds of each call; the next call starts while one runs."""
        feed = RepeatedFeed(
            self._source, (batches_per_call, self._batch_size), num_calls, self._options, self._forward.put
        )
        ends: list[float] = []

        def wait(scores: jax.Array) -> None:
            _fetch(scores)
            ends.append(time.perf_counter())

        with closing(feed), closing(CallReader(wait)) as reader:
            block = feed.next()
            compiled, ready = self._ready(block)
            ends.append(time.perf_counter())
            for number in range(num_calls):
                scores = ready(self._held[1], block)
                # Starts as soon as the scores are there; asked for later, the copy would wait for the next call, which
                # is launched by then.
                scores.copy_to_host_async()
                reader.submit(scores)
                if number + 1 < num_calls:
                    block = feed.next(scores)
                    reader.keep_up()
            reader.drain()
        return compiled, [after - before for before, after in pairwise(ends)]

    def time_requests(self, num_requests: int) -> list[float]:
        """Return the seconds from a batch in the host's memory to its scores there, one batch at a time."""
        feed = RepeatedFeed(self._source, (1, self._batch_size), num_requests + 1, self._options, lambda tree, _: tree)
        seconds = []
        with closing(feed):
            block = feed.next()
            _, ready = self._ready(self._forward.put(block, "batches"))
            for number in range(num_requests + 1):
                begin = time.perf_counter()
                _fetch(ready(self._held[1], self._forward.put(block, "batches")))
                seconds.append(time.perf_counter() - begin)
                if number < num_requests:
                    block = feed.next()
        return seconds[1:]  # the first is a warm-up

    def _ready(self, block: object) -> tuple[Compiled, Ready]:
        """Compile for such a block, and wait for what is computed from the weights alone."""
        compiled = compiled_from(lambda: self._forward.compile(*self._held, block))
        ready = Ready.of(compiled.program, *self._held, block)
        jax.block_until_ready(ready.prepared)
        return compiled, ready


def _fetch(scores: jax.Array) -> None:
    """Wait until the host has the scores of this process's devices."""
    jax.device_get([shard.data for shard in scores.addressable_shards])
