"""`headrace bench`: images per second of training or inference."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from headrace.cli.benchmark_file import MODES, PRINTED, append, run_entries
from headrace.cli.options import check_output, print_remarks, read_config_arguments, resolve_arguments
from headrace.config.field import COMMAND_LINE
from headrace.core.errors import ConfigError
from headrace.core.local_path import local_path
from headrace.core.units import format_bytes, format_measured

if TYPE_CHECKING:
    from headrace.config.load import Resolved
    from headrace.run.benchmarks import BenchResult
    from headrace.run.inference_bench import InferenceResult

DESCRIPTION = (
    "Measure training (the real feed and device loop, without validation, records and checkpoints) or inference. With "
    "--synthetic-data only the device is measured, with --generated-data the transfer as well, on real data everything."
)


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parsed = read_config_arguments(argv, "headrace bench", add_arguments, DESCRIPTION)
    args = parsed.args
    check_output(args.output, "--output")
    if args.list or args.entry is not None:
        return run_entries(argv, parsed)
    args.mode = args.mode or MODES[0]
    resolved = resolve_arguments(parsed)
    from headrace.job import join_job

    with join_job(distributed=resolved.config.run.distributed) as place:
        args.prints = place is None or place.is_first  # the rates are those of all processes; one prints them
        if args.prints:
            print_remarks(resolved)
        result = {"training": _training, "inference": _inference}[args.mode](resolved, args)
    if not args.prints:
        return 0
    _print_without_effect(resolved)
    from headrace.telemetry.validation_report import finite_or_null

    line = json.dumps(finite_or_null(result.to_dict()))  # a loss may have diverged
    print(line)
    append(args.output, line)
    return 0


def _print_without_effect(resolved: "Resolved") -> None:
    import jax

    from headrace.config.section_compiler import describe_without_effect

    for text in describe_without_effect(resolved.config, jax.default_backend(), resolved.origins):
        print(f"note: {text}", file=sys.stderr)


def _training(resolved: "Resolved", args: argparse.Namespace) -> "BenchResult":
    from headrace.run.benchmarks import bench

    result = bench(resolved, steps_per_call=call_length(resolved, args.steps_per_call), num_calls=args.num_calls)
    how = result.conditions
    if args.prints and not args.json:
        print(f"training {how.model} on {how.dataset}, precision {how.precision}, {how.device}")
        sizes = (result.micro_batch_size, result.num_replicas, result.gradient_accumulation_count)
        print(
            f"global batch {result.global_batch_size} ({sizes[0]} x {sizes[1]} replicas x {sizes[2]} accumulated), "
            f"{result.num_calls} calls of {result.steps_per_call} steps"
        )
        print(
            f"{result.rates}, {format_measured(result.step_milliseconds)} ms per step; "
            f"compiled in {how.compile_seconds:.1f} s "
            f"({how.compile_cache}); one device holds {format_bytes(how.device_bytes)}"
        )
    return result


def _inference(resolved: "Resolved", args: argparse.Namespace) -> "InferenceResult":
    from headrace.run.inference_bench import bench_inference

    result = bench_inference(
        resolved,
        batches_per_call=call_length(resolved, args.steps_per_call),
        num_calls=args.num_calls,
        num_requests=args.num_requests,
    )
    how = result.conditions
    if args.prints and not args.json:
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
            times = ", ".join(f"{name} {format_measured(result.latency_milliseconds[name])}" for name in PRINTED)
            print(f"latency of one batch, {result.num_requests} of them: {times} ms")
    return result


def call_length(resolved: "Resolved", asked: int | None, default: int = 50) -> int:
    """Return the steps of a call: as asked for, or as many as --max-steps-per-call (--batches-per-step) allows."""
    most, origin = resolved.config.batch.max_steps_per_call, resolved.origins["max_steps_per_call"]
    if asked is None:
        return most if most and origin == COMMAND_LINE else min(default, most or default)
    if most and origin == COMMAND_LINE and asked > most:
        raise ConfigError(
            f"Both are given: --steps-per-call {asked} and --max-steps-per-call {most}.",
            rule="The first is the length of a call here, the second the longest call.",
            remedy="Leave one of them out.",
        )
    return asked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only this command has."""
    add: Any = parser.add_argument
    add("--mode", choices=MODES, help="what is measured [training, or what --entry says]")
    add("--steps-per-call", type=int, metavar="N", help="steps, or batches, of one device call [50]")
    add("--num-calls", "--repeat", type=int, default=5, metavar="N", help="timed calls, after one untimed [5]")
    add("--num-requests", type=int, default=100, metavar="N", help="batches timed one by one, for inference [100]")
    add("--json", action="store_true", help="print the line of JSON alone")
    add("--list", action="store_true", help="list the named benchmarks, as --entry list does")
    add("--entry", metavar="NAME", help="run a named benchmark, or all that a regular expression matches")
    add("--full-plan", action="store_true", help="run it on all its devices and processes, not on one device")
    add("--benchmarks", type=local_path, metavar="FILE", help="the file that names them [the shipped benchmarks.yml]")
    add("--output", type=local_path, metavar="FILE", help="append each line of JSON to this file as well")
