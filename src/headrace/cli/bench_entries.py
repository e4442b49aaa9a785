"""Named benchmarks: read from a YAML file, each measurement in a process of its own, a table at the end."""

import argparse
import itertools
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError, RunStopped, did_you_mean

SHIPPED = Path(__file__).parent.parent / "config" / "benchmarks.yml"
_KEYS = ("about", "mode", "options", "sweep", "launch")
_MODES = ("training", "inference")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One named benchmark."""

    name: str
    mode: str
    options: tuple[str, ...]
    about: str = ""
    sweep: dict[str, list[Any]] = field(default_factory=dict)
    launch: tuple[str, ...] = ()

    def points(self) -> list[dict[str, Any]]:
        """Return the values of the swept options, one dict for each measurement."""
        return [dict(zip(self.sweep, values, strict=True)) for values in itertools.product(*self.sweep.values())]

    def command(self, point: dict[str, Any], more: list[str]) -> list[str]:
        """Return the words behind `headrace` that measure one point; options typed by hand come last and win."""
        swept = [word for name, value in point.items() for word in (f"--{name}", str(value))]
        bench = ["bench", "--mode", self.mode, *self.options, *swept, *more, "--json"]
        return ["launch", *self.launch, "--", *bench] if self.launch else bench


def read_entries(path: Path) -> dict[str, Entry]:
    """Return the benchmarks of a file by name; what it should not hold is refused."""
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


def _entry(path: Path, name: str, values: Any) -> Entry:
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
    words = {key: tuple(shlex.split(str(values.get(key, "")))) for key in ("options", "launch")}
    return Entry(name=name, mode=mode, about=str(values.get("about", "")), sweep=sweep, **words)


def run_entries(argv: list[str], own: argparse.Namespace) -> int:
    """List the benchmarks, or run those that `--entry` names."""
    entries = read_entries(own.benchmarks or SHIPPED)
    if own.list:
        for entry in entries.values():
            swept = "; ".join(f"{name} {', '.join(map(str, each))}" for name, each in entry.sweep.items())
            print(f"{entry.name:32} {entry.mode:10} {entry.about}{f' ({swept})' if swept else ''}")
        return 0
    try:
        chosen = [entry for entry in entries.values() if re.fullmatch(own.entry, entry.name)]
    except re.error as error:
        raise ConfigError(f"--entry {own.entry} is no regular expression: {error}.") from None
    if not chosen:
        raise ConfigError(f"There is no benchmark {own.entry}.", remedy=did_you_mean(own.entry, entries))
    more = _others(argv)
    results = [_measured(entry, point, more, own.output) for entry in chosen for point in entry.points()]
    if not own.json:
        _print_table(results)
    return 0 if all("problem" not in result for result in results) else 1


def _others(argv: list[str]) -> list[str]:
    """Return the words of an argv that a measurement is to have as well."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--entry", "--benchmarks", "--output", "--mode"):
        parser.add_argument(name)
    parser.add_argument("--json", action="store_true")
    return parser.parse_known_args(argv)[1]


def _measured(entry: Entry, point: dict[str, Any], more: list[str], output: Path | None) -> dict[str, Any]:
    """Measure one point in a process of its own, so that nothing of it is left on the device."""
    command = entry.command(point, more)
    print(f"$ headrace {shlex.join(command)}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "headrace", *command], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode < 0:
        raise RunStopped(f"{entry.name} was ended by signal {-done.returncode}.")
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if line.endswith("}") and "{" in line]
    result: dict[str, Any] = {"entry": entry.name, "point": point}
    result |= json.loads(lines[-1]) if lines and not done.returncode else {"problem": f"exit code {done.returncode}"}
    print(json.dumps(result), flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(json.dumps(result) + "\n")
    return result


def _print_table(results: list[dict[str, Any]]) -> None:
    print(f"{'entry':32} {'point':34} {'img/s':>9} {'mean':>9} {'±':>7} {'p50 ms':>8} {'p99 ms':>8}")
    for result in results:
        point = " ".join(f"{name}={value}" for name, value in result["point"].items())
        if "problem" in result:
            print(f"{result['entry']:32} {point:34} {result['problem']}")
            continue
        rates = (result["images_per_second"], result["mean"], result["standard_deviation"])
        times = result.get("latency_milliseconds") or {}
        shown = "".join(f" {times[key]:8.3g}" if key in times else f" {'-':>8}" for key in ("p50", "p99"))
        print(f"{result['entry']:32} {point:34} {rates[0]:9,.0f} {rates[1]:9,.0f} {rates[2]:7,.0f}{shown}")
