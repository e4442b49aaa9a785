"""`headrace bench` and `profile`: images per second of training or inference, and where the devices' time goes."""

import argparse
import itertools
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.options import (
    Parsed,
    check_output,
    print_remarks,
    read_config_arguments,
    resolve_arguments,
    writing,
)
from headrace.config.field import COMMAND_LINE, normalise_name, option_names
from headrace.core.errors import ConfigError, RunStopped, did_you_mean
from headrace.core.files import parse_json
from headrace.core.local_path import local_path
from headrace.core.units import format_bytes, format_measured
from headrace.reference.entrance import known_options

if TYPE_CHECKING:
    from headrace.config.load import Resolved
    from headrace.run.benchmarks import BenchResult, InferenceResult

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
    args.mode = args.mode or _MODES[0]
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
    from headrace.telemetry.records import finite_or_null

    line = json.dumps(finite_or_null(result.to_dict()))  # a loss may have diverged
    print(line)
    _append(args.output, line)
    return 0


def _append(output: Path | None, line: str) -> None:
    if output is not None:
        with writing(output, "--output"), output.open("a") as file:
            file.write(line + "\n")


def _print_without_effect(resolved: "Resolved") -> None:
    import jax

    from headrace.config.section_run import describe_without_effect

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
    from headrace.run.benchmarks import bench_inference

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


PRINTED = ("min", "mean", "p50", "p99", "max")  # the JSON has more percentiles


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only this command has."""
    add: Any = parser.add_argument
    add("--mode", choices=_MODES, help="what is measured [training, or what --entry says]")
    add("--steps-per-call", type=int, metavar="N", help="steps, or batches, of one device call [50]")
    add("--num-calls", "--repeat", type=int, default=5, metavar="N", help="timed calls, after one untimed [5]")
    add("--num-requests", type=int, default=100, metavar="N", help="batches timed one by one, for inference [100]")
    add("--json", action="store_true", help="print the line of JSON alone")
    add("--list", action="store_true", help="list the named benchmarks, as --entry list does")
    add("--entry", metavar="NAME", help="run a named benchmark, or all that a regular expression matches")
    add("--full-plan", action="store_true", help="run it on all its devices and processes, not on one device")
    add("--benchmarks", type=local_path, metavar="FILE", help="the file that names them [the shipped benchmarks.yml]")
    add("--output", type=local_path, metavar="FILE", help="append each line of JSON to this file as well")


# Named benchmarks, read from a YAML file. Each measurement runs in a new process.

SHIPPED = Path(__file__).parent.parent / "config" / "benchmarks.yml"
_KEYS = ("about", "mode", "options", "sweep", "launch", "data", "one_device", "mapped")
_NAMES_DATA = ("--dataset-path", "--data-dir", "--synthetic-data", "--generated-data")
_MODES = ("training", "inference")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One named benchmark; benchmarks.yml says what its parts mean."""

    name: str
    mode: str
    options: tuple[str, ...]
    about: str = ""
    sweep: dict[str, list[Any]] = field(default_factory=dict)
    launch: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    one_device: tuple[str, ...] = ()
    mapped: str = ""

    def points(self, given: Iterable[str] = ()) -> list[dict[str, Any]]:
        """Return the values of the swept options, one dict for each measurement.

        Options given by hand, under any of their names, are not swept.
        """
        known = option_names(known_options())

        def option(name: str) -> str:
            name = normalise_name(name)
            return known[name].name if name in known else name

        fixed = {option(name) for name in given}
        sweep = {name: values for name, values in self.sweep.items() if option(name) not in fixed}
        return [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]

    def command(self, point: dict[str, Any], more: list[str], *, full_plan: bool = False) -> list[str]:
        """Return the arguments of `headrace` that measure one point; options given by hand come last and win."""
        swept = [part for name, value in point.items() for part in (f"--{name}", str(value))]
        data = () if any(word.split("=")[0] in _NAMES_DATA for word in more) else self.data
        mapped = () if full_plan else self.one_device
        bench = ["bench", "--mode", self.mode, *self.options, *data, *mapped, *swept, *more, "--json"]
        return ["launch", *self.launch, "--", *bench] if self.launch and full_plan else bench


