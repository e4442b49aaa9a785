"""What to do when a device runs out of memory: the estimate, its largest parts, and settings that would fit.

The settings keep the global batch, so that learning rate and results stay comparable.
"""

import re
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import jax

from headrace.config.schema import Config
from headrace.core.errors import ConfigError, RunStopped
from headrace.core.units import format_bytes
from headrace.engine.compiler import is_out_of_memory
from headrace.engine.visible import device_memory_bytes
from headrace.model.network import num_elements
from headrace.plan.memory import MemoryPlan, MemoryRow, widths
from headrace.plan.plan import make_plan
from headrace.plan.steps import divisors
from headrace.run.design import Design

_MOST_CHANGES, _MOST_PARTS = 3, 3
_SPARE = 0.85  # of the memory: estimates are exact to about 15 %
_CPU_SHARE = 0.5  # there XLA takes about twice the estimate (docs/explanation/planning.md)
_LESS = 0.75  # of an estimate that should have fitted but did not, or where the memory is not known
_ASKED = re.compile(r"allocat\w*\s+([\d.]+)\s*([KMGT]i?B|bytes)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Options that need less memory, and the estimate with them."""

    options: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.options} (about {format_bytes(self.num_bytes)})"


class advise_on_memory:
    """Turn a device's out-of-memory error, in the block, into an error that says what was too large and what fits."""

    def __init__(self, design: Design, *, validates: bool = False) -> None:
        self._design, self._validates = design, validates

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not is_out_of_memory(error):
            return
        on_cpu = jax.default_backend() == "cpu"
        limit = process_memory_bytes() if on_cpu else device_memory_bytes(jax.local_devices()[0])
        raise out_of_memory(self._design, str(error), limit, validates=self._validates, on_cpu=on_cpu) from error


def process_memory_bytes() -> int | None:
    """Return what a limit of the address space (ulimit -v) leaves beside what is used now, or None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = Path("/proc/self/statm")
    if limit == resource.RLIM_INFINITY or not used.exists():
        return None
    return max(1, limit - int(used.read_text().split()[0]) * resource.getpagesize())


def out_of_memory(
    design: Design, message: str, limit: int | None, *, validates: bool, on_cpu: bool = False
) -> RunStopped:
    """Return the error that users read; `message` is XLA's, `limit` the memory of a device where it is known."""
    plan = design.plan
    micro = plan.validation.micro_batch_size if validates else plan.batch.micro_batch_size
    memory = validation_memory(design) if validates else plan.memory
    asked = _ASKED.search(message)
    failed = f" (an allocation of {_size(*asked.groups())} failed)" if asked else ""
    of = f" of its {format_bytes(limit)}" if limit else ""
    problem = (
        f"The device ran out of memory{failed}: {'validation' if validates else 'training'} with {micro:,} images at "
        f"once takes about {format_bytes(memory.total_bytes)}{of}, by the estimate."
    )
    largest = sorted(memory.rows, key=lambda row: -row.num_bytes)[:_MOST_PARTS]
    parts = "; ".join(f"{row.name} {format_bytes(row.num_bytes)} ({row.detail})" for row in largest if row.num_bytes)
    # The estimate said that it fits, and it did not: then the estimate is too low, and its parts are reduced instead.
    fits = _LESS * memory.total_bytes
    if limit and memory.total_bytes > limit:
        fits = _SPARE * limit * (_CPU_SHARE if on_cpu else 1)
    found = (_validation_changes if validates else _training_changes)(design, fits)
    # XLA computes 16 bits as 32 on a CPU, which takes more memory, not less.
    useful = (change for change in found if not (on_cpu and "--precision" in change.options))
    changes = [*islice(useful, _MOST_CHANGES)]
    remedy = "No single change is enough: use a smaller network, smaller images, or more devices."
    if changes:
        same = f"the same global batch of {plan.batch.global_batch_size:,}" if not validates else "the same results"
        remedy = f"With {same}, one of these should fit: {'; '.join(map(str, changes))}."
    return RunStopped(problem, rule=f"Its largest parts: {parts}.", remedy=remedy)


def _size(number: str, unit: str) -> str:
    return format_bytes(int(number)) if unit == "bytes" else f"{number} {unit}"


