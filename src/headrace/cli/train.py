"""`headrace train`, `resume` and `lr-find`: start a run, continue one, or find a learning rate by a short one."""

import argparse
import os
import shlex
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.options import (
    Parsed,
    check_output,
    parse,
    print_remarks,
    read_arguments,
    read_config_arguments,
    resolve_arguments,
    terminal_width,
    writing,
)
from headrace.core.local_path import local_path
from headrace.core.units import format_duration
from headrace.job import Restart, detect_process_info, detect_restart
from headrace.reference.entrance import take_value, without_recipe

if TYPE_CHECKING:
    from headrace.config.load import Resolved
    from headrace.job import ProcessInfo
    from headrace.report.run_summary import RunSummary
    from headrace.run.trained_model import RunResult

DESCRIPTION = "Train a network. Without options this is the embedded default: a small ResNet on handwritten digits."
RESUME_DESCRIPTION = "Resume a run from its newest good checkpoint, bit for bit."


def main(argv: list[str]) -> int:
    """Run `headrace train`; return its exit code."""
    path, rest = take_value(argv, "--restore-path")
    if path is not None:  # the reference's way to resume a run
        return resume([path, *rest])
    parsed = read_config_arguments(argv, "headrace train", description=DESCRIPTION)
    resolved, restart = resolve_arguments(parsed), detect_restart(os.environ)
    config = resolved.config
    if not restart and config.logging.resume != "auto" and not _is_in_job(distributed=config.run.distributed):
        from headrace.engine.visible import start_early

        start_early(config.run)
    from headrace.job import join_job
    from headrace.run.fit import train, train_or_resume

    if restart and restart.batch_replicas:
        resolved = _with_whole_batch(parsed, resolved, restart)
    with join_job(distributed=config.run.distributed) as process:
        if resolved.config.logging.resume == "auto" or restart:
            result = train_or_resume(resolved, parsed.options, restart)
        else:
            result = train(resolved)
    return _finish(result, process)


def _is_in_job(*, distributed: bool) -> bool:
    return detect_process_info(os.environ, distributed=distributed) is not None


def _with_whole_batch(parsed: Parsed, resolved: "Resolved", restart: Restart) -> "Resolved":
    """Return the configuration with the batch that it has with all replicas, of which a restart may have lost some."""
    from headrace.run.choices import with_choices
    from headrace.run.design import with_batch_of

    whole = resolve_arguments(parsed, restart.whole_environ(os.environ))
    return with_batch_of(with_choices(whole), with_choices(resolved))


def resume(argv: list[str]) -> int:
    """Run `headrace resume`; return its exit code."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "run_dir", metavar="RUN_DIR", type=local_path, help="directory of a run that was started before"
        )

    parsed = read_arguments(without_recipe(argv), "headrace resume", add_arguments, RESUME_DESCRIPTION)
    from headrace.job import join_job
    from headrace.run.fit import resume as resume_run

    restart = detect_restart(os.environ)
    with join_job(distributed=bool(parsed.options.get("distributed"))) as process:
        notes = (restart.note,) if restart and restart.number else ()
        result = resume_run(parsed.args.run_dir, parsed.options, notes=notes)
    return _finish(result, process)


def _finish(result: "RunResult", process: "ProcessInfo | None") -> int:
    """Print the table at the end of a run and average its checkpoints, in process 0; return the exit code.

    It is 75 for a run that was interrupted and can be resumed, else 0.
    """
    from headrace.core.errors import INTERRUPTED_EXIT_CODE
    from headrace.report.run_summary import read_summary

    if process is None or process.is_first:
        print("\n" + "\n".join(end_lines(result, read_summary(result.directory))))
        _make_averages(result, validate_them=process is None)
    return INTERRUPTED_EXIT_CODE if result.outcome == "interrupted" else 0


def _make_averages(result: "RunResult", *, validate_them: bool) -> None:
    """Average checkpoints as requested with the training, and validate the averages where one process can."""
    from headrace.run.directory import read_run

    # As the run saved it: a resumed one may have been asked for them when it was started, and the name of the
    # checkpoints' directory may contain the time of the start.
    config = read_run(result.directory)[1].config
    requested = config.checkpoint.average_last_epochs or config.checkpoint.average_decays
    if result.outcome not in ("finished", "stopped") or not requested:
        return
    from headrace.cli.validate import Table
    from headrace.run.averages import averages_after
    from headrace.run.validation import validate

    for made in averages_after(result.directory, config):
        print(f"{made.path.name}: of {len(made.members)} checkpoints, {made.path}")
        table = Table()
        for row in validate(made.path) if config.validation.validation and validate_them else ():
            table.show(row)


# The table at the end of a run: accuracy, best checkpoint, where the time went, what limited it, what to do next.


_COLUMN = 12


def end_lines(result: "RunResult", run: "RunSummary") -> list[str]:
    """Return the table for a run that a process has just ended; `run` is what its records say."""
    rows: list[tuple[str, str]] = []
    if result.reason:
        rows.append((result.outcome, result.reason))
    rows += _accuracy(run)
    best = run.checkpoints / run.end.best_checkpoint if run.end and run.end.best_checkpoint else None
    if best is not None and best.is_dir():
        rows.append(("checkpoint", shlex.quote(str(best))))
    if run.end is not None:
        rows.append(("time", _time(run.end.seconds, run.end.wall_seconds, run.seconds)))
        verdicts = [verdict for verdict in (run.end.model_verdict, run.end.verdict) if verdict]
        rows += [("" if place else "verdict", verdict) for place, verdict in enumerate(verdicts)]
    for name, file in (("report", run.path / "report.html"), ("plot", run.path / "curve.svg")):
        if file.is_file():
            rows.append((name, shlex.quote(str(file))))
    rows.append(("directory", shlex.quote(str(run.path))))
    rows += [("next" if not place else "", command) for place, command in enumerate(_next(result, run))]
    width = terminal_width()
    return [line for name, text in rows if text for line in _wrapped(name, text, width)]


def _wrapped(name: str, text: str, width: int | None) -> list[str]:
    """Return a row, broken to the terminal's width; paths and commands stay whole, to be copied."""
    indent = " " * _COLUMN
    if width and name not in ("checkpoint", "report", "plot", "directory") and not text.startswith("headrace "):
        lines = textwrap.wrap(text, max(30, width - _COLUMN), break_on_hyphens=False, break_long_words=False)
    else:
        lines = [text]
    return [f"{name:{_COLUMN}}{lines[0]}", *(indent + line for line in lines[1:])]