def read_entries(path: Path) -> dict[str, Entry]:
    """Return the benchmarks of a file by name; unknown keys and wrong values are refused."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", remedy="Check --benchmarks.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}.") from None
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{path} names no benchmarks.", rule="It maps names to mode, options, sweep and launch.")
    return {str(name): _entry(path, str(name), values) for name, values in found.items()}


def _entry(path: Path, name: str, values: object) -> Entry:
    place = f"{path.name}: {name}"
    if not isinstance(values, dict):
        raise ConfigError(f"{place} is not a mapping.", rule=f"It has the keys {', '.join(_KEYS)}.")
    for key in values:
        if key not in _KEYS:
            raise ConfigError(f"{place} has the key {key!r}.", remedy=did_you_mean(str(key), _KEYS))
    mode = values.get("mode", "training")
    if mode not in _MODES:
        raise ConfigError(f"{place}: mode is {mode!r}.", rule=f"It is one of {', '.join(_MODES)}.")
    sweep = values.get("sweep", {})
    if not isinstance(sweep, dict) or not all(isinstance(each, list) and each for each in sweep.values()):
        raise ConfigError(f"{place}: sweep is {sweep!r}.", rule="It maps options to lists of values.")
    given = {key: tuple(shlex.split(str(values.get(key, "")))) for key in ("options", "launch", "data", "one_device")}
    about, mapped = (str(values.get(key, "")) for key in ("about", "mapped"))
    return Entry(name=name, mode=mode, sweep=sweep, about=about, mapped=mapped, **given)


def run_entries(argv: list[str], parsed: Parsed) -> int:
    """List the benchmarks, or run those that `--entry` names."""
    args = parsed.args
    entries = read_entries(args.benchmarks or SHIPPED)
    if args.list or args.entry == "list":
        print(describe_entries(entries))
        return 0
    try:
        chosen = [entry for entry in entries.values() if re.fullmatch(args.entry, entry.name)]
    except re.error as error:
        raise ConfigError(f"--entry {args.entry} is not a regular expression: {error}.") from None
    if not chosen:
        raise ConfigError(
            f"There is no benchmark {args.entry}.",
            rule="`headrace bench --entry list` lists them.",
            remedy=did_you_mean(args.entry, entries),
        )
    if args.mode and any(entry.mode != args.mode for entry in chosen):
        modes = ", ".join(f"{entry.name} measures {entry.mode}" for entry in chosen if entry.mode != args.mode)
        raise ConfigError(f"--mode {args.mode} is given, but {modes}.", remedy="Leave --mode out.")
    more = _others(argv)
    results = []
    for entry in chosen:
        if entry.mapped and not args.full_plan:
            print(f"{entry.name} on one device: {entry.mapped} (--full-plan: as written)", file=sys.stderr)
        for point in entry.points(parsed.options):
            command = entry.command(point, more, full_plan=args.full_plan)
            results.append(_measured({"entry": entry.name, "point": point}, command, args.output))
    if not args.json:
        _print_table(results)
    return 0 if all("problem" not in result for result in results) else 1


def _others(argv: list[str]) -> list[str]:
    """Return the options of an argv that every measurement gets as well."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--entry", "--benchmarks", "--output", "--mode"):
        parser.add_argument(name)
    for name in ("--json", "--full-plan"):
        parser.add_argument(name, action="store_true")
    return parser.parse_known_args(argv)[1]


def describe_entries(entries: dict[str, Entry]) -> str:
    """Return a list of the benchmarks: the name, then what it measures and what becomes of its plan on one device."""
    lines = []
    for entry in entries.values():
        lines.append(f"{entry.name}  ({entry.mode})")
        swept = [f"{name} {', '.join(map(str, each))}" for name, each in entry.sweep.items()]
        mapped = [f"on one device: {entry.mapped}"] if entry.mapped else []
        for text in (entry.about, *swept, *mapped):
            lines += textwrap.wrap(text, 78, initial_indent="    ", subsequent_indent="      ")
    return "\n".join(lines)


def _measured(result: dict[str, Any], command: list[str], output: Path | None) -> dict[str, Any]:
    """Measure one point in a new process, so that nothing of the one before is left on the device."""
    print(f"$ headrace {shlex.join(command)}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "headrace", *command], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode < 0:
        raise RunStopped(f"{result['entry']} was ended by signal {-done.returncode}.")
    # A launcher puts the number of the process in front of each line.
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if line.endswith("}") and "{" in line]
    try:
        result = result | parse_json(lines[-1])
    except (IndexError, ValueError):
        result["problem"] = "it printed no result"
    if done.returncode:
        result["problem"] = f"exit code {done.returncode}"
    print(json.dumps(result), flush=True)
    _append(output, json.dumps(result))
    return result


def _print_table(results: list[dict[str, Any]]) -> None:
    """Print the rates as the reference's users work them out, the mean of calls but the first; then the latencies."""
    rates = {"img/s": "mean", "±": "standard_deviation"}
    _print_columns("", results, {title: [result.get(key) for result in results] for title, key in rates.items()})
    timed = [result for result in results if result.get("latency_milliseconds")]
    if timed:
        columns = {name: [result["latency_milliseconds"][name] for result in timed] for name in PRINTED}
        _print_columns("latency of one batch, in ms", timed, columns)


def _print_columns(heading: str, results: list[dict[str, Any]], columns: dict[str, list[float | None]]) -> None:
    points = [" ".join(f"{name}={value}" for name, value in result["point"].items()) for result in results]
    titled = [f"{result['entry']}  {point}".rstrip() for result, point in zip(results, points, strict=True)]
    width = max(map(len, [*titled, "entry"]))
    if heading:
        print(f"\n{heading}")
    print(f"{'entry':{width}} " + " ".join(f"{title:>6}" for title in columns))
    for title, result, values in zip(titled, results, zip(*columns.values(), strict=True), strict=True):
        shown = " ".join(f"{format_measured(value):>6}" for value in values if value is not None)
        print(f"{title:{width}} {result.get('problem', shown)}")


# `headrace profile [RUN_DIR] [options]`: record a few calls of training and print where the time went.


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
    from headrace.telemetry.device_trace import profile_lines

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
            from headrace.reference.entrance import override
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