def _training_changes(design: Design, fits: float) -> Iterator[Change]:
    """Yield changes of the options that fit, each as small as possible."""
    config = design.config
    batch, pipeline, numerics = design.plan.batch, config.pipeline, config.numerics
    micros = divisors(batch.micro_batch_size)[::-1]
    variants: list[tuple[str, Config]] = [("", config)]
    if not pipeline.recomputation:
        variants.append(("--recomputation", replace(config, pipeline=replace(pipeline, recomputation=True))))
    if numerics.precision == "32.32":
        variants.append(("--precision 16.32", replace(config, numerics=replace(numerics, precision="16.32"))))
    if design.plan.cache.where == "device" and not design.info.synthetic_on:
        off = replace(config, data=replace(config.data, dataset_cache="host"))
        variants.append(("--dataset-cache host", off))
    for options, changed in variants:
        # The largest micro-batch that fits: smaller ones use the device less well. Without another change it must be a
        # smaller one.
        for micro in micros if options else micros[1:]:
            count = batch.gradient_accumulation_count * batch.micro_batch_size // micro
            memory = _estimate(design, _with_micro(changed, design, micro, count))
            if memory is not None and memory <= fits:
                # To be added to the command line: a global batch that is given there implies the count.
                implied = config.batch.global_batch_size is not None
                smaller = f"--micro-batch-size {micro}" + ("" if implied else f" --gradient-accumulation-count {count}")
                given = [options, smaller if micro != batch.micro_batch_size else ""]
                yield Change(options=" ".join(filter(None, given)), num_bytes=memory)
                break


def _with_micro(config: Config, design: Design, micro: int, count: int) -> Config:
    batch = replace(
        config.batch,
        batch_size=None,
        global_batch_size=None,
        micro_batch_size=micro,
        gradient_accumulation_count=count,
        num_replicas=design.plan.batch.num_replicas,
    )
    return replace(config, batch=batch)


def _estimate(design: Design, config: Config) -> int | None:
    try:
        return make_plan(config, design.info, design.network, design.plan.num_processes).memory.total_bytes
    except ConfigError:  # such as a schedule that needs another number of micro batches
        return None


def validation_memory(design: Design) -> MemoryPlan:
    """Return the estimate of a device that validates: nothing is kept but the values between two blocks."""
    plan, network = design.plan, design.network
    compute_bytes, weight_bytes = widths(design.config.numerics.precision)
    micro = plan.validation.micro_batch_size
    sizes = [num_elements(shape) for shape in network.shapes()]
    # The input and output of the widest block, and one more array inside of it.
    widest = max(before + 2 * after for before, after in pairwise(sizes))
    data = [row for row in plan.memory.rows if "data" in row.name]
    return MemoryPlan(
        rows=(
            MemoryRow(
                name="weights",
                num_bytes=plan.num_parameters * weight_bytes,
                detail=f"{plan.num_parameters:,} parameters of {8 * weight_bytes} bits",
            ),
            MemoryRow(
                name="activations",
                num_bytes=widest * compute_bytes * micro,
                detail=f"{widest:,} per image at once, {8 * compute_bytes} bits, {micro:,} images",
            ),
            *data,
        )
    )


def _validation_changes(design: Design, fits: float) -> Iterator[Change]:
    config, micro = design.config, design.plan.validation.micro_batch_size
    total = validation_memory(design)
    activations, data = total.bytes_of("activations"), sum(r.num_bytes for r in total.rows if "data" in r.name)
    for smaller in sorted((each for each in divisors(micro) if each < micro), reverse=True):
        needed = total.total_bytes - activations + activations * smaller // micro
        if needed <= fits:
            yield Change(options=f"--validation-micro-batch-size {smaller}", num_bytes=needed)
            break
    if data and total.total_bytes - data <= fits:
        where = "--dataset-cache host" if design.plan.cache.where == "device" else "--validation-cache host"
        yield Change(options=where, num_bytes=total.total_bytes - data)
    if config.numerics.precision == "32.32" and total.total_bytes - activations // 2 <= fits:
        yield Change(options="--precision 16.32", num_bytes=total.total_bytes - activations // 2)


def measured_memory(devices: Sequence[Any]) -> dict[str, float]:
    """Return the most memory that was in use: of the fullest device, or of the process where devices do not count."""
    stats = [device.memory_stats() or {} for device in devices if device.platform != "cpu"]
    peaks = [each["peak_bytes_in_use"] for each in stats if each.get("peak_bytes_in_use")]
    if peaks:
        limit = stats[0].get("bytes_limit")
        return {"device_peak_bytes": max(peaks)} | ({"device_limit_bytes": limit} if limit else {})
    # ru_maxrss is in bytes on macOS, in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return {"process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