def _accuracy(run: "RunSummary") -> list[tuple[str, str]]:
    from headrace.report.run_files import accuracy_lines

    rows = [("" if place else "accuracy", line) for place, line in enumerate(accuracy_lines(run))]
    best = run.best
    if best is None or run.is_trial:
        return rows
    last = {record.weights: record for record in run.validations}  # the last one of each kind
    final = max(last.values(), key=lambda record: record.step)
    if final.step != best.step:
        row = run.monitor
        ended = ", ".join(f"{row.text(record.metric(row.name))} ({weights})" for weights, record in last.items())
        rows.insert(1, ("", f"{'' if row.name == 'top1' else f'{row.title} '}{ended} at the end"))
    if run.end is not None and run.end.time_to_target is not None:
        rows.append(("target", f"reached after {format_duration(run.end.time_to_target)}"))
    return rows


def _time(seconds: dict[str, float], wall: float | None, trained: float | None) -> str:
    """Say where the wall time of the last process went; of a resumed run, `trained` has the earlier ones' time, too."""
    from headrace.telemetry.metric_totals import KIND_NAMES

    if wall is None:
        return ""
    largest = sorted(((spent, kind) for kind, spent in seconds.items() if spent >= 0.005 * wall), reverse=True)
    parts = ", ".join(f"{KIND_NAMES.get(kind, kind)} {format_duration(spent)}" for spent, kind in largest)
    which = " of this process" if trained is not None and trained > wall else ""
    return f"{format_duration(wall)}{which}: {parts}"


def _next(result: "RunResult", run: "RunSummary") -> list[str]:
    """Return the commands that one would type next."""
    path = shlex.quote(str(run.path))
    if result.outcome == "interrupted":
        return [f"headrace resume {path}"] if result.can_resume else []
    if run.is_trial or result.outcome == "compiled" or not any(run.checkpoints.glob("*")):
        return []
    more = [f"headrace resume {path}"] if result.outcome == "stopped" else []
    missing = "" if find_spec("onnx") else "  # needs: pip install 'headrace[onnx]'"
    return [f"headrace predict {path} IMAGES", f"headrace export {path} --format onnx{missing}", *more]


# `headrace lr-find`: train a short while with a growing learning rate, plot the loss, and suggest a rate.


_LR_FIND = "Find a learning rate: a short run whose rate grows until the loss rises. Only the plot is written."


def lr_find(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    resolved, args = parse(argv, "headrace lr-find", _add_arguments, _LR_FIND)
    check_output(args.plot, "--plot")
    print_remarks(resolved)
    from headrace.core.files import write_atomic
    from headrace.report.curve_svg import draw_rates
    from headrace.run.benchmarks import find_learning_rate

    found = find_learning_rate(resolved, num_steps=args.steps, lowest=args.lowest, highest=args.highest)
    with writing(args.plot, "--plot"):
        write_atomic(args.plot, draw_rates(found.rates, found.losses, found.suggested).encode())
    where = "midway between half of the loss's fall and its lowest value"
    print(f"suggested   {found.suggested:.2g}, {where} ({len(found.rates)} steps)")
    print(f"plot        {args.plot}")
    print(f"next        headrace train {shlex.join([*_for_train(argv), '--lr', f'{found.suggested:.2g}'])}")
    return 0


def _for_train(argv: list[str]) -> list[str]:
    """Return the words of an argv without the arguments that lr-find alone has, each of which takes a value."""
    words, kept = list(argv), []
    while words:
        word = words.pop(0)
        if word.partition("=")[0] in ("--steps", "--lowest", "--highest", "--plot"):
            del words[: 0 if "=" in word else 1]
        else:
            kept.append(word)
    return kept


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="weight updates at most [100]")
    parser.add_argument("--lowest", type=float, default=1e-5, metavar="X", help="first learning rate [1e-5]")
    parser.add_argument("--highest", type=float, default=10.0, metavar="X", help="last learning rate [10]")
    parser.add_argument(
        "--plot", type=local_path, default=Path("lr-find.svg"), metavar="FILE", help="SVG [lr-find.svg]"
    )
