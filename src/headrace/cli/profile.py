"""`headrace profile [RUN_DIR] [options]`: record a few calls of training and print where the time went."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from headrace.cli.options import print_remarks, read_arguments, read_config_arguments, resolve_arguments
from headrace.core.errors import ConfigError

DESCRIPTION = (
    "Record a few calls of training after two that warm up, and print where the time of the devices went: by kind of "
    "work and by block, the slowest kernels, and how much of the device's arithmetic and memory bandwidth was used. "
    "Of a run that was profiled (train --profile), print that; of another run, profile its options."
)


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    run = Path(argv[0]) if argv and not argv[0].startswith("-") else None
    read = read_config_arguments if run is None else read_arguments
    parsed = read(argv[1:] if run else argv, "headrace profile", add_arguments, DESCRIPTION)
    args = parsed.args
    from headrace.run.profiling import FOLDER, read_profile
    from headrace.telemetry.device_trace import profile_lines

    folder = args.output or (run / FOLDER if run else Path(FOLDER))
    if run is not None and not run.is_dir():
        raise ConfigError(f"There is no run {run}.", remedy="`headrace runs` lists runs; without one, give options.")
    found = read_profile(folder) if run is not None and not parsed.options and not args.again else None
    if found is None:
        from headrace.run.benchmarks import profile_calls

        if run is None:
            resolved = resolve_arguments(parsed)
            print_remarks(resolved)
        else:
            from headrace.reference.entrance import override
            from headrace.run.directory import read_run

            resolved = override(read_run(run)[1], dict(parsed.options))
        config = resolved.config
        resolved = replace(resolved, config=replace(config, run=replace(config.run, profile=False)))
        found = profile_calls(resolved, folder, steps_per_call=args.steps_per_call)
    if args.json:
        print(json.dumps(found.to_dict()))
        return 0
    print("\n".join(profile_lines(found)))
    print(f"trace: {folder} (TensorBoard's profile plugin, ui.perfetto.dev)")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only this command has."""
    parser.add_argument("--steps-per-call", type=int, default=10, metavar="N", help="steps of one device call [10]")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the trace [RUN_DIR/profile, or profile]")
    parser.add_argument("--again", action="store_true", help="profile a run's options anew")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
