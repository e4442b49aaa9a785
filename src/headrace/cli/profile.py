"""`headrace profile [RUN_DIR] [options]`: record a few calls of training and print where the time went."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from headrace.cli.bench import call_length
from headrace.cli.options import print_remarks, read_config_arguments, resolve_arguments
from headrace.core.errors import ConfigError
from headrace.core.local_path import local_path

_PROFILE = (
    "Record a few calls of training after two that warm up, and print where the time of the devices went: by kind of "
    "work and by block, the slowest kernels, and how much of the device's arithmetic and memory bandwidth was used. "
    "Of a run that was profiled (train --profile), print that; of another run, profile its options."
)


def profile(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parsed = read_config_arguments(argv, "headrace profile", _add_profile_arguments, _PROFILE)
    args, run = parsed.args, parsed.args.run
    if run is not None and (args.config or args.config_path):
        raise ConfigError(f"A recipe and the run {run} are given.", rule="A run has its own options.")
    from headrace.run.profiling import FOLDER, read_profile
    from headrace.telemetry.profile_text import profile_lines

    folder = args.output or (run / FOLDER if run else Path(FOLDER))
    if run is not None and not run.is_dir():
        raise ConfigError(f"There is no run {run}.", remedy="`headrace runs` lists runs; without one, give options.")
    # What a folder of another name holds may be another run's profile.
    anew = args.again or args.output is not None or bool(parsed.options)
    found = read_profile(folder) if run is not None and not anew else None
    is_new = found is None
    if found is None:
        from headrace.run.benchmarks import profile_calls

        if run is None:
            resolved = resolve_arguments(parsed)
            print_remarks(resolved)
        else:
            from headrace.config.load import override
            from headrace.run.directory import read_run

            resolved = override(read_run(run)[1], dict(parsed.options))
        config = resolved.config
        resolved = replace(resolved, config=replace(config, run=replace(config.run, profile=False)))
        found = profile_calls(resolved, folder, steps_per_call=call_length(resolved, args.steps_per_call, 10))
    if args.json:
        print(json.dumps(found.to_dict()))
        return 0
    print("\n".join(profile_lines(found)))
    if not is_new:
        print("recorded earlier; --again profiles the run anew")
    print(f"trace: {folder} (TensorBoard's profile plugin, ui.perfetto.dev)")
    return 0


def _add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only this command has."""
    parser.add_argument("run", nargs="?", type=local_path, metavar="RUN_DIR", help="a run, whose options are profiled")
    parser.add_argument("--steps-per-call", type=int, metavar="N", help="steps of one device call [10]")
    parser.add_argument(
        "--output", type=local_path, metavar="DIR", help="folder of the trace [RUN_DIR/profile, or profile]"
    )
    parser.add_argument("--again", action="store_true", help="profile a run's options anew")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
