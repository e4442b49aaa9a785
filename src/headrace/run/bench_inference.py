"""Measure inference: images to class scores, as `predict` computes them, on the devices and with the feed of a run.

Throughput is that of calls of several batches, prepared ahead. Latency is that of one batch at a time, from its images
in the host's memory (or on the device, for synthetic ones) to its scores in the host's memory.
"""

import time
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import jax

from headrace.config.load import Resolved
from headrace.core.errors import ConfigError
from headrace.data.cache import make_resident
from headrace.data.dataset import DataSet, open_dataset
from headrace.data.feed import RepeatedFeed, feed_options
from headrace.data.fetch import fetch
from headrace.engine.devices import replica_mesh, replicated, show_devices, start_devices, use_compilation_cache
from headrace.engine.evaluate import EvalSpec
from headrace.engine.loop import put_on
from headrace.engine.predict import make_prediction, stored_for_inference
from headrace.engine.spread import place
from headrace.run.design import Design, design_run
from headrace.run.group import current_group
from headrace.run.initial import adopt_weights
from headrace.run.rates import Measured, call_rates, conditions, latencies
from headrace.run.trainer import Compiled, compiled_from, own_share


@dataclass(frozen=True, kw_only=True)
class InferenceResult(Measured):
    """How fast inference went: also the latencies of single batches, empty where none was asked for."""

    mode: ClassVar[str] = "inference"
    batch_size: int
    batches_per_call: int
    latency_milliseconds: dict[str, float]
    num_requests: int


def bench_inference(resolved: Resolved, *, batches_per_call: int, num_calls: int, num_requests: int) -> InferenceResult:
    """Run `num_calls` + 1 calls as fast as they go, the first untimed, then `num_requests` batches one by one."""
    for name, value, least in (
        ("--steps-per-call", batches_per_call, 1),
        ("--num-calls", num_calls, 1),
        ("--num-requests", num_requests, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} is {value}.", rule=f"It is at least {least}.")
    config = resolved.config
    group = current_group()
    design = design_run(config, None, group.num_processes)
    dataset = open_dataset(config.data, config.run.seed)
    use_compilation_cache(config.run.compilation_cache_dir)
    plan = design.plan.validation
    show_devices(config.legacy.select_ipus, plan.num_replicas // group.num_processes)
    devices = start_devices(config.run.platform, plan.num_replicas, group.num_processes)
    bench = _Bench(design, dataset, devices)
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


class _Bench:
    """The network with its weights on the devices, and the blocks that it is given."""

    def __init__(self, design: Design, dataset: DataSet, devices: list[Any]) -> None:
        config, plan = design.config, design.plan.validation
        self._mesh, self._source, self._batch_size = replica_mesh(devices), dataset.validation, plan.batch_size
        options = feed_options(config.data, dataset.info, config.run.seed, plan.num_replicas)
        self._options = replace(options, share=own_share(design.plan))
        spec = EvalSpec(
            network=design.network,
            fetch=lambda resident, batch: fetch(resident, batch, self._options.preprocess, train=False),
            compute_dtype=design.precision.compute_dtype,
            half_partials=design.precision.half_partials,
            num_replicas=plan.num_replicas,
        )
        self._program = make_prediction(spec, self._mesh)
        adopted = adopt_weights(design)
        weights = (adopted.params, adopted.stats) if adopted else design.network.init(config.run.seed)
        stored = (stored_for_inference(weights[0], spec.compute_dtype), weights[1])
        on_device = self._options.cache.where == "device"
        resident = make_resident(self._source, self._put, self._options.share) if on_device else None
        self._held = (*place(stored, replicated(self._mesh)), resident)  # what stays on the devices

    def time_calls(self, batches_per_call: int, num_calls: int) -> tuple[Compiled, list[float]]:
        """Return the program and the seconds of each call; the next call starts while one runs."""
        feed = RepeatedFeed(self._source, (batches_per_call, self._batch_size), num_calls, self._options, self._put)
        with closing(feed):
            block = feed.next()
            compiled = self._compile(block)
            ends: list[float] = [time.perf_counter()]
            running: list[jax.Array] = []
            for number in range(num_calls):
                running.append(compiled.program(*self._held, block))
                running[-1].copy_to_host_async()
                if number + 1 < num_calls:
                    block = feed.next(running[-1])
                if len(running) > 1:
                    _fetch(running.pop(0))
                    ends.append(time.perf_counter())
            _fetch(running.pop())
            ends.append(time.perf_counter())
        return compiled, [after - before for before, after in pairwise(ends)]

    def time_requests(self, num_requests: int) -> list[float]:
        """Return the seconds from a batch in the host's memory to its scores there, one batch at a time."""
        feed = RepeatedFeed(self._source, (1, self._batch_size), num_requests + 1, self._options, lambda tree, _: tree)
        seconds = []
        with closing(feed):
            block = feed.next()
            program = self._compile(self._put(block, "batches")).program
            for number in range(num_requests + 1):
                begin = time.perf_counter()
                _fetch(program(*self._held, self._put(block, "batches")))
                seconds.append(time.perf_counter() - begin)
                if number < num_requests:
                    block = feed.next()
        return seconds[1:]  # the first is a warm-up

    def _put(self, tree: Any, kind: str) -> Any:
        return put_on(self._mesh)(tree, kind)

    def _compile(self, block: Any) -> Compiled:
        return compiled_from(lambda: self._program.lower(*self._held, block).compile())


def _fetch(scores: jax.Array) -> None:
    """Wait until the host has the scores of this process's devices."""
    jax.device_get([shard.data for shard in scores.addressable_shards])
