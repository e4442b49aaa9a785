"""`headrace bench`: images per second of the training path, first call left out, as a table and one line of JSON."""

import argparse
import json

from headrace.cli.options import parse, print_remarks

DESCRIPTION = (
    "Measure training: the real feed and device loop, without validation, records and checkpoints. "
    "With --dataset synthetic nothing but the device is measured, with --dataset generated the transfer as well."
)


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""

    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--steps-per-call", type=int, default=50, metavar="N", help="steps of one device call [50]")
        parser.add_argument("--num-calls", type=int, default=5, metavar="N", help="timed calls, after one untimed [5]")
        parser.add_argument("--json", action="store_true", help="print the line of JSON alone")

    resolved, own = parse(argv, "headrace bench", extra, DESCRIPTION)
    from headrace.core.units import format_bytes
    from headrace.run.bench import bench

    print_remarks(resolved)
    result = bench(resolved, steps_per_call=own.steps_per_call, num_calls=own.num_calls)
    if not own.json:
        print(f"{result.model} on {result.dataset}, precision {result.precision}, {result.device}")
        sizes = (result.micro_batch_size, result.num_replicas, result.gradient_accumulation_count)
        print(
            f"global batch {result.global_batch_size} ({sizes[0]} x {sizes[1]} replicas x {sizes[2]} accumulated), "
            f"{result.num_calls} calls of {result.steps_per_call} steps"
        )
        print(
            f"{result.images_per_second:,.0f} img/s (median; {result.lowest:,.0f} to {result.highest:,.0f}), "
            f"{result.step_milliseconds:.3g} ms per step; compiled in {result.compile_seconds:.1f} s "
            f"({result.compile_cache}); one device holds {format_bytes(result.device_bytes)}"
        )
    print(json.dumps(result.to_dict()))
    return 0
