"""`headrace sweep`: runs for several values of options, or for several folds of the data, and what came of them."""

import argparse
import math
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.options import Parsed, read_config_arguments, resolve_arguments
from headrace.cli.tables import Column, fit_columns, print_fitted, table_lines, terminal_width
from headrace.config.field import Option, normalise_name, option_names
from headrace.config.section_data import OF_LABELS
from headrace.config.translations import known_options
from headrace.core.errors import ConfigError
from headrace.core.local_path import local_path
from headrace.core.units import format_percent
from headrace.rows.values import BOOL, MAPPING, PATH

if TYPE_CHECKING:
    from headrace.report.run_summary import RunSummary
    from headrace.run.sweep import Sweep

DESCRIPTION = "Train once for each combination of values: --lr 0.01,0.03 --model resnet18,resnet34 makes four runs."
_PLACE = ("output", "log_dir", "run_name", "resume")
_LETTERS_OF_PAGE = 26  # runs that a comparison draws


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parsed = read_config_arguments(argv, "headrace sweep", _add_arguments, DESCRIPTION)
    axes = _axes(parsed)
    folds = parsed.args.folds
    if folds is not None and folds < 2:
        raise ConfigError(f"--folds is {folds}.", rule="There are two folds or more.")
    if parsed.args.jobs < 1:
        raise ConfigError(f"--jobs is {parsed.args.jobs}.", rule="At least one run at a time.")
    if not axes and not folds:
        raise ConfigError(
            "Nothing is swept: each option has one value.", remedy="Separate values by commas, as in --lr 0.01,0.03."
        )
    names = {name: _names()[normalise_name(name)].name for name in parsed.options}
    directory = _directory(parsed, names)
    common = {name: value for name, value in parsed.options.items() if names[name] not in _PLACE and name not in axes}
    chosen = [f"--{flag.replace('_', '-')}={value}" for flag, value in _recipe(parsed.args)]
    # Each combination is read before anything starts: a value that cannot be is met now, not hours later.
    from headrace.run.sweep import FOLD, Sweep, fold_file, is_sweep, plan_runs, save_sweep

    first = None
    for point in plan_runs(axes, lambda _: []):
        resolved = resolve_arguments(Parsed(options={**common, **point.values}, args=parsed.args))
        first = first or resolved
    files = [fold_file(directory, number + 1).absolute() for number in range(folds or 0)]
    if first and files and not is_sweep(directory):  # of a sweep that goes on, they stay as they are
        from headrace.data.sets.folds import write_folds

        print_fitted(f"folds: {write_folds(first.config.data, files)}")

    def arguments(values: Mapping[str, str]) -> list[str]:
        mine = {name: value for name, value in values.items() if name != FOLD}
        labels = ["--labels", str(files[int(values[FOLD]) - 1])] if FOLD in values else []
        plain = {name: value for name, value in common.items() if not (labels and names[name] in OF_LABELS)}
        return [*chosen, *_words({**plain, **mine}), *labels]

    every = {**axes, **({FOLD: [str(k + 1) for k in range(folds)]} if folds else {})}
    runs = tuple(plan_runs(every, arguments))
    sweep = Sweep(directory=directory, runs=runs, jobs=parsed.args.jobs, started_in=Path.cwd())
    save_sweep(sweep)
    return _run(sweep)


def resume(directory: Path, argv: list[str]) -> int:
    """Continue the sweep in a directory; return the exit code."""
    from headrace.run.sweep import read_sweep

    if argv:
        raise ConfigError(
            f"{directory} is a sweep, and {' '.join(argv)} is given.",
            rule="A sweep is continued as it was started.",
            remedy=f"headrace resume {shlex.quote(str(directory))}",
        )
    return _run(read_sweep(directory))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folds", type=int, metavar="K", help="validate on each of K parts, train on the others")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time, a GPU for each [1]")


def _names() -> Mapping[str, Any]:
    return option_names(known_options())


def _option(name: str) -> Option | None:
    spelled = _names()[normalise_name(name)]
    return None if spelled.negated else known_options()[spelled.name]


def _axes(parsed: Parsed) -> dict[str, list[str]]:
    """Return the options that have several values, separated by commas: not lists, mappings and paths."""
    axes: dict[str, list[str]] = {}
    for name, value in parsed.options.items():
        option = _option(name)
        if option is None or not isinstance(value, str) or "," not in value:
            continue
        if option.kind.many or option.kind in (BOOL, MAPPING, PATH) or Path(value).exists():
            continue
        values = [word.strip() for word in value.split(",")]
        if not all(values) or len(set(values)) < len(values):
            what = "an empty value" if not all(values) else "a value twice"
            raise ConfigError(f"--{name.replace('_', '-')} has {what}: {value}.", remedy="Give each value once.")
        axes[name] = values
    return axes


