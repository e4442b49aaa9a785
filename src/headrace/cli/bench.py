"""`headrace bench`: images per second of training or inference, the first call left out, in words and as JSON."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.options import print_remarks, read_config_words, resolve_words

if TYPE_CHECKING:
    from headrace.config.load import Resolved
    from headrace.run.bench import BenchResult
    from headrace.run.bench_inference import InferenceResult

DESCRIPTION = (
    "Measure training (the real feed and device loop, without validation, records and checkpoints) or inference. With "
    "--synthetic-data nothing but the device is measured, with --generated-data the transfer as well, on real data all."
)


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    words = read_config_words(argv, "headrace bench", add_arguments, DESCRIPTION)
    own = words.own
    if own.list or own.entry:
        from headrace.cli.bench_entries import run_entries

        return run_entries(argv, own)
    resolved = resolve_words(words)
    from headrace.run.join import joined

    with joined(distributed=resolved.config.run.distributed) as place:
        own.mine = place is None or place.is_first  # the rates are those of all processes; one tells them
        if own.mine:
            print_remarks(resolved)
        result = {"training": _training, "inference": _inference}[own.mode](resolved, own)
    if not own.mine:
        return 0
    _tell_without_effect(resolved)
    line = json.dumps(result.to_dict())
    print(line)
    if own.output is not None:
        with own.output.open("a") as file:
            file.write(line + "\n")
    return 0


def _tell_without_effect(resolved: "Resolved") -> None:
    import jax

    from headrace.config.no_effect import told_without_effect

    for text in told_without_effect(resolved.config, jax.default_backend()):
        print(f"note: {text}", file=sys.stderr)


def _training(resolved: "Resolved", own: argparse.Namespace) -> "BenchResult":
    from headrace.core.units import format_bytes
    from headrace.run.bench import bench

    result = bench(resolved, steps_per_call=own.steps_per_call, num_calls=own.num_calls)
    how = result.conditions
    if own.mine and not own.json:
        print(f"training {how.model} on {how.dataset}, precision {how.precision}, {how.device}")
        sizes = (result.micro_batch_size, result.num_replicas, result.gradient_accumulation_count)
        print(
            f"global batch {result.global_batch_size} ({sizes[0]} x {sizes[1]} replicas x {sizes[2]} accumulated), "
            f"{result.num_calls} calls of {result.steps_per_call} steps"
        )
        print(
            f"{result.rates}, {result.step_milliseconds:.3g} ms per step; compiled in {how.compile_seconds:.1f} s "
            f"({how.compile_cache}); one device holds {format_bytes(how.device_bytes)}"
        )
    return result


def _inference(resolved: "Resolved", own: argparse.Namespace) -> "InferenceResult":
    from headrace.core.units import format_bytes
    from headrace.run.bench_inference import bench_inference

    result = bench_inference(
        resolved, batches_per_call=own.steps_per_call, num_calls=own.num_calls, num_requests=own.num_requests
    )
    how = result.conditions
    if own.mine and not own.json:
        print(f"inference of {how.model} on {how.dataset}, precision {how.precision}, {how.device}")
        print(
            f"batch {result.batch_size} ({result.micro_batch_size} x {result.num_replicas} replicas), "
            f"{len(result.rates.each)} calls of {result.batches_per_call} batches"
        )
        print(
            f"{result.rates}; compiled in {how.compile_seconds:.1f} s ({how.compile_cache}); "
            f"one device holds {format_bytes(how.device_bytes)}"
        )
        if result.latency_milliseconds:
            told = ", ".join(f"{name} {each:.3g}" for name, each in result.latency_milliseconds.items())
            print(f"latency of one batch, {result.num_requests} of them: {told} ms")
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    add: Any = parser.add_argument
    add("--mode", choices=("training", "inference"), default="training", help="what is measured [training]")
    add("--steps-per-call", type=int, default=50, metavar="N", help="steps, or batches, of one device call [50]")
    add("--num-calls", "--repeat", type=int, default=5, metavar="N", help="timed calls, after one untimed [5]")
    add("--num-requests", type=int, default=100, metavar="N", help="batches timed one by one, for inference [100]")
    add("--json", action="store_true", help="print the line of JSON alone")
    add("--list", action="store_true", help="list the named benchmarks")
    add("--entry", metavar="NAME", help="run a named benchmark, or all that a regular expression matches")
    add("--benchmarks", type=Path, metavar="FILE", help="the file that names them [the shipped benchmarks.yml]")
    add("--output", type=Path, metavar="FILE", help="append each line of JSON to this file as well")
