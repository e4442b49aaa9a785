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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.cli.options import Parsed, writing
from headrace.config.field import normalise_name, option_names
from headrace.config.translations import known_options
from headrace.core.errors import ConfigError, RunStopped, did_you_mean
from headrace.core.json_text import parse_json
from headrace.core.units import format_measured


def append(output: Path | None, line: str) -> None:
    if output is not None:
        with writing(output, "--output"), output.open("a") as file:
            file.write(line + "\n")


PRINTED = ("min", "mean", "p50", "p99", "max")  # the JSON has more percentiles


SHIPPED = Path(__file__).parent.parent / "config" / "benchmarks.yml"
_KEYS = ("about", "mode", "options", "sweep", "launch", "data", "one_device", "mapped")
_NAMES_DATA = ("--dataset-path", "--data-dir", "--synthetic-data", "--generated-data")
MODES = ("training", "inference")


@dataclass(frozen=True, kw_only=True)
class NamedBenchmark:
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


def read_entries(path: Path) -> dict[str, NamedBenchmark]:
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


def _entry(path: Path, name: str, values: object) -> NamedBenchmark:
    place = f"{path.name}: {name}"
    if not isinstance(values, dict):
        raise ConfigError(f"{place} is not a mapping.", rule=f"It has the keys {', '.join(_KEYS)}.")
    for key in values:
        if key not in _KEYS:
            raise ConfigError(f"{place} has the key {key!r}.", remedy=did_you_mean(str(key), _KEYS))
    mode = values.get("mode", "training")
    if mode not in MODES:
        raise ConfigError(f"{place}: mode is {mode!r}.", rule=f"It is one of {', '.join(MODES)}.")
    sweep = values.get("sweep", {})
    if not isinstance(sweep, dict) or not all(isinstance(each, list) and each for each in sweep.values()):
        raise ConfigError(f"{place}: sweep is {sweep!r}.", rule="It maps options to lists of values.")
    given = {key: tuple(shlex.split(str(values.get(key, "")))) for key in ("options", "launch", "data", "one_device")}
    about, mapped = (str(values.get(key, "")) for key in ("about", "mapped"))
    return NamedBenchmark(name=name, mode=mode, sweep=sweep, about=about, mapped=mapped, **given)


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


def describe_entries(entries: dict[str, NamedBenchmark]) -> str:
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
    append(output, json.dumps(result))
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