def _directory(parsed: Parsed, names: Mapping[str, str]) -> Path:
    given = {names[name]: value for name, value in parsed.options.items() if names[name] in _PLACE}
    if "resume" in given:
        raise ConfigError("--resume is given.", rule="The same command continues a sweep by itself.")
    if "output" in given:
        return local_path(given["output"])
    name = given.get("run_name") or f"sweep-{time.strftime('%Y%m%d-%H%M%S')}"
    return local_path(given.get("log_dir") or "runs") / name


def _recipe(args: argparse.Namespace) -> list[tuple[str, str]]:
    return [(name, str(value)) for name in ("config", "config_path") if (value := getattr(args, name)) is not None]


def _words(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value is True:
            words.append(flag)
        else:
            words.append(f"{flag}={value}")
    return words


def _run(sweep: "Sweep") -> int:
    from headrace.run.sweep import run_sweep

    print_fitted(f"sweep of {len(sweep.runs)} runs in {sweep.directory}")
    code = run_sweep(sweep, lambda text: print(text, flush=True))
    _show_results(sweep)
    if code:
        print(f"next        headrace resume {shlex.quote(str(sweep.directory))}")
    return code


def _show_results(sweep: "Sweep") -> None:
    """Print the table of all runs, the means over seeds and folds, and write the page that compares them."""
    from headrace.report.run_report import COMPARISON_FILE, write_comparison
    from headrace.run.sweep import repeated

    pairs = [(run, sweep.summary(run)) for run in sweep.runs]
    pairs.sort(key=lambda pair: math.inf if (merit := _merit(pair[1])) is None else -merit)
    axes = list(sweep.runs[0].values)
    columns = [Column(title=name.replace("_", " "), cells=[run.values[name] for run, _ in pairs]) for name in axes]
    columns += [
        Column(title="top-1", cells=[_accuracy(summary) for _, summary in pairs], right=True),
        Column(title="images", cells=[_images(summary) for _, summary in pairs], right=True, spare=1),
        Column(
            title="time", cells=[summary.time_text if summary else "-" for _, summary in pairs], right=True, spare=2
        ),
        Column(title="state", cells=[summary.state_text if summary else "not started" for _, summary in pairs]),
        Column(title="run", cells=[run.name for run, _ in pairs], spare=3),
    ]
    print("\n" + "\n".join(table_lines(fit_columns(columns, terminal_width())[0])))
    means = [row for row in repeated(sweep) if row.spread is not None]
    for row in means:
        what = ", ".join(f"{name} {value}" for name, value in row.values.items())
        spread = f"{format_percent(row.mean)} +- {100 * (row.spread or 0):.2f}"
        print_fitted(f"mean        {spread} over {len(row.accuracies)} runs{': ' + what if what else ''}")
    begun = [summary for _, summary in pairs if summary is not None and summary.start is not None]
    if not begun:
        return
    shown = begun[:_LETTERS_OF_PAGE]
    file = sweep.directory / COMPARISON_FILE
    table = [
        (*(run.values[name] for name in axes), _accuracy(summary), _images(summary), run.name) for run, summary in pairs
    ]
    rows = [
        (*row.values.values(), format_percent(row.mean), f"{100 * (row.spread or 0):.2f}", str(len(row.accuracies)))
        for row in means
    ]
    tables = [("Runs, best first", (*axes, "top-1", "images", "run"), table)]
    if means:
        kept = [name for name in axes if name in means[0].values]
        heading = (*kept, "mean top-1", "standard deviation, in points", "runs")
        tables.insert(0, ("Means over seeds and folds", heading, rows))
    write_comparison(shown, file, tables)
    print(f"comparison  {shlex.quote(str(file))}")


def _accuracy(run: "RunSummary | None") -> str:
    return run.score_text if run else "-"


def _merit(run: "RunSummary | None") -> float | None:
    """Return how good a run is, more is better."""
    return run.headline.merit(run.score) if run and run.score is not None else None


def _images(run: "RunSummary | None") -> str:
    return f"{run.best.num_samples:,}" if run and run.best else "-"
